"""Parameters of beam search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from octavo.errors import ParameterError
from octavo.params.sampling_params import SamplingParams
from octavo.params.structured_outputs import StructuredOutputsParams
from octavo.params.validation import INT32, ValidatedParams
from octavo.params.vllm_arguments import Owner

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 30.0
"""Limit in both directions. For the longest possible output, (2 ** 31) ** 30 is 9e279, which a float can hold.
Beyond it `BeamSearch.select_beams` would raise, which ends the engine."""


def _listed(value: Any) -> Any:
    """Convert a sequence to a list. Other values pass unchanged, for `SamplingParams` to refuse."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(ValidatedParams):
    """Parameters of a request that is decoded by beam search. Names are vLLM's and Transformers'.

    beam_width      number of live sequences
    max_tokens      limit of output tokens
    n               outputs to return, at most beam_width; None: beam_width
    length_penalty  exponent of the length that divides a hypothesis's log-probability, -30 to 30; above 0 favours long
                    outputs
    early_stopping  when the search ends, once there are beam_width hypotheses. True: at once; False: when no live
                    sequence beats the worst of them at its present length; "never": when none does at any later length
    temperature     must be 0: beam search does not sample
    ignore_eos      continue after the model's end-of-sequence tokens
    logprobs        log-probabilities of each token, and of this many top tokens at its position
    stop, stop_token_ids  strings and tokens that end a hypothesis
    structured_outputs    constraint on each hypothesis, as in `SamplingParams`

    Raises `ParameterError` for a value out of range, `UnknownOptionError` for an unknown name.
    """

    TITLE: ClassVar[str] = "BeamSearchParams"
    ARGUMENT_OWNER: ClassVar[Owner | None] = "beam search"

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
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

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
                f'early_stopping is {self.early_stopping!r:.60}, it must be True, False or "never"',
                param="early_stopping",
            )
        if self.temperature:
            raise ParameterError(
                f"temperature is {self.temperature}; beam search does not sample, leave it at 0", param="temperature"
            )

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters of each sequence and of its text."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop=_listed(self.stop),
            stop_token_ids=_listed(self.stop_token_ids),
            structured_outputs=self.structured_outputs,
        )
