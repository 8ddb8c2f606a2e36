"""`RequestState`: a request in an engine, and what of it the client does not know yet."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import cast

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request, Sequence
from octavo.engine.beam_search import BeamSearch
from octavo.engine.outputs import RequestMetrics
from octavo.engine.request_update import (
    FinishReason,
    RequestStats,
    RequestUpdate,
    SampleUpdate,
    add_prompt_logprobs,
    encodable,
)
from octavo.engine.structured_output import RequestGrammar


@dataclass(slots=True)
class RequestState:
    """A request of an engine.

    stream                     updates are sent whenever there are new tokens, otherwise when the request has finished
    failed_at                  tokens known when a step with it failed last
    logprobs                   of each sample's tokens that are not sent yet
    num_prompt_logprobs_sent   of `prompt_logprobs`
    num_sent                   output tokens sent of each sample; samples that have ended are in `ended`, too
    """

    request: Request
    metrics: RequestMetrics
    stream: bool = False
    search: BeamSearch | None = None
    grammar: RequestGrammar | None = None
    failed_at: int = -1
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prompt_logprobs_sent: int = 0
    num_sent: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    @property
    def num_known(self) -> int:
        """Tokens known to the host, prompts included, over all sequences."""
        return sum(len(s.token_ids) for s in (*self.request.sequences, *self.request.finished_sequences))

    def add_logprobs(self, index: int, entries: list[TokenLogprobs]) -> None:
        """Add log-probabilities of a sample's newest tokens. Entries past the sample's end are never read."""
        self.logprobs.setdefault(index, []).extend(entries)

    def add_prompt_logprobs(self, position: int, entries: list[TokenLogprobs]) -> None:
        add_prompt_logprobs(self.prompt_logprobs, position, entries)

    def update(self) -> RequestUpdate:
        """What is new since the previous update. The last one breaks the request's reference cycles.

        Sequences point to their request, and a beam search to its stop-string check. Otherwise only the garbage
        collector could free them, and `GCPause` keeps it from running while the engine has work.
        """
        request, is_first, finished = self.request, not self.num_sent, not self.request.sequences
        update = RequestUpdate(request.request_id, [], finished)
        if self.search is None:
            ended = [s for s in request.finished_sequences if s.index not in self.ended]
            update.samples = [self._sample_update(s) for s in (*request.sequences, *ended)]
        elif not finished:
            return update
        if is_first or finished:
            metrics = copy.copy(self.metrics)
            metrics.num_cached_tokens = max(0, request.num_cached_tokens)
            update.stats = RequestStats(metrics, encodable(request.error))
            if self.search is not None:
                self._add_hypotheses(self.search, update)
        if self.prompt_logprobs:
            update.prompt_position = 1 + self.num_prompt_logprobs_sent
            update.prompt_logprobs = self.prompt_logprobs[self.num_prompt_logprobs_sent :]
            self.num_prompt_logprobs_sent = len(self.prompt_logprobs)
        if finished:
            request.finished_sequences, request.only_sequence = [], None
            if self.search is not None:
                self.search.ends_in_stop_string = None
        return update

    def _sample_update(self, sequence: Sequence) -> SampleUpdate:
        index = sequence.index
        position = self.num_sent.get(index, 0)
        token_ids = sequence.token_ids[len(self.request.prompt_token_ids) + position :].tolist()
        logprobs: list[TokenLogprobs] | None = None
        if (entries := self.logprobs.get(index)) is not None:
            logprobs = entries[: len(token_ids)]
            del entries[:]
        self.num_sent[index] = position + len(token_ids)
        if sequence.finish_reason:
            self.ended.add(index)
        reason = cast(FinishReason, sequence.finish_reason)
        return SampleUpdate(index, token_ids, reason, sequence.stop_token, logprobs, position)

    def _add_hypotheses(self, search: BeamSearch, update: RequestUpdate) -> None:
        """Add the hypotheses of a search that has finished. One that was ended early adds its live sequences."""
        unfinished = [s for s in self.request.finished_sequences if s.finish_reason in ("abort", "error")]
        if unfinished:
            search.finish(unfinished, unfinished[0].finish_reason)
        assert update.stats is not None
        update.stats.hypotheses = search.hypotheses
        reasons = [cast(FinishReason, s.finish_reason) for s in self.request.finished_sequences[:1]]
        update.samples = [SampleUpdate(0, [], reason) for reason in reasons]
