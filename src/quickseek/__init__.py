"""quickseek: DeepSeek-V4.1-Flash for people who wait on each token.

``LLM`` and ``SamplingParams`` are the offline door; ``quickseek --help`` lists the commands.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quickseek.llm import LLM as LLM
    from quickseek.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes on first use, so that ``quickseek --help`` does not import torch."""
    if name == "LLM":
        from quickseek.llm import LLM

        return LLM
    if name == "SamplingParams":
        from quickseek.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'quickseek' has no attribute {name!r}")
