"""Outputs of requests: what a caller receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from octavo.core.events import Preempted
from octavo.errors import RequestFailedError
from octavo.notebook import output_html

REASON_CODES = ("no_allowed_token", "out_of_memory", "grammar_too_complex")
"""Error codes with which a reason of failure may begin."""
REQUEST_FAILED = "request_failed"
"""Error code of all other failures."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class RequestMetrics(msgspec.Struct, array_like=True, gc=False):
    """Times of a request by the engine's clock, in seconds (None: not yet), and its counters.

    num_generation_tokens  tokens of the returned samples: the best n of `best_of`, or a beam search's hypotheses
    num_cached_tokens      prompt tokens found in the prefix cache when the request was first admitted
    num_preemptions        all preemptions; num_swaps of them moved blocks to the host
    num_swapped_blocks     blocks moved to the host by preemptions
    num_recomputed_tokens  tokens whose K and V a preemption freed; the prefix cache may still hold some of them
    num_draft_tokens       drafts of speculation that were computed; `num_accepted_tokens` of them were right
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: _Count = 0
    num_swaps: _Count = 0
    num_swapped_blocks: _Count = 0
    num_recomputed_tokens: _Count = 0
    num_cached_tokens: _Count = 0
    num_generation_tokens: _Count = 0
    num_draft_tokens: _Count = 0
    num_accepted_tokens: _Count = 0

    @property
    def time_in_queue_s(self) -> float | None:
        return _difference(self.arrival_time, self.first_scheduled_time)

    @property
    def decode_time_s(self) -> float | None:
        """From the first token to the last."""
        return _difference(self.first_token_time, self.last_token_time)

    @property
    def time_to_first_token_s(self) -> float | None:
        return _difference(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token_s(self) -> float | None:
        """From the first token to the last, per token after the first; None with fewer than two tokens."""
        span = _difference(self.first_token_time, self.last_token_time)
        return None if span is None or self.num_generation_tokens < 2 else span / (self.num_generation_tokens - 1)

    @property
    def latency_s(self) -> float | None:
        """From arrival to the end."""
        return _difference(self.arrival_time, self.finished_time)

    def add_past(self, past: RequestMetrics) -> None:
        """Add those of an earlier engine, from which this one has taken the request over."""
        self.arrival_time = past.arrival_time
        if past.first_scheduled_time is not None:
            self.first_scheduled_time, self.num_cached_tokens = past.first_scheduled_time, past.num_cached_tokens
        if past.first_token_time is not None:
            self.first_token_time = past.first_token_time
        self.num_preemptions += past.num_preemptions
        self.num_swaps += past.num_swaps
        self.num_swapped_blocks += past.num_swapped_blocks
        self.num_recomputed_tokens += past.num_recomputed_tokens
        self.num_draft_tokens += past.num_draft_tokens
        self.num_accepted_tokens += past.num_accepted_tokens

    def record_preemption(self, event: Preempted) -> None:
        self.num_preemptions += 1
        if event.how == "swap":
            self.num_swaps += 1
            self.num_swapped_blocks += event.num_blocks
        else:
            self.num_recomputed_tokens += event.num_positions


def _difference(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(slots=True)
class Logprob:
    """A token's log-probability under the model, before any sampling parameter applies. Rank 1 is the top token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log-probabilities of one position by token id: the sampled token first, then the requested top tokens, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request. `token_ids` includes the stop token; `text` excludes it unless the request asks for it.

    logprobs            one entry for each of `token_ids` if `SamplingParams.logprobs` is set. With `echo` the first
                        entry is None: the first prompt token has no prefix
    cumulative_logprob  sum over the generated tokens, if `SamplingParams.logprobs` is set
    finish_reason       None while it runs; "stop", "length", "abort" or "error"
    score               ranking score of a beam search: cumulative_logprob / length ** length_penalty
    stop_reason         the stop string or stop token id that ended it; None for the model's own end-of-sequence token.
                        For "error" the message
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request so far.

    prompt           None if the prompt came as token ids, unless `echo` asks for its text
    prompt_logprobs  one entry per prompt token, None for the first, if requested
    is_delta         `outputs` holds only what is new since the previous output
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    is_delta: bool = False

    def __getitem__(self, name: str) -> Any:
        """A field of the first sample, as `output["text"]` or `output["token_ids"]`: nano-vllm's outputs are dicts."""
        if name not in ("text", "token_ids"):
            raise KeyError(name)
        return getattr(self.outputs[0], name)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return output_html(self)


@dataclass(slots=True)
class BeamSearchSequence:
    """A hypothesis of a beam search, with vLLM's names: `tokens` and `text` begin with the prompt's.

    text  None without a tokenizer
    """

    tokens: list[int]
    text: str | None
    cum_logprob: float
    logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class BeamSearchOutput(RequestOutput):
    """The output of a beam search; `sequences` are its hypotheses, best first, as vLLM returns them."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def error_code(reason: str) -> str | None:
    """The error code of a reason of failure; None if it has no code of its own."""
    if "not finite" in reason:
        return RequestFailedError.code
    return next((code for code in REASON_CODES if reason.startswith(code)), None)


def request_failed_error(output: RequestOutput) -> RequestFailedError:
    """The exception for an output with an error."""
    reason = next(c.stop_reason for c in output.outputs if c.finish_reason == "error")
    return RequestFailedError(
        f"request {output.request_id} failed: {reason}", code=error_code(str(reason)) or REQUEST_FAILED
    )
