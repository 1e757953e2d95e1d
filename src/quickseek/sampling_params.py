"""``SamplingParams``: how the tokens of one request are chosen."""

from dataclasses import dataclass

from quickseek.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request; names follow vLLM.

    ``temperature`` 0 is greedy. ``top_p`` keeps the smallest set of most likely tokens whose probability reaches
    it. ``seed`` None draws one from the system. Generation ends at the end token (unless ``ignore_eos``), at one
    of ``stop_token_ids`` or after ``max_tokens``.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def check(key: str, valid: bool, expected: str) -> None:
            if not valid:
                raise ConfigError(key, getattr(self, key), expected)

        for key in ("temperature", "top_p"):
            value = getattr(self, key)
            check(key, isinstance(value, int | float) and not isinstance(value, bool), "a number")
        check("max_tokens", type(self.max_tokens) is int and self.max_tokens >= 1, "an integer of at least 1")
        check("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or a positive number")
        check("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]")
        check(
            "seed", self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**63), "an integer in [0, 2^63)"
        )
