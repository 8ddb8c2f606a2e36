"""What a caller asks of a request's decoding: `SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from octavo.core.checked import Checked
from octavo.errors import ParameterError

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy decoding."""

INT64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Checked):
    """How one request is decoded. Names and defaults are vLLM's.

    n                           samples of the one prompt
    temperature                 0 to 2; below 1e-5 greedy, and below 0.01 taken as 0.01
    top_p, top_k, min_p         keep the smallest set of tokens with that mass; that many tokens (0 or -1: all);
                                those at least `min_p` times as likely as the likeliest. Applied in the order
                                temperature, top_k, top_p, min_p
    seed                        any int64; the noise is a function of (seed, sample index, position) and nothing else,
                                so that it does not depend on batch, window or preemption. None: the engine draws one
    max_tokens                  tokens to generate; None: as many as fit (a default is cut to fit, a number never)
    stop, stop_token_ids        strings and token ids that end the output
    ignore_eos                  generate past the model's own end-of-sequence tokens
    detokenize                  whether the output has text
    skip_special_tokens         leave special tokens out of the text
    include_stop_str_in_output  keep the matched stop string in the text

    Raises `ParameterError` for a value out of range, `UnknownOptionError` for a name that does not exist.
    """

    TITLE: ClassVar[str] = "SamplingParams"

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens before."""
        return False

    def __post_init__(self) -> None:
        self._integer("n", 1, 128)
        self._number("temperature", 0.0, 2.0)
        self._number("top_p", 0.0, 1.0)
        self._number("min_p", 0.0, 1.0)
        self._integer("top_k", -1, 1 << 31)
        self._integer("max_tokens", 1, 1 << 31, optional=True)
        self._integer("seed", -INT64, INT64 - 1, optional=True)
        self._flag("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
        if 0 < self.temperature < 0.01 and not self.greedy:
            object.__setattr__(self, "temperature", 0.01)  # colder than this, fp32 logits overflow before they decide
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.top_p == 0.0:  # "the smallest set" is the likeliest token
            object.__setattr__(self, "top_p", 1.0)
            object.__setattr__(self, "top_k", 1)
        self._stops()

    def _stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for s in stop:
            if not isinstance(s, str) or not s:
                raise ParameterError(f"stop must be non-empty strings, not {s!r}; leave it out for none", param="stop")
        if len(stop) > 64:
            raise ParameterError(f"stop has {len(stop)} strings, at most 64 are allowed", param="stop")
        ids = tuple(self.stop_token_ids or ())
        for t in ids:
            if not isinstance(t, int) or isinstance(t, bool) or t < 0:
                raise ParameterError(f"stop_token_ids must be token ids, not {t!r}", param="stop_token_ids")
        if stop and not self.detokenize:
            raise ParameterError("stop strings need the text: set detokenize=True or use stop_token_ids", param="stop")
        object.__setattr__(self, "stop_strings", stop)
        object.__setattr__(self, "stop_token_ids", ids)
