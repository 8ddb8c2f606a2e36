"""Beam search: which continuations of a request's sequences live on, and which are its answers.

The device returns each live sequence's top tokens. `BeamSearch.select_beams` keeps the best `beam_width` continuations
of them all, and the core forks and frees accordingly (paper, section 4.4). A continuation that ends is a hypothesis,
scored by its log-probability over length ** length_penalty. The rules, and what `early_stopping` means, are those of
Transformers' `generate`, so that both give the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Sequence
from octavo.params.beam_search_params import BeamSearchParams


class Candidate(NamedTuple):
    """A token that may come next, as the device gives it."""

    logprob: float
    token: int


class Hypothesis(NamedTuple):
    """A sequence that has ended. `logprob` is of all its output, `score` what it is ranked by; `logprobs` has an entry
    for each token where they are asked for."""

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
    candidates: list[Candidate]


class BeamSearch:
    """The search of one request.

    stop_ids   tokens that end a hypothesis
    ends       whether an output's tokens end in a stop string; None: there are none
    """

    def __init__(
        self,
        params: BeamSearchParams,
        num_prompt: int,
        stop_ids: frozenset[int],
        ends: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.params = params
        self.ends = ends
        self.hypotheses: list[Hypothesis] = []  # the best `beam_width`, best first
        self._num_prompt = num_prompt
        self._stop_ids = stop_ids
        self._logprobs = [0.0]  # of the live sequences, by their index
        self._entries: list[list[TokenLogprobs]] = [[]]  # likewise

    @property
    def num_candidates(self) -> int:
        """Candidates to look at, of each sequence as of all: though every stop token is among the best of each, as many
        as there are beams go on."""
        return max(self._num_best, self.params.logprobs or 0)

    @property
    def _num_best(self) -> int:
        return max(2, 1 + len(self._stop_ids)) * self.params.beam_width

    def select_beams(self, parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
        """The continuations that live on, best first; none when the search is over.

        parents   each live sequence with its candidates, best first
        """
        width = self.params.beam_width
        best = self._best(parents)
        length = len(parents[0][0].token_ids) - self._num_prompt + 1  # of the outputs, with this token
        over = [self._is_over(c, length) for c in best]
        # What ends below the best `width` does not count: it is there so that enough others go on.
        self._finish([c for c, o in zip(best[:width], over, strict=False) if o], length)
        live = [c for c, o in zip(best, over, strict=True) if not o][:width]
        if not live or self._is_settled(live[0].logprob, length):
            return []
        self._entries = [self._entries_of(c) for c in live]
        self._logprobs = [c.logprob for c in live]
        return [(c.parent, c.token) for c in live]

    def give_up(self, live: Seq[Sequence], finish_reason: str) -> None:
        """The request ends before the search does: what lives counts as it is."""
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

    def _is_over(self, continuation: _Continuation, length: int) -> bool:
        if continuation.token in self._stop_ids or length >= self.params.max_tokens:
            return True
        return self.ends is not None and self.ends(self._output(continuation))

    def _entries_of(self, continuation: _Continuation) -> list[TokenLogprobs]:
        if (num := self.params.logprobs) is None:
            return []
        best = continuation.candidates[:num]
        logprob = continuation.candidates[continuation.rank][0]
        entry = TokenLogprobs(logprob, continuation.rank + 1, [token for _, token in best], [p for p, _ in best])
        return [*self._entries[continuation.parent.index], entry]

    def _output(self, continuation: _Continuation) -> list[int]:
        return [*continuation.parent.token_ids[self._num_prompt :], continuation.token]

    def _finish(self, ended: list[_Continuation], length: int) -> None:
        for c in ended:
            token_ids = self._output(c)
            stopped = c.token in self._stop_ids or (self.ends is not None and self.ends(token_ids))
            reason, entries = "stop" if stopped else "length", self._entries_of(c)
            self._add(Hypothesis(self._score(c.logprob, length), c.logprob, token_ids, reason, entries))

    def _add(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda h: -h.score)  # stable: of equal ones the earlier stays ahead
        del self.hypotheses[self.params.beam_width :]

    @property
    def _is_full(self) -> bool:
        return len(self.hypotheses) == self.params.beam_width

    def _is_settled(self, best_logprob: float, length: int) -> bool:
        """Whether nothing that lives can still become an answer, as far as one can tell or wants to know."""
        if not self._is_full:
            return False
        if self.params.early_stopping is True or self.params.beam_width == 1:  # a beam of one is greedy decoding
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.params.max_tokens
        return self._score(best_logprob, length) <= self.hypotheses[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(max(1, length), self.params.length_penalty)
