"""`RequestUpdate`: the new tokens of a request after a step. The client makes text and outputs from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from octavo.core.plan import TokenLogprobs
from octavo.engine.beam_search import Hypothesis
from octavo.engine.outputs import RequestMetrics
from octavo.params.validation import INT32

MAX_SAMPLES = 128
"""Samples per request at most, also the limit of `SamplingParams.n` and `BeamSearchParams.beam_width`."""
Index: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Token: TypeAlias = Annotated[int, Meta(ge=0, le=INT32)]
FinishReason: TypeAlias = Literal["", "stop", "length", "abort", "error", "pruned"]


class SampleUpdate(msgspec.Struct, array_like=True, gc=False):
    """The new tokens of one sample, from `position` of its output on; `logprobs` has an entry for each if requested."""

    index: Index
    token_ids: list[Token]
    finish_reason: FinishReason = ""
    stop_token: Token | None = None
    logprobs: list[TokenLogprobs] | None = None
    position: Count = 0


class RequestStats(msgspec.Struct, array_like=True, gc=False):
    """Statistics of a request, sent with its first and last tokens.

    metrics      times are from the engine's clock
    hypotheses   of a beam search, best first
    """

    metrics: RequestMetrics
    error: str = ""
    hypotheses: list[Hypothesis] | None = None


class RequestUpdate(msgspec.Struct, array_like=True, gc=False):
    """What is new of one request. `prompt_logprobs` covers the prompt's tokens from `prompt_position` on."""

    request_id: str
    samples: list[SampleUpdate]
    finished: bool = False
    stats: RequestStats | None = None
    prompt_position: Count = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


def add_prompt_logprobs(known: list[TokenLogprobs], position: int, entries: Seq[TokenLogprobs]) -> None:
    """Add log-probabilities of prompt tokens from `position` on; a recomputed prompt repeats known entries."""
    num_repeated = 1 + len(known) - position
    known += entries[num_repeated:] if num_repeated >= 0 else ()


def encodable(text: str) -> str:
    """Text that a message can hold: escapes lone surrogates, which file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()
