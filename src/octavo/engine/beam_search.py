"""Beam search: which continuations of a request's sequences live on, and which are its answers.

The device gives each live sequence's likeliest tokens; `BeamSearch.decide` keeps the best `beam_width` continuations of
them all, and the core forks and frees accordingly (paper, section 4.4). A continuation that ends is a hypothesis,
scored by its log-probability over length ** length_penalty. The rules, and what `early_stopping` means, are those of
Transformers' `generate`, so that both give the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Sequence
from octavo.errors import ParameterError
from octavo.params.sampling_params import SamplingParams
from octavo.params.structured_outputs import StructuredOutputsParams
from octavo.params.validation import INT32, Checked

MOST_BEAMS = 128
MOST_LENGTH_PENALTY = 30.0
"""Either way: (2 ** 31) ** 30, of an output as long as there can be, is 9e279, and leaves a float room to multiply.
Beyond, `BeamSearch.decide` would raise, which ends the engine."""


def _listed(value: Any) -> Any:
    """A sequence as a list; anything else as it is, for `SamplingParams` to refuse."""
    return list(value) if isinstance(value, Seq) and not isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(Checked):
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
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._integer("beam_width", 1, MOST_BEAMS)
        self._integer("max_tokens", 1, INT32)
        self._integer("n", 1, self.beam_width, optional=True)
        self._number("length_penalty", -MOST_LENGTH_PENALTY, MOST_LENGTH_PENALTY)
        self._number("temperature", 0.0, 2.0)
        self._flag("ignore_eos")
        self._integer("logprobs", 0, 1 << 20, optional=True)
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
    def num_draws(self) -> int:
        """Candidates to look at, of each sequence as of all: though every stop token is among the best of each, as many
        as there are beams go on."""
        return max(self._num_best, self.params.logprobs or 0)

    @property
    def _num_best(self) -> int:
        return max(2, 1 + len(self._stop_ids)) * self.params.beam_width

    def decide(self, parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
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
