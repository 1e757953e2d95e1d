"""Where a model's files are: a directory, the miniature of this package, or a repository of the Hugging Face hub."""

import re
from pathlib import Path

from quickseek.errors import CheckpointError

FILES = ["*.json", "*.safetensors", "encoding/*.py"]
"""What is fetched of a repository; pickles never are."""

MINIATURE = "miniature"
"""Name of the trained miniature that the package holds (docs/miniature.md)."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(model: str | Path) -> Path:
    """The directory of ``model``: itself if it exists, the package's own for "miniature", or the local copy of the hub
    repository "owner/name".

    Raises CheckpointError if it is neither, or cannot be fetched.
    """
    path = Path(model)
    if model != "" and path.is_dir():
        return path
    if str(model) == MINIATURE:
        return Path(__file__).parent / "trained_miniature"
    if isinstance(model, Path) or not _REPOSITORY.fullmatch(model):
        raise CheckpointError(f"{model}: no such directory, nor a hub repository like 'owner/name'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except Exception as error:  # the library raises errors of many kinds for one thing: it could not fetch
        raise CheckpointError(f"{model}: no such directory, and the hub did not give it ({error})") from error
