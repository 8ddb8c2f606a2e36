"""Beam search: selects the beams of a request after every token, and collects its finished hypotheses.

The device returns the top tokens of each live sequence. `BeamSearch.select_beams` keeps the best `beam_width`
continuations over all of them, and the core forks and frees sequences accordingly (paper, section 4.4). A continuation
that ends becomes a hypothesis with the score logprob / length ** length_penalty. The rules, `early_stopping` included,
are those of `generate` in Transformers, so that both return the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Sequence
from octavo.params.beam_search_params import BeamSearchParams


class BeamCandidate(NamedTuple):
    """A possible next token of a sequence, from the device."""

    logprob: float
    token: int


class Hypothesis(NamedTuple):
    """A finished output. `logprob` covers all its tokens, `score` ranks it. `logprobs` has an entry per token if the
    request asks for them."""

    score: float
    logprob: float
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]


class _Continuation(NamedTuple):
    logprob: float  # of the whole output, this token included
    parent: Sequence
    token: int
    rank: int  # among the parent's candidates, from 0
    candidates: list[BeamCandidate]


class BeamSearch:
    """The beam search of one request.

    stop_ids              tokens that end a hypothesis
    ends_in_stop_string   returns whether an output's tokens end in a stop string; None: the request has none
    """

    def __init__(
        self,
        params: BeamSearchParams,
        num_prompt: int,
        stop_ids: frozenset[int],
        ends_in_stop_string: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.params = params
        self.ends_in_stop_string = ends_in_stop_string
        self.hypotheses: list[Hypothesis] = []  # the best `beam_width`, best first
        self._num_prompt = num_prompt
        self._stop_ids = stop_ids
        self._logprobs = [0.0]  # of the live sequences, by index
        self._entries: list[list[TokenLogprobs]] = [[]]  # of the live sequences, by index

    @property
    def num_candidates(self) -> int:
        """Candidates per sequence: enough for `beam_width` live continuations even if every stop token is a candidate
        of every sequence."""
        return max(self._num_best, self.params.logprobs or 0)

    @property
    def _num_best(self) -> int:
        return max(2, 1 + len(self._stop_ids)) * self.params.beam_width

    def select_beams(self, parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
        """Select the continuations that live on, best first; [] when the search has finished.

        parents   each live sequence with its candidates, best first
        """
        width = self.params.beam_width
        best = self._best(parents)
        length = len(parents[0][0].token_ids) - self._num_prompt + 1  # of the outputs, with this token
        ended = [length >= self.params.max_tokens or self._has_stopped(c) for c in best]
        # Ended continuations below the best `width` do not count: they only make room for enough live ones.
        self._add_ended([c for c, e in zip(best[:width], ended, strict=False) if e], length)
        live = [c for c, e in zip(best, ended, strict=True) if not e][:width]
        if not live or self._is_finished(live[0].logprob, length):
            return []
        self._entries = [self._entries_of(c) for c in live]
        self._logprobs = [c.logprob for c in live]
        return [(c.parent, c.token) for c in live]

    def finish(self, live: Seq[Sequence], finish_reason: str) -> None:
        """End the search early: the live sequences become hypotheses as they are."""
        for sequence in live:
            token_ids = sequence.token_ids[self._num_prompt :].tolist()
            logprob = self._logprobs[sequence.index]
            score, entries = self._score(logprob, len(token_ids)), self._entries[sequence.index]
            self._add(Hypothesis(score, logprob, token_ids, finish_reason, entries))

    def _best(self, parents: list[tuple[Sequence, Any]]) -> list[_Continuation]:
        found = [
            _Continuation(self._logprobs[sequence.index] + logprob, sequence, token, rank, candidates)
            for sequence, candidates in parents
            for rank, (logprob, token) in enumerate(candidates)
        ]
        found.sort(key=lambda c: -c.logprob)
        return found[: self._num_best]

    def _has_stopped(self, continuation: _Continuation) -> bool:
        if continuation.token in self._stop_ids:
            return True
        return self.ends_in_stop_string is not None and self.ends_in_stop_string(self._output(continuation))

    def _entries_of(self, continuation: _Continuation) -> list[TokenLogprobs]:
        if (num := self.params.logprobs) is None:
            return []
        best = continuation.candidates[:num]
        logprob = continuation.candidates[continuation.rank][0]
        entry = TokenLogprobs(logprob, continuation.rank + 1, [token for _, token in best], [p for p, _ in best])
        return [*self._entries[continuation.parent.index], entry]

    def _output(self, continuation: _Continuation) -> list[int]:
        return [*continuation.parent.token_ids[self._num_prompt :], continuation.token]

    def _add_ended(self, ended: list[_Continuation], length: int) -> None:
        for c in ended:
            score, reason = self._score(c.logprob, length), "stop" if self._has_stopped(c) else "length"
            self._add(Hypothesis(score, c.logprob, self._output(c), reason, self._entries_of(c)))

    def _add(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda h: -h.score)  # stable: of equal scores the earlier one stays ahead
        del self.hypotheses[self.params.beam_width :]

    def _is_finished(self, best_logprob: float, length: int) -> bool:
        """Whether no live sequence can become a hypothesis any more, by the rule of `early_stopping`."""
        if len(self.hypotheses) < self.params.beam_width:
            return False
        if self.params.early_stopping is True or self.params.beam_width == 1:  # one beam is greedy decoding
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.params.max_tokens
        return self._score(best_logprob, length) <= self.hypotheses[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(max(1, length), self.params.length_penalty)
