"""`ClientRequest`: a request at its client. It turns an engine's updates into text and `RequestOutput`s.

It also holds all that another engine needs to resume the request when the first one dies: the prompt, the tokens so
far, and the seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from octavo.core.plan import TokenLogprobs
from octavo.engine.beam_search import Hypothesis
from octavo.engine.engine_request import EngineRequest, sampling_params_of
from octavo.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from octavo.engine.process.ipc import AddRequest, MessageError, pack_tokens, params_to_wire
from octavo.engine.request_update import RequestStats, RequestUpdate, SampleUpdate, add_prompt_logprobs
from octavo.engine.text_processor import Detokenizer
from octavo.params.sampling_params import RequestOutputKind


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
    """How much of a sample earlier outputs contained."""

    num_tokens: int = 0
    num_chars: int = 0
    finished: bool = False


@dataclass(slots=True)
class Sample:
    """One sample of a request.

    token_ids       output tokens so far, its stop token included
    text            its detokenizer, once it is needed. `num_pushed` tokens are in it
    text_error      why its tokens could not be turned into text
    text_finished   the text will not change any more
    entries         of `logprobs`, as callers get them
    delivered       None before the first output
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_token: int | None = None
    text: Detokenizer | None = None
    num_pushed: int = 0
    text_finished: bool = False
    text_error: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    entries: list[PositionLogprobs | None] = field(default_factory=list)
    logprob_sum: _LogprobSum = field(default_factory=_LogprobSum)
    delivered: Delivered | None = None

    def detokenize(self, *, include_stop: bool) -> bool:
        """Detokenize the new tokens. True if they complete a stop string or have no text."""
        if self.text is None or self.text_finished:
            return False
        tokens = self.token_ids[self.num_pushed :]
        if self.stop_token is not None and tokens and not include_stop:
            tokens.pop()  # `token_ids` keeps the stop token, the text does not
        self.num_pushed += len(tokens)
        try:
            self.text.push(tokens)
        except Exception as error:  # fails this request only
            self.text_error = f"its tokens could not be turned into text: {type(error).__name__}: {error}"
        self.text_finished = self.text.stop_reason is not None or bool(self.text_error)
        return self.text_finished


class ClientRequest:
    """One request.

    new             the request as submitted; its seed must outlive the engine
    eos_token_ids   the model's end-of-sequence tokens
    samples         by index; of a beam search only the first, without tokens
    hypotheses      of a beam search that has finished, best first
    error           why it failed
    """

    def __init__(
        self,
        new: EngineRequest,
        *,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.new = new
        self._clock = clock
        self.beams, self.params = sampling_params_of(new.params)
        self._stop_ids = self.params.stop_ids(eos_token_ids)
        self._make_detokenizer = new.make_detokenizer if self.params.detokenize else None
        self._finds_stop_strings = bool(self.params.stop_strings) and self._make_detokenizer is not None
        # max_tokens=0 still samples one token: the scheduler ends a request only after a token.
        self._prompt_only = self.params.max_tokens == 0
        self.samples = {0: Sample(0)}
        self.hypotheses: list[Hypothesis] = []
        self.error = ""
        self.finished = False
        self.metrics = RequestMetrics(clock())
        self._past_metrics = self.metrics  # those of earlier engines
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_entries: list[PositionLogprobs | None] = []
        self._prompt_text = new.prompt
        self._prompt_ids = list(new.prompt_token_ids)  # shared by all outputs: streams have many, prompts are long

    @property
    def request_id(self) -> str:
        return self.new.request_id

    @property
    def failure(self) -> str:
        """Why it failed or was aborted; "" if it runs or has succeeded."""
        bad = [s.finish_reason for s in self.samples.values() if s.finish_reason in ("abort", "error")]
        return self.error or bad[0] if bad else ""

    def _text_of(self, sample: Sample) -> Detokenizer | None:
        """None: outputs have token ids only."""
        if sample.text is None:
            sample.text = self._new_detokenizer()
        return sample.text

    def _new_detokenizer(self) -> Detokenizer | None:
        return (
            None if self._make_detokenizer is None else self._make_detokenizer(self.new.prompt_token_ids, self.params)
        )

    # -- updates -------------------------------------------------------------------------------------------------------

    def apply_update(self, update: RequestUpdate) -> list[int]:
        """Apply an update. Returns the samples that end in a stop string now, which the engine cannot detect.

        Raises `MessageError` for an update that no engine can send for this request. The tokens known then are right.
        """
        for new in update.samples:
            self._check(new)
        stopped = [] if self.beams is not None else [new.index for new in update.samples if self._apply_sample(new)]
        if update.stats is not None:
            self._apply_stats(update.stats)
        if update.prompt_logprobs is not None:
            add_prompt_logprobs(self.prompt_logprobs, update.prompt_position, update.prompt_logprobs)
        if self.beams is not None:
            if update.finished:
                self.finish(update.samples[0].finish_reason if update.samples else "stop")
            return []
        self.finished = all(sample.finish_reason for sample in self.samples.values())
        if self.finished and self.metrics.finished_time is None:
            self.metrics.finished_time = self._clock()
        if update.finished and not self.finished:
            live = [s.index for s in self.samples.values() if not s.finish_reason]
            raise MessageError(f"the request has finished, and its samples {live} have no finish reason")
        return stopped

    def _check(self, new: SampleUpdate) -> None:
        width = self.params.width if self.beams is None else self.beams.beam_width
        if new.index >= width:
            raise MessageError(f"it has sample {new.index}, and the request has {width} samples")
        sample = self.samples.get(new.index)
        if self.beams is not None or (sample is not None and sample.finish_reason):
            return
        if new.position != (num_known := 0 if sample is None else len(sample.token_ids)):
            raise MessageError(f"it continues at token {new.position} of sample {new.index}, and {num_known} are known")

    def _apply_sample(self, new: SampleUpdate) -> bool:
        """True if the sample ends in a stop string now."""
        sample = self.samples.get(new.index)
        if sample is None:
            sample = self.samples[new.index] = Sample(new.index)
        elif sample.finish_reason:  # it has ended on this side
            return False
        if new.token_ids:
            self.metrics.last_token_time = self._clock()
            sample.token_ids += new.token_ids
        if new.logprobs is not None:
            sample.logprobs += new.logprobs
        sample.stop_token = new.stop_token
        ends_here = self._finds_stop_strings and self._detokenize(sample) and not new.finish_reason
        sample.finish_reason = "stop" if ends_here else new.finish_reason
        return ends_here

    def _detokenize(self, sample: Sample) -> bool:
        if self._prompt_only or self._text_of(sample) is None:
            return False
        return sample.detokenize(include_stop=self.params.include_stop_str_in_output)

    def _apply_stats(self, stats: RequestStats) -> None:
        stats.metrics.add_past(self._past_metrics)
        self.metrics = stats.metrics
        self.error = stats.error
        if stats.hypotheses is not None:
            self.hypotheses = stats.hypotheses

    def finish(self, reason: str, error: str = "") -> None:
        """Finish the request with its tokens so far."""
        self.error = error or self.error
        for sample in self.samples.values():
            sample.finish_reason = sample.finish_reason or reason
        if self.beams is not None and not self.hypotheses:  # the engine sends those of a search
            self.hypotheses = [Hypothesis(0.0, 0.0, [], reason, [])]
        self.finished = True
        if self.metrics.finished_time is None:
            self.metrics.finished_time = self._clock()

    def add_command(self) -> AddRequest:
        """The command that starts or resumes the request in an engine process. A beam search restarts at its prompt."""
        self._past_metrics, new = self.metrics, self.new
        live = [s for s in self.samples.values() if s.token_ids and not s.finish_reason]
        return AddRequest(
            new.request_id,
            pack_tokens(new.prompt_token_ids),
            params_to_wire(new.params),
            self.beams is not None,
            (new.seed or 0) if self.params.seed is None else self.params.seed,
            new.priority,
            new.salt,
            {sample.index: pack_tokens(sample.token_ids) for sample in live} or None,
            new.pin,
            new.tenant,
            new.index_in_call,
        )

    # -- output --------------------------------------------------------------------------------------------------------

    def output(self) -> RequestOutput:
        """The output so far, or since the previous call for `RequestOutputKind.DELTA`."""
        params = self.params
        if self.beams is not None:
            outputs = self._beam_outputs()
        else:
            outputs = [self._completion(self.samples[index]) for index in sorted(self.samples)]
            if params.selects_best_of:
                outputs = self._ranked(outputs)
        if self.error and (params.selects_best_of or self.beams is not None):
            # The failed sequence may rank below the returned ones, so all of them report the error.
            outputs = [replace(c, finish_reason="error", stop_reason=self.error) for c in outputs]
        metrics = self.metrics
        metrics.num_generation_tokens = sum([len(c.token_ids) for c in outputs])
        is_delta = params.output_kind is RequestOutputKind.DELTA
        has_prompt = {s.index for s in self.samples.values() if s.delivered is not None}
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not (has_prompt and is_delta):
            prompt_logprobs = self._all_prompt_entries()
        if is_delta:
            outputs = [c for c in outputs if self._cut_to_delta(c) or (params.echo and c.index not in has_prompt)]
        if params.echo:
            for completion in outputs:
                if not is_delta or completion.index not in has_prompt:
                    self._prepend_prompt(completion)
        return RequestOutput(
            self.request_id,
            self._prompt_text,
            self._prompt_ids,
            outputs,
            self.finished,
            metrics,
            metrics.num_cached_tokens,
            prompt_logprobs,
            is_delta,
        )

    def _completion(self, sample: Sample) -> CompletionOutput:
        text = self._text_of(sample)
        token_ids = [] if self._prompt_only else sample.token_ids[:]
        finish_reason = sample.finish_reason or None
        stop_reason: str | int | None = None
        if text is not None:
            self._detokenize(sample)
            if sample.finish_reason and not sample.text_finished:
                text.finish()
                sample.text_finished = True
            if (stop_reason := text.stop_reason) is not None:
                token_ids = token_ids[: text.num_tokens_kept]
                finish_reason = "stop"  # the stop string came before the stop token or the length limit
            if sample.text_error:
                finish_reason = "error"
        if self._prompt_only and finish_reason == "stop":
            finish_reason = "length"
        elif stop_reason is None and sample.stop_token in (self.params.stop_token_ids or ()):
            stop_reason = sample.stop_token
        if finish_reason == "error":
            stop_reason = sample.text_error or self.error
        completion = CompletionOutput(
            sample.index,
            "" if text is None else text.text,
            token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        if self.params.logprobs is not None:
            num = len(token_ids)
            completion.logprobs = self._entries(sample, token_ids)[:num]
            completion.cumulative_logprob = sample.logprob_sum.of(sample.logprobs, num)
        return completion

    def _ranked(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n samples with the highest log-probability, best first; [] until all samples have finished."""
        if not self.finished:
            return []
        totals = {
            c.index: math.fsum(entry.logprob for entry in self.samples[c.index].logprobs[: len(c.token_ids)])
            for c in completions
        }
        best = sorted(completions, key=lambda c: -totals[c.index])[: self.params.n]
        return [replace(c, index=i, cumulative_logprob=totals[c.index]) for i, c in enumerate(best)]

    def _beam_outputs(self) -> list[CompletionOutput]:
        """The best hypotheses of a beam search; [] until it has finished."""
        if not self.finished or self.beams is None:
            return []
        best = self.hypotheses[: self.beams.n or self.beams.beam_width]
        return [self._beam_output(i, hypothesis) for i, hypothesis in enumerate(best)]

    def _beam_output(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        token_ids = hypothesis.token_ids
        stop_token = token_ids[-1] if token_ids and token_ids[-1] in self._stop_ids else None
        is_custom = stop_token in (self.params.stop_token_ids or ())
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
            completion.logprobs = []
            for _ in _build_entries(completion.logprobs, token_ids, hypothesis.logprobs, text):
                pass
        return completion

    def build_logprobs(self) -> Iterator[None]:
        """Build the log-probability entries of the next output, a few per yield, so that an event loop can interleave
        other work. Optional: `output` builds the missing ones."""
        if self.params.prompt_logprobs is not None:
            yield from self._build_prompt_entries()
        if self.params.logprobs is not None and self.beams is None:
            for sample in self.samples.values():
                yield from _build_entries(sample.entries, sample.token_ids, sample.logprobs, self._text_of(sample))

    def _entries(self, sample: Sample, token_ids: Seq[int]) -> list[PositionLogprobs | None]:
        """Entries for a caller; each is built once, and the list is a copy."""
        for _ in _build_entries(sample.entries, token_ids, sample.logprobs, self._text_of(sample)):
            pass
        return sample.entries[:]

    def _build_prompt_entries(self) -> Iterator[None]:
        prompt = self._prompt_ids[1:]
        return _build_entries(self._prompt_entries, prompt, self.prompt_logprobs, self._text_of(self.samples[0]))

    def _all_prompt_entries(self) -> list[PositionLogprobs | None]:
        for _ in self._build_prompt_entries():
            pass
        num_missing = len(self._prompt_ids) - 1 - len(self._prompt_entries)  # it ended before its prefill did
        return [None, *self._prompt_entries, *[None] * num_missing]

    def _prepend_prompt(self, completion: CompletionOutput) -> None:
        text = self._text_of(self.samples[0])
        completion.token_ids[:0] = self._prompt_ids
        if text is not None:
            if self._prompt_text is None:
                self._prompt_text = text.decode(self._prompt_ids, self.params.skip_special_tokens)
            completion.text = self._prompt_text + completion.text
        if completion.logprobs is not None:
            completion.logprobs[:0] = self._all_prompt_entries()

    def _cut_to_delta(self, completion: CompletionOutput) -> bool:
        """Cut a completion to what is new since the previous output; False if nothing is."""
        sample = self.samples[completion.index]
        before = sample.delivered or Delivered()
        sample.delivered = Delivered(len(completion.token_ids), len(completion.text), completion.finished())
        completion.token_ids = completion.token_ids[before.num_tokens :]
        completion.text = completion.text[before.num_chars :]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[before.num_tokens :]
        return sample.delivered != before


def _build_entries(
    entries: list[PositionLogprobs | None],
    token_ids: Seq[int],
    known: Seq[TokenLogprobs],
    text: Detokenizer | None,
) -> Iterator[None]:
    """Build the missing entries of tokens, one per yield."""
    num = len(entries)
    for token, (logprob, rank, top_ids, top_logprobs) in zip(token_ids[num:], known[num:], strict=False):
        position = {token: Logprob(logprob, rank, _decoded(text, token))}
        for top_rank, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
            if top_id not in position:
                position[top_id] = Logprob(top_logprob, top_rank, _decoded(text, top_id))
        entries.append(position)
        yield


def _decoded(text: Detokenizer | None, token: int) -> str | None:
    try:
        return None if text is None else text.decode([token], False)
    except Exception:  # a token that a broken vocabulary cannot decode still has a log-probability
        return None
