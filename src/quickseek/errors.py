"""The errors that quickseek raises on purpose: each names the thing that is wrong."""

from collections.abc import Sequence


class QuickseekError(Exception):
    """Base of every error that a user can cause or must act on."""


class ConfigError(QuickseekError, ValueError):
    """A configuration key has a value that this model or engine cannot run with."""

    def __init__(self, key: str, value: object, expected: str, *, source: str = "") -> None:
        self.key, self.value, self.expected = key, value, expected
        where = f"{source}: " if source else ""
        super().__init__(f"{where}{key} = {value!r}: expected {expected}")


class CheckpointError(QuickseekError, ValueError):
    """A file or tensor of a checkpoint is absent, damaged or not what the configuration calls for."""


class TokenizerError(QuickseekError, ValueError):
    """A tokenizer file is absent or is not the tokenizer that the configuration calls for."""


class PromptError(QuickseekError, ValueError):
    """A prompt, message or token id cannot be run."""


class CollectiveTimeout(QuickseekError, RuntimeError):
    """A collective gave up waiting for peers (spec/decode.md L.6).

    ``missing`` holds the ranks whose contribution had not arrived. The mailboxes are unusable until
    every rank has called ``reset()``.
    """

    def __init__(self, kind: str, rank: int, generation: int, token: int, missing: Sequence[int]) -> None:
        self.kind, self.rank, self.generation, self.token = kind, rank, generation, token
        self.missing = tuple(missing)
        names = ", ".join(str(source) for source in self.missing) or "none (another rank gave up first)"
        super().__init__(
            f"{kind} on rank {rank} gave up at generation {generation}, token {token}: missing source ranks: {names}"
        )


class WorldError(QuickseekError, RuntimeError):
    """The ranks of a world cannot be brought together: the environment, a group size or a mapping does not fit."""


class RankDisagreement(QuickseekError, RuntimeError):
    """Ranks that must decide alike hold different values, or some of them failed; every rank raises this one text."""


class RankFailure(QuickseekError, RuntimeError):
    """A spawned rank raised, died or did not finish in time.

    ``rank`` is the first one at fault; the message holds the traceback of every rank that left one.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class DecodeUnsupported(QuickseekError, ValueError):
    """The specialized decode was asked for and cannot run; ``missing`` lists every unmet need."""

    def __init__(self, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        super().__init__(f"decode_backend=latency_specialized needs {'; '.join(self.missing)}.")
