"""Output processing: turns the sequences of a request into `RequestOutput`s as their tokens arrive.

The engine handles tokens only. Detokenization and stop strings are injected as a `Detokenizer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request, Sequence
from octavo.engine.beam_search import BeamSearch, Hypothesis
from octavo.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from octavo.engine.structured_output import RequestGrammar
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams


class Detokenizer(Protocol):
    """Incremental detokenizer of one sequence; also finds stop strings."""

    text: str
    stop_reason: str | None
    num_tokens_kept: int

    def push(self, ids: Seq[int]) -> str: ...

    def finish(self) -> str: ...

    def decode(self, ids: Seq[int], skip_special_tokens: bool) -> str:
        """The text of any token ids, independent of the sequence's own text."""


MakeDetokenizer = Callable[[Request], Detokenizer]


class TextProcessor(Protocol):
    """Text work for an engine; `frontend.input_processor.InputProcessor` implements it.

    The client of an engine process does all other detokenization.
    """

    @property
    def make_detokenizer(self) -> MakeDetokenizer | None:
        """For beam searches with stop strings, which decide between beams."""

    def submit_grammar(self, params: SamplingParams | BeamSearchParams, tenant: int = 0) -> Future[Any] | None:
        """Compile the grammar of parameters with one. The future raises `UsageError` or `RequestFailedError`."""

    def withdraw_grammar(self, compilation: Any) -> None:
        """The caller of `submit_grammar` no longer waits."""


@dataclass(slots=True)
class _TextState:
    """The text of one sequence so far."""

    detokenizer: Detokenizer
    num_pushed: int = 0
    finished: bool = False
    error: str = ""


class _LogprobSum:
    """Running sum of a sample's log-probabilities, as exact as `math.fsum`; adds each term once."""

    def __init__(self) -> None:
        self._num = 0
        self._parts: list[float] = []  # non-overlapping partial sums (Shewchuk 1996)

    def of(self, entries: Seq[TokenLogprobs], num: int) -> float:
        """The sum over the first `num` entries."""
        if num < self._num:  # a stop string cut tokens off
            self._num, self._parts = 0, []
        for entry in entries[self._num : num]:
            self._add(entry.logprob)
        self._num = min(num, len(entries))
        return math.fsum(self._parts)

    def _add(self, x: float) -> None:
        kept = []
        for y in self._parts:
            if abs(x) < abs(y):
                x, y = y, x
            total = x + y
            if low := y - (total - x):
                kept.append(low)
            x = total
        self._parts = [*kept, x]


@dataclass(slots=True)
class Delivered:
    """How much of a sequence earlier outputs contained."""

    num_tokens: int = 0
    num_chars: int = 0
    finished: bool = False


@dataclass(slots=True)
class RequestState:
    """A request with its text, log-probabilities and delivered counts.

    make_detokenizer   None: outputs have token ids only
    incremental        detokenize at every step, for streaming or stop strings; otherwise once, at the end
    stream             the caller receives an output after every step with new tokens
    failed_at          tokens known when a step with this request last failed; -1: none failed
    logprobs           sample index -> log-probabilities of its tokens; may extend past the sample's end
    prompt_logprobs    log-probabilities of the prompt's tokens from the second on
    search             the beam search, if the request is one
    grammar            the grammar that constrains its outputs, if there is one
    """

    request: Request
    prompt: str | None
    metrics: RequestMetrics
    make_detokenizer: MakeDetokenizer | None = None
    incremental: bool = False
    stream: bool = False
    failed_at: int = -1
    texts: dict[int, _TextState] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    delivered: dict[int, Delivered] = field(default_factory=dict)
    num_prompt_logprobs_delivered: int = 0
    search: BeamSearch | None = None
    grammar: RequestGrammar | None = None
    _entries: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)  # index -1: the prompt's
    _sums: dict[int, _LogprobSum] = field(default_factory=dict)
    _prompt_ids: list[int] = field(init=False)  # shared by all outputs: streams have many, and prompts are long
    _prompt_only: bool = False

    def __post_init__(self) -> None:
        self._prompt_ids = self.request.prompt_token_ids.tolist()
        # max_tokens=0 still samples one token: the scheduler ends a request only after a token.
        self._prompt_only = self.request.sampling_params.max_tokens == 0

    @property
    def num_known(self) -> int:
        """Tokens known to the host, prompts included, over all sequences."""
        return sum(len(s.token_ids) for s in (*self.request.sequences, *self.request.finished_sequences))

    def release(self) -> None:
        """Break the reference cycles of a finished request; call it after the final output.

        Sequences point to their request, and a beam search to its stop-string check. Without this only the garbage
        collector could free them, and `GCPause` keeps it from running while the engine has work.
        """
        request = self.request
        request.sequences, request.finished_sequences, request.only_sequence = [], [], None
        if self.search is not None:
            self.search.ends_in_stop_string = None

    # -- input ---------------------------------------------------------------------------------------------------------

    def detokenize(self, sequence: Sequence) -> bool:
        """Detokenize a sequence's new tokens. True if they complete a stop string or have no text."""
        text = self._text_of(sequence.index)
        if text is None or text.finished or self._prompt_only:
            return False
        tokens = sequence.token_ids[len(self.request.prompt_token_ids) + text.num_pushed :].tolist()
        if sequence.stop_token is not None and tokens and not self.request.sampling_params.include_stop_str_in_output:
            tokens.pop()  # token_ids keeps the stop token, the text does not
        text.num_pushed += len(tokens)
        try:
            text.detokenizer.push(tokens)
        except Exception as error:  # fails this request only, not the engine loop
            text.error = f"its tokens could not be turned into text: {type(error).__name__}: {error}"
        text.finished = text.detokenizer.stop_reason is not None or bool(text.error)
        return text.finished

    def add_logprobs(self, index: int, entries: Seq[TokenLogprobs]) -> None:
        """Add log-probabilities of a sample's newest tokens. Entries past the sample's end are never read."""
        self.logprobs.setdefault(index, []).extend(entries)

    def add_prompt_logprobs(self, position: int, entries: Seq[TokenLogprobs]) -> None:
        """Add log-probabilities of prompt tokens from `position` on; a recomputed prompt repeats known entries."""
        num_known = 1 + len(self.prompt_logprobs) - position
        self.prompt_logprobs += entries[num_known:] if num_known >= 0 else ()

    def _text_of(self, index: int) -> _TextState | None:
        if self.make_detokenizer is None:
            return None
        if index not in self.texts:
            self.texts[index] = _TextState(self.make_detokenizer(self.request))
        return self.texts[index]

    # -- output --------------------------------------------------------------------------------------------------------

    def output(self) -> RequestOutput:
        """The output so far, or since the previous call for `RequestOutputKind.DELTA`."""
        request, params = self.request, self.request.sampling_params
        if request.only_sequence is not None:
            outputs = [self._completion(request.only_sequence)]
        elif self.search is not None:
            outputs = self._beam_outputs(self.search)
        else:
            live = [s for s in request.sequences if not s.finish_reason]
            sequences = sorted(
                [s for s in request.finished_sequences if s.finish_reason != "pruned"] + live, key=lambda s: s.index
            )
            outputs = [self._completion(s) for s in sequences]
            if params.selects_best_of:
                outputs = self._ranked(outputs)
        if request.error and (params.selects_best_of or self.search is not None):
            # The failed sequence may rank below the returned ones, so all of them report the error.
            outputs = [replace(c, finish_reason="error", stop_reason=request.error) for c in outputs]
        metrics = self.metrics
        metrics.num_cached_tokens = max(0, request.num_cached_tokens)
        metrics.num_generation_tokens = sum([len(c.token_ids) for c in outputs])
        is_delta = params.output_kind is RequestOutputKind.DELTA
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not (self.delivered and is_delta):
            prompt_logprobs = self._prompt_entries()
        if is_delta:
            has_prompt = set(self.delivered)
            outputs = [c for c in outputs if self._cut_to_delta(c) or (params.echo and c.index not in has_prompt)]
        if params.echo:
            for completion in outputs:
                if not is_delta or completion.index not in has_prompt:
                    self._prepend_prompt(completion)
        return RequestOutput(
            request.request_id,
            self.prompt,
            self._prompt_ids,
            outputs,
            not request.sequences,
            metrics,
            metrics.num_cached_tokens,
            prompt_logprobs,
            is_delta,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        text = self._text_of(sequence.index)
        token_ids = [] if self._prompt_only else sequence.output_token_ids
        finish_reason = sequence.finish_reason or None
        stop_reason: str | int | None = None
        if text is not None:
            if not self.incremental or sequence.finish_reason:
                self.detokenize(sequence)
            if sequence.finish_reason and not text.finished:
                text.detokenizer.finish()
                text.finished = True
            if (stop_reason := text.detokenizer.stop_reason) is not None:
                token_ids = token_ids[: text.detokenizer.num_tokens_kept]
                finish_reason = "stop"  # the stop string came before the stop token or the length limit
            if text.error:
                finish_reason = "error"
        if self._prompt_only and finish_reason == "stop":
            finish_reason = "length"
        elif stop_reason is None and sequence.stop_token in (self.request.sampling_params.stop_token_ids or ()):
            stop_reason = sequence.stop_token
        if finish_reason == "error":
            stop_reason = (text.error if text is not None else "") or self.request.error
        completion = CompletionOutput(
            sequence.index,
            "" if text is None else text.detokenizer.text,
            token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        if self.request.sampling_params.logprobs is not None:
            self._attach_logprobs(completion)
        return completion

    def _ranked(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n samples with the highest log-probability, best first; [] until all samples have finished."""
        request = self.request
        if request.sequences:
            return []
        totals = {
            c.index: math.fsum(entry.logprob for entry in self.logprobs.get(c.index, [])[: len(c.token_ids)])
            for c in completions
        }
        best = sorted(completions, key=lambda c: -totals[c.index])[: request.sampling_params.n]
        return [replace(c, index=i, cumulative_logprob=totals[c.index]) for i, c in enumerate(best)]

    def ends_in_stop_string(self, output: list[int]) -> bool:
        text = self._new_detokenizer()
        if text is None:
            return False
        text.push(output)
        return text.stop_reason is not None

    def _new_detokenizer(self) -> Detokenizer | None:
        return None if self.make_detokenizer is None else self.make_detokenizer(self.request)

    def _beam_outputs(self, search: BeamSearch) -> list[CompletionOutput]:
        """The best hypotheses of a beam search; [] until it has finished."""
        request = self.request
        if request.sequences:
            return []
        unfinished = [s for s in request.finished_sequences if s.finish_reason in ("abort", "error")]
        if unfinished:
            search.finish(unfinished, unfinished[0].finish_reason)
            request.finished_sequences = []
        best = search.hypotheses[: search.params.n or search.params.beam_width]
        return [self._beam_output(i, hypothesis) for i, hypothesis in enumerate(best)]

    def _beam_output(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        token_ids, request = hypothesis.token_ids, self.request
        stop_token = token_ids[-1] if token_ids and token_ids[-1] in request.stop_ids else None
        is_custom = stop_token in (request.sampling_params.stop_token_ids or ())
        stop_reason: str | int | None = stop_token if is_custom else None
        text = self._new_detokenizer()
        if text is not None:
            text.push(token_ids if stop_token is None else token_ids[:-1])
            text.finish()
            stop_reason = text.stop_reason or stop_reason
        completion = CompletionOutput(
            index,
            "" if text is None else text.text,
            token_ids,
            hypothesis.logprob,
            finish_reason=hypothesis.finish_reason,
            stop_reason=stop_reason,
            score=hypothesis.score,
        )
        if hypothesis.logprobs:
            self._text_of(index)
            completion.logprobs = self._entries_of(index, token_ids, hypothesis.logprobs)
        return completion

    def build_logprobs(self) -> Iterator[None]:
        """Build the log-probability entries of the next output, a few per yield, so that an event loop can interleave
        other work. Optional: `output` builds the missing ones."""
        request, params = self.request, self.request.sampling_params
        if params.prompt_logprobs is not None:
            yield from self._build_entries(-1, request.prompt_token_ids[1:], self.prompt_logprobs)
        if params.logprobs is not None and self.search is None:
            for sequence in (*request.sequences, *request.finished_sequences):
                if sequence.index in self.logprobs:
                    ids, known = sequence.output_token_ids, self.logprobs[sequence.index]
                    yield from self._build_entries(sequence.index, ids, known)

    def _attach_logprobs(self, completion: CompletionOutput) -> None:
        index, num = completion.index, len(completion.token_ids)
        known = self.logprobs.get(index, [])
        completion.logprobs = self._entries_of(index, completion.token_ids, known[:num])[:num]
        completion.cumulative_logprob = self._sums.setdefault(index, _LogprobSum()).of(known, num)

    def _prompt_entries(self) -> list[PositionLogprobs | None]:
        token_ids = self.request.prompt_token_ids
        num_missing = len(token_ids) - 1 - len(self.prompt_logprobs)  # the request ended before its prefill did
        return [None, *self._entries_of(-1, token_ids[1:], self.prompt_logprobs), *[None] * num_missing]

    def _entries_of(self, index: int, token_ids: Seq[int], known: Seq[TokenLogprobs]) -> list[PositionLogprobs | None]:
        """Entries for a caller; each is built once, and the list is a copy."""
        for _ in self._build_entries(index, token_ids, known):
            pass
        return self._entries[index][:]

    def _build_entries(self, index: int, token_ids: Seq[int], known: Seq[TokenLogprobs]) -> Iterator[None]:
        entries = self._entries.setdefault(index, [])
        text, num = self._text_of(max(0, index)), len(entries)
        for token, (logprob, rank, top_ids, top_logprobs) in zip(token_ids[num:], known[num:], strict=False):
            position = {token: Logprob(logprob, rank, _decoded(text, token))}
            for top_rank, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
                if top_id not in position:
                    position[top_id] = Logprob(top_logprob, top_rank, _decoded(text, top_id))
            entries.append(position)
            yield

    def _prepend_prompt(self, completion: CompletionOutput) -> None:
        text = self._text_of(completion.index)
        completion.token_ids[:0] = self.request.prompt_token_ids
        if text is not None:
            if self.prompt is None:
                skip = self.request.sampling_params.skip_special_tokens
                self.prompt = text.detokenizer.decode(self.request.prompt_token_ids, skip)
            completion.text = self.prompt + completion.text
        if completion.logprobs is not None:
            completion.logprobs[:0] = self._prompt_entries()

    def delivered_of(self, index: int) -> Delivered:
        return self.delivered.setdefault(index, Delivered())

    def _cut_to_delta(self, completion: CompletionOutput) -> bool:
        """Cut a completion to what is new since the previous output; False if nothing is."""
        delivered = self.delivered_of(completion.index)
        before = Delivered(delivered.num_tokens, delivered.num_chars, delivered.finished)
        delivered.num_tokens, delivered.num_chars = len(completion.token_ids), len(completion.text)
        delivered.finished = completion.finished()
        completion.token_ids = completion.token_ids[before.num_tokens :]
        completion.text = completion.text[before.num_chars :]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[before.num_tokens :]
        return delivered != before


def _decoded(text: _TextState | None, token: int) -> str | None:
    try:
        return None if text is None else text.detokenizer.decode([token], False)
    except Exception:  # a token that a broken vocabulary cannot decode still has a log-probability
        return None
