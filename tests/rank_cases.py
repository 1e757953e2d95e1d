"""What ranks are told, for tests in which all of them must be told the same."""

from collections.abc import Callable

from quickseek.errors import RankDisagreement


def told_by(attempt: Callable[[], object], *errors: type[Exception]) -> str:
    """Kind and text of the error that ``attempt`` raises: a ValueError, a RankDisagreement or one of ``errors``."""
    try:
        attempt()
    except (ValueError, RankDisagreement, *errors) as error:
        return f"{type(error).__name__}: {error}"
    return "not noticed"
