"""What a caller gets: `RequestOutput`, made from a request's sequences as their tokens arrive.

The text side (detokenising, stop strings) is handed in: the engine knows tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

from octavo.core.events import Preempted
from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request, Sequence
from octavo.engine.beam_search import BeamSearch, Hypothesis
from octavo.engine.structured_output import Constraint
from octavo.errors import RequestFailedError
from octavo.params.sampling_params import RequestOutputKind


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, by the engine's clock, in seconds. None: not yet.

    num_generation_tokens  over the samples that are told: of `best_of`, the best n; of a beam search, its answers
    num_cached_tokens      of the prompt, found in the prefix cache when it was first admitted
    num_preemptions        how often it was taken off the device, num_swaps of these to the host
    num_swapped_blocks     that went to the host in these
    num_recomputed_tokens  whose keys and values were given up in the others; the cache may still have some on return
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    num_swapped_blocks: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0

    @property
    def time_in_queue_s(self) -> float | None:
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def decode_time_s(self) -> float | None:
        """From the first token to the last."""
        return _between(self.first_token_time, self.last_token_time)

    def note(self, event: Preempted) -> None:
        self.num_preemptions += 1
        if event.how == "swap":
            self.num_swaps += 1
            self.num_swapped_blocks += event.num_blocks
        else:
            self.num_recomputed_tokens += event.num_positions

    @property
    def time_to_first_token_s(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token_s(self) -> float | None:
        """From the first token to the last, for each but the first of a sample; None with fewer than two."""
        span = _between(self.first_token_time, self.last_token_time)
        return None if span is None or self.num_generation_tokens < 2 else span / (self.num_generation_tokens - 1)

    @property
    def latency_s(self) -> float | None:
        """From arrival to the end."""
        return _between(self.arrival_time, self.finished_time)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(slots=True)
class Logprob:
    """What the model thought of a token, before anything that the request asks for. `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Of one position: the token that came, first, and as many of the likeliest as were asked for, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's samples. `token_ids` holds the stop token; `text` does not, unless asked to.

    logprobs           one entry for each of `token_ids` where `SamplingParams.logprobs` asks for them. With `echo` the
                       first is None: nothing comes before the prompt's first token
    cumulative_logprob the sum over the generated tokens, in the same case
    finish_reason      None while it runs; stop, length, abort or error
    score              what a beam search ranks by: cumulative_logprob / length ** length_penalty
    stop_reason        the stop string or stop token id that ended it, None for the model's own end token; for an error,
                       what went wrong
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
    """A request as far as it has come.

    prompt           None when token ids were given, and their text was not asked for by `echo`
    prompt_logprobs  one entry for each token of the prompt, None for the first, where they are asked for
    is_delta         the outputs hold what is new since the last one
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


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, bit by bit, and looks out for stop strings."""

    text: str
    stop_reason: str | None
    num_tokens_kept: int

    def push(self, ids: Seq[int]) -> str: ...

    def finish(self) -> str: ...

    def decode(self, ids: Seq[int], skip_special_tokens: bool) -> str:
        """The text of any tokens, for what is shown beside the sequence's own."""


MakeDetokenizer = Callable[[Request], Detokenizer]


@dataclass(slots=True)
class _Text:
    """The text of one sequence so far."""

    detokenizer: Detokenizer
    num_pushed: int = 0
    over: bool = False
    error: str = ""


class _Total:
    """The sum of a sample's log-probabilities, exact as `math.fsum` is, and no term of it added twice."""

    def __init__(self) -> None:
        self._num = 0
        self._parts: list[float] = []  # that do not overlap (Shewchuk 1996)

    def of(self, entries: Seq[TokenLogprobs], num: int) -> float:
        """Of the first `num` entries."""
        if num < self._num:  # what was cut off counts no more
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
class Told:
    """How much of a sequence the caller has been told."""

    num_tokens: int = 0
    num_chars: int = 0
    finished: bool = False


@dataclass(slots=True)
class RequestState:
    """A request, as the caller sees it.

    make_detokenizer   None: token ids only
    incremental        the text is wanted, or watched for stop strings, while it grows; else it is made once, at the end
    stream             the caller hears of every step
    failed_at          tokens known when a step of this request failed; -1: none did
    logprobs           sample -> what the model thought of each of its tokens, and perhaps of some past its end
    prompt_logprobs    of the prompt's tokens from the second on
    search             the beam search that it is, None for any other
    constraint         what keeps its outputs to a grammar, None for any other
    """

    request: Request
    prompt: str | None
    metrics: RequestMetrics
    make_detokenizer: MakeDetokenizer | None = None
    incremental: bool = False
    stream: bool = False
    failed_at: int = -1
    texts: dict[int, _Text] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    told: dict[int, Told] = field(default_factory=dict)
    num_prompt_logprobs_told: int = 0
    search: BeamSearch | None = None
    constraint: Constraint | None = None
    _entries: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)  # index -1: the prompt's
    _totals: dict[int, _Total] = field(default_factory=dict)
    _prompt_ids: list[int] = field(init=False)  # one list for all its outputs: a stream has many, and prompts are long
    _prompt_alone: bool = False

    def __post_init__(self) -> None:
        self._prompt_ids = self.request.prompt_token_ids.tolist()
        # It asked for no token. One is sampled all the same, since the scheduler knows no other end.
        self._prompt_alone = self.request.sampling_params.max_tokens == 0

    @property
    def num_known(self) -> int:
        """Tokens that the host knows, over all sequences."""
        return sum(len(s.token_ids) for s in (*self.request.sequences, *self.request.finished_sequences))

    def release(self) -> None:
        """It has ended, and the last of it has been told. Its sequences point to it, and a search to its text: without
        this only the collector could free them, which does not look for them while an engine works (`GCPause`)."""
        request = self.request
        request.sequences, request.finished_sequences, request.only_sequence = [], [], None
        if self.search is not None:
            self.search.ends = None

    # -- taking in -----------------------------------------------------------------------------------------------------

    def read(self, sequence: Sequence) -> bool:
        """Take in a sequence's new tokens; True when they complete a stop string, or cannot be turned into text."""
        text = self._text_of(sequence.index)
        if text is None or text.over or self._prompt_alone:
            return False
        tokens = sequence.token_ids[len(self.request.prompt_token_ids) + text.num_pushed :].tolist()
        if sequence.stop_token is not None and tokens and not self.request.sampling_params.include_stop_str_in_output:
            tokens.pop()  # the stop token is in token_ids, not in the text
        text.num_pushed += len(tokens)
        try:
            text.detokenizer.push(tokens)
        except Exception as error:  # this request's alone: it must not take the loop along
            text.error = f"its tokens could not be turned into text: {type(error).__name__}: {error}"
        text.over = text.detokenizer.stop_reason is not None or bool(text.error)
        return text.over

    def read_logprobs(self, index: int, entries: Seq[TokenLogprobs]) -> None:
        """Of the newest tokens of a sample. What lies past the sample's end is never looked at."""
        self.logprobs.setdefault(index, []).extend(entries)

    def read_prompt_logprobs(self, position: int, entries: Seq[TokenLogprobs]) -> None:
        """Of the prompt's tokens from `position` on. A prompt that was computed again tells what is known already."""
        num_known = 1 + len(self.prompt_logprobs) - position
        self.prompt_logprobs += entries[num_known:] if num_known >= 0 else ()

    def _text_of(self, index: int) -> _Text | None:
        if self.make_detokenizer is None:
            return None
        if index not in self.texts:
            self.texts[index] = _Text(self.make_detokenizer(self.request))
        return self.texts[index]

    # -- telling -------------------------------------------------------------------------------------------------------

    def output(self) -> RequestOutput:
        request, params = self.request, self.request.sampling_params
        if request.only_sequence is not None:
            outputs = [self._completion(request.only_sequence)]
        elif self.search is not None:
            outputs = self._answers(self.search)
        else:
            live = [s for s in request.sequences if not s.finish_reason]
            finished = [s for s in request.finished_sequences if s.finish_reason != "pruned"]
            sequences = sorted(finished + live, key=lambda s: s.index)
            outputs = [self._completion(s) for s in sequences]
            if params.selects_best_of:
                outputs = self._ranked(outputs)
        if request.error and (params.selects_best_of or self.search is not None):
            # Whoever failed may stand below those that are told; but of what failed, no ranking says anything.
            outputs = [replace(c, finish_reason="error", stop_reason=request.error) for c in outputs]
        metrics = self.metrics
        metrics.num_cached_tokens = max(0, request.num_cached_tokens)
        metrics.num_generation_tokens = sum([len(c.token_ids) for c in outputs])
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not (self.told and params.output_kind is RequestOutputKind.DELTA):
            prompt_logprobs = self._prompt_entries()
        is_delta = params.output_kind is RequestOutputKind.DELTA
        if is_delta:
            has_prompt = set(self.told)
            outputs = [c for c in outputs if self._cut_to_what_is_new(c) or (params.echo and c.index not in has_prompt)]
        if params.echo:
            for completion in outputs:
                if not is_delta or completion.index not in has_prompt:
                    self._put_prompt_before(completion)
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
        token_ids = [] if self._prompt_alone else sequence.output_token_ids
        finish_reason = sequence.finish_reason or None
        stop_reason: str | int | None = None
        if text is not None:
            if not self.incremental or sequence.finish_reason:
                self.read(sequence)
            if sequence.finish_reason and not text.over:
                text.detokenizer.finish()
                text.over = True
            if (stop_reason := text.detokenizer.stop_reason) is not None:
                token_ids = token_ids[: text.detokenizer.num_tokens_kept]
                finish_reason = "stop"  # also where a stop token or the length would have ended it, later
            if text.error:
                finish_reason = "error"
        if self._prompt_alone and finish_reason == "stop":
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
            self._put_logprobs(completion)
        return completion

    def _ranked(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n likeliest samples, best first; none before all have ended, which is when they are known."""
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
        text = self._new_text()
        if text is None:
            return False
        text.push(output)
        return text.stop_reason is not None

    def _new_text(self) -> Detokenizer | None:
        return None if self.make_detokenizer is None else self.make_detokenizer(self.request)

    def _answers(self, search: BeamSearch) -> list[CompletionOutput]:
        """Of a beam search: none before it is over."""
        request = self.request
        if request.sequences:
            return []
        cut_short = [s for s in request.finished_sequences if s.finish_reason in ("abort", "error")]
        if cut_short:
            search.give_up(cut_short, cut_short[0].finish_reason)
            request.finished_sequences = []
        best = search.hypotheses[: search.params.n or search.params.beam_width]
        return [self._answer(i, hypothesis) for i, hypothesis in enumerate(best)]

    def _answer(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        token_ids, request = hypothesis.token_ids, self.request
        stop_token = token_ids[-1] if token_ids and token_ids[-1] in request.stop_ids else None
        stop_reason: str | int | None = (
            stop_token if stop_token in (request.sampling_params.stop_token_ids or ()) else None
        )
        text = self._new_text()
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

    def prepare(self) -> Iterator[None]:
        """Make what the next output tells of log-probabilities, a little between two yields. `output` makes the rest:
        this is for who has others waiting, on an event loop."""
        request, params = self.request, self.request.sampling_params
        if params.prompt_logprobs is not None:
            yield from self._make_entries(-1, request.prompt_token_ids[1:], self.prompt_logprobs)
        if params.logprobs is not None and self.search is None:
            for sequence in (*request.sequences, *request.finished_sequences):
                if sequence.index in self.logprobs:
                    ids, known = sequence.output_token_ids, self.logprobs[sequence.index]
                    yield from self._make_entries(sequence.index, ids, known)

    def _put_logprobs(self, completion: CompletionOutput) -> None:
        index, num = completion.index, len(completion.token_ids)
        known = self.logprobs.get(index, [])
        completion.logprobs = self._entries_of(index, completion.token_ids, known[:num])[:num]
        completion.cumulative_logprob = self._totals.setdefault(index, _Total()).of(known, num)

    def _prompt_entries(self) -> list[PositionLogprobs | None]:
        token_ids = self.request.prompt_token_ids
        missing = len(token_ids) - 1 - len(self.prompt_logprobs)  # of a request that ended before its prompt did
        return [None, *self._entries_of(-1, token_ids[1:], self.prompt_logprobs), *[None] * missing]

    def _entries_of(self, index: int, token_ids: Seq[int], known: Seq[TokenLogprobs]) -> list[PositionLogprobs | None]:
        """For the caller, each made once; the list is the caller's own."""
        for _ in self._make_entries(index, token_ids, known):
            pass
        return self._entries[index][:]

    def _make_entries(self, index: int, token_ids: Seq[int], known: Seq[TokenLogprobs]) -> Iterator[None]:
        made = self._entries.setdefault(index, [])
        text, num = self._text_of(max(0, index)), len(made)
        for token, (logprob, rank, top_ids, top) in zip(token_ids[num:], known[num:], strict=False):
            position = {token: Logprob(logprob, rank, _decoded(text, token))}
            for place, (likely, its) in enumerate(zip(top_ids, top, strict=True), 1):
                if likely not in position:
                    position[likely] = Logprob(its, place, _decoded(text, likely))
            made.append(position)
            yield

    def _put_prompt_before(self, completion: CompletionOutput) -> None:
        text = self._text_of(completion.index)
        completion.token_ids[:0] = self.request.prompt_token_ids
        if text is not None:
            if self.prompt is None:
                skip = self.request.sampling_params.skip_special_tokens
                self.prompt = text.detokenizer.decode(self.request.prompt_token_ids, skip)
            completion.text = self.prompt + completion.text
        if completion.logprobs is not None:
            completion.logprobs[:0] = self._prompt_entries()

    def told_of(self, index: int) -> Told:
        return self.told.setdefault(index, Told())

    def _cut_to_what_is_new(self, completion: CompletionOutput) -> bool:
        """False if nothing is."""
        told = self.told_of(completion.index)
        before = Told(told.num_tokens, told.num_chars, told.finished)
        told.num_tokens, told.num_chars = len(completion.token_ids), len(completion.text)
        told.finished = completion.finished()
        completion.token_ids = completion.token_ids[before.num_tokens :]
        completion.text = completion.text[before.num_chars :]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[before.num_tokens :]
        return told != before


def _decoded(text: _Text | None, token: int) -> str | None:
    try:
        return None if text is None else text.detokenizer.decode([token], False)
    except Exception:  # the token of a broken vocabulary is still a number with a probability
        return None


REASON_CODES = ("no_allowed_token", "out_of_memory", "grammar_too_complex")
"""With which a reason begins that has a code of its own."""
REQUEST_FAILED = "request_failed"
"""The code of all other reasons."""


def error_code(reason: str) -> str | None:
    if "not finite" in reason:
        return RequestFailedError.code
    return next((code for code in REASON_CODES if reason.startswith(code)), None)


def request_failed_error(output: RequestOutput) -> RequestFailedError:
    """What a reader gets in the place of an output with an error."""
    reason = next(c.stop_reason for c in output.outputs if c.finish_reason == "error")
    return RequestFailedError(
        f"request {output.request_id} failed: {reason}", code=error_code(str(reason)) or REQUEST_FAILED
    )
