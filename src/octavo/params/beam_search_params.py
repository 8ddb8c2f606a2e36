"""Parameters of beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from octavo.errors import ParameterError
from octavo.params.sampling_params import SamplingParams
from octavo.params.structured_outputs import StructuredOutputsParams
from octavo.params.validation import INT32, ValidatedParams

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 30.0
"""Either way: (2 ** 31) ** 30, of an output as long as there can be, is 9e279, and leaves a float room to multiply.
Beyond, `BeamSearch.select_beams` would raise, which ends the engine."""


def _listed(value: Any) -> Any:
    """A sequence as a list; anything else as it is, for `SamplingParams` to refuse."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(ValidatedParams):
    """How a request is decoded by beam search. Names are vLLM's and Transformers'.

    beam_width      sequences that live at a time
    max_tokens      tokens of an answer at most
    n               answers, at most beam_width; None: that many
    length_penalty  exponent of the length that a hypothesis's log-probability is divided by, -30 to 30: above 0 favours
                    long ones
    early_stopping  when the search ends, once there are beam_width hypotheses. True: at once; False: when no live
                    sequence beats the worst of them at its present length; "never": nor at any length to come
    temperature     0, the only value: a beam search draws nothing
    ignore_eos      the model's own end-of-sequence tokens end nothing
    logprobs        log-probabilities of each token, and of so many of the likeliest in its place
    stop, stop_token_ids  strings and tokens that end a hypothesis
    structured_outputs    the form that each hypothesis must have, as `SamplingParams` has it

    Raises `ParameterError` for a value out of range, `UnknownOptionError` for a name that does not exist.
    """

    TITLE: ClassVar[str] = "BeamSearchParams"

    beam_width: int
    max_tokens: int
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 0.0
    ignore_eos: bool = False
    logprobs: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_integer("beam_width", 1, MAX_BEAM_WIDTH)
        self._check_integer("max_tokens", 1, INT32)
        self._check_integer("n", 1, self.beam_width, optional=True)
        self._check_number("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        self._check_number("temperature", 0.0, 2.0)
        self._check_bool("ignore_eos")
        self._check_integer("logprobs", 0, 1 << 20, optional=True)
        self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ParameterError(
                f'early_stopping is {self.early_stopping!r}, it must be True, False or "never"', param="early_stopping"
            )
        if self.temperature:
            raise ParameterError(
                f"temperature is {self.temperature}, a beam search draws nothing: leave it at 0", param="temperature"
            )

    @property
    def sampling_params(self) -> SamplingParams:
        """The part of it that concerns each sequence, and its text."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop=_listed(self.stop),
            stop_token_ids=_listed(self.stop_token_ids),
            structured_outputs=self.structured_outputs,
        )
