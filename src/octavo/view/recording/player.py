"""Replays a dump of the flight recorder: the same calls to the same scheduler, which then decides as it did."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core import events as ev
from octavo.core.block_pool import group_of, pack_key
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepResult
from octavo.core.request import Request, SelectBeams, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import State
from octavo.errors import TraceError
from octavo.params.sampling_params import SamplingParams
from octavo.view.recording.format import (
    DIGEST_BYTES,
    CallKind,
    RecordedRequest,
    RecordingFile,
    Segment,
    plan_crc,
    read_file,
)
from octavo.view.recording.tokens import FILL, STOP, MadeUpTokens


class ReplayedCall(NamedTuple):
    """One call to the scheduler and its result.

    time_s    since the beginning of the recording
    step      of a PLAN: the new step, which may have no plan; of a result: its step
    request   that arrived or was aborted
    finished  requests that a result finished
    """

    kind: CallKind
    time_s: float
    step: InFlightStep | None = None
    request: Request | None = None
    finished: Seq[Request] = ()


class Recording:
    """A dump, and the tokens that stand for its prompts and outputs."""

    def __init__(self, file: RecordingFile, *, whole_blocks: bool = False) -> None:
        self.file = file
        self.requests = {request.number: request for request in file.requests}
        self.tokens = MadeUpTokens(file.requests, file.settings["block_size"], whole_blocks=whole_blocks)

    @classmethod
    def load(cls, path: Path, *, whole_blocks: bool = False) -> Recording:
        """Read a dump. With `whole_blocks`, every token of a block identifies its content: for other block sizes; the
        replay is no longer exact.

        Raises `TraceError` if the file is not a dump or has another version; `OSError` if it cannot be read."""
        return cls(read_file(path), whole_blocks=whole_blocks)

    @property
    def begin_s(self) -> float:
        """The first time in the recording, on the engine's clock."""
        return next((array("d", segment.times_s)[0] for segment in self.file.segments if segment.times_s), 0.0)

    @property
    def duration_s(self) -> float:
        """Seconds from the first time to the last."""
        segments = reversed(self.file.segments)
        return next((array("d", s.times_s)[-1] for s in segments if s.times_s), 0.0) - self.begin_s

    def replay(self, first_segment: int = 0) -> Player:
        return Player(self, first_segment)


class Player:
    """Replays a recording from the beginning of one of its segments. `scheduler` is in the state of that moment:
    subscribe to its events, then iterate over `calls`.
    """

    def __init__(self, recording: Recording, first_segment: int = 0) -> None:
        self.recording = recording
        file = recording.file
        self.segments = file.segments[first_segment:]
        self._samples: dict[Request, dict[int, array[int]]] = {}
        self._last_step: ev.Step | None = None
        self._corrupt: list[int] = []  # host blocks that the next result reports
        state = self.segments[0].snapshot
        self._num_beam_choices: dict[int, int] = state["num_beam_choices"]
        present = {request["number"] for request in state["requests"]}
        requests = [request for request in file.requests if request.number not in present]
        if first_segment:
            num_added = [segment.kinds.count(CallKind.ADD) for segment in file.segments]
            requests = file.requests[len(file.requests) - sum(num_added[first_segment:]) :]
        self._requests = iter(requests)
        self.scheduler = Scheduler.from_settings(file.settings)
        self._restore(self.segments[0])
        self.scheduler.events.subscribe(self._listen)

    def calls(self) -> Iterator[ReplayedCall]:
        """Make every recorded call again.

        Raises `TraceError` where this version of Octavo plans something else than was recorded, or the file is damaged.
        If the engine crashed of a bug in the scheduler, raises the same error at the same call.
        """
        begin_s = self.recording.begin_s
        for number, segment in enumerate(self.segments):
            numbers, costs = iter(array("q", segment.numbers)), iter(array("d", segment.costs))
            checksums = iter(array("I", segment.checksums))
            for kind, at_s in zip(map(CallKind, segment.kinds), array("d", segment.times_s), strict=True):
                if kind is CallKind.PLAN:
                    call = ReplayedCall(kind, at_s - begin_s, self._plan(costs))
                    if next(checksums) != (plan_crc(self._last_step) if call.step and self._last_step else 0):
                        raise TraceError(
                            f"step {self.scheduler.num_steps - 1}, {call.time_s:.3f} s in (segment {number}), was "
                            "planned differently: another version of Octavo made the recording; replay it with that "
                            "version"
                        )
                elif kind in (CallKind.RESULT, CallKind.UNEVEN_RESULT, CallKind.PARTIAL_RESULT):
                    call = ReplayedCall(kind, at_s - begin_s, *self._result(kind, numbers))
                else:
                    call = ReplayedCall(kind, at_s - begin_s, None, self._call(kind, numbers))
                yield call

    def _plan(self, costs: Iterator[float]) -> InFlightStep:
        known = self.scheduler.policy.costs
        known.token_s, known.step_s, known.move_s = next(costs), next(costs), next(costs)
        return self.scheduler.schedule()

    def _result(self, kind: CallKind, numbers: Iterator[int]) -> tuple[InFlightStep, None, list[Request]]:
        step = self.scheduler.in_flight[0]
        lengths, failed = step.plan.num_sampled.tolist(), list[int]()
        if kind is not CallKind.RESULT:
            lengths, failed = _list(numbers), _list(numbers)
        tokens = self._sampled_tokens(step, lengths)
        result = StepResult(tokens, dict.fromkeys(failed, "as recorded"), corrupt=self._corrupt)
        self._corrupt = []
        finished = self.scheduler.update(step, result, last=kind is not CallKind.PARTIAL_RESULT)
        for request in finished:
            self._samples.pop(request, None)
        return step, None, finished

    def _call(self, kind: CallKind, numbers: Iterator[int]) -> Request | None:
        """Make a call that is neither a plan nor a result. Returns the request that arrived or was aborted."""
        scheduler = self.scheduler
        match kind:
            case CallKind.ADD:
                request = self._new_request(next(self._requests))
                scheduler.add(request)
                return request
            case CallKind.ABORT:
                return scheduler.abort(str(next(numbers)), "error" if next(numbers) else "abort")
            case CallKind.STOP:
                request, index = scheduler.requests[str(next(numbers))], next(numbers)
                scheduler.stop(next(seq for seq in request.sequences if seq.index == index))
            case CallKind.UNPIN:
                scheduler.unpin(str(next(numbers)))
            case CallKind.RESET:
                scheduler.cache.reset_prefix_cache()
            case CallKind.FAIL:
                scheduler.fail(scheduler.in_flight[next(numbers)], next(numbers))
            case CallKind.CONFINE:
                scheduler.confine([scheduler.requests[str(number)] for number in _list(numbers)])
            case CallKind.STEP_LIMIT:
                scheduler.limit_steps(next(numbers))
            case CallKind.ACCEPTED:  # in the result that follows
                scheduler.in_flight[0].num_accepted += next(numbers)
            case CallKind.CORRUPT:
                self._corrupt = _list(numbers)
        return None

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._last_step = event

    # -- results -------------------------------------------------------------------------------------------------------

    def _sampled_tokens(self, step: InFlightStep, lengths: list[int]) -> list[Any]:
        tokens: list[Any] = []
        for i, (seq, length) in enumerate(zip(step.sequences, lengths, strict=True)):
            if i in step.plan.num_samples and seq.request.select_beams is None:
                first = len(seq.request.prompt_token_ids)
                tokens.append([self._output(seq.request, index, first, 1)[0] for index in range(length)])
            else:
                tokens.append(self._output(seq.request, seq.index, len(seq.token_ids), length))
        return tokens

    def _output(self, request: Request, index: int, begin: int, length: int) -> list[int]:
        """The tokens of a sample from a position on. Past the end of what was recorded they do not matter."""
        samples = self._samples.setdefault(request, {})
        if index not in samples:
            recorded = self.recording.requests[int(request.request_id)]
            samples[index] = self.recording.tokens.sample(recorded, index)
        known = samples[index][begin : begin + length].tolist()
        return known + [FILL] * (length - len(known))

    def _select_beams(self, request: RecordedRequest) -> SelectBeams:
        choices: Iterator[Any] = iter(request.beam_choices[self._num_beam_choices.get(request.number, 0) :])

        def select(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
            token_of = self.recording.tokens.of_choice
            return [(parents[next(choices)][0], token_of(next(choices))) for _ in range(next(choices))]

        return select

    # -- requests and the first state ----------------------------------------------------------------------------------

    def _new_request(self, recorded: RecordedRequest) -> Request:
        sampling = SamplingParams(
            max_tokens=recorded.max_tokens, skip_reading_prefix_cache=recorded.skip_prefix_cache, detokenize=False
        )
        begin, tokens = recorded.num_prompt, self.recording.tokens
        return Request(
            str(recorded.number),
            tokens.prompt(recorded),
            sampling,
            stop_ids=(STOP,),
            salt=recorded.salt,
            select_beams=self._select_beams(recorded) if recorded.beam_search else None,
            **Request.INPUTS.arguments(recorded),
            resume={i: tokens.sample(recorded, i)[begin : begin + n] for i, n in recorded.resumed.items()} or None,
        )

    def _tokens_of(self, number: int, sequence: State) -> array[int]:
        """The tokens of a sequence that was present when a segment began."""
        length, tokens = sequence["num_tokens"], self.recording.tokens
        if (digests := sequence["beam_digests"]) is not None:
            num_bytes = DIGEST_BYTES * (length // tokens.block_size)
            return tokens.of(digests[:num_bytes], digests[num_bytes:], length)
        return tokens.sample(self.recording.requests[number], sequence["index"])[:length]

    def _restore(self, segment: Segment) -> None:
        state, settings, made_up = segment.snapshot, self.recording.file.settings, self.recording.tokens
        numbers = [entry["number"] for entry in state["requests"]]
        tokens = [self._tokens_of(numbers[entry["request"]], entry) for entry in state["sequences"]]
        content: dict[int, bytes] = {}  # seal id -> tokens, as the sequences have them
        for entry, known in zip(state["sequences"], tokens, strict=True):
            for i, seal in enumerate(entry["seal_ids"]):
                size = made_up.block_size
                content.setdefault(seal, known[i * size : (i + 1) * size].tobytes())
        keys: list[bytes | None] = [None] * (settings["num_blocks"] + 1)
        seals = array("q", state["pool"]["seal_id"])
        for block, parent, salt, digest in segment.sealed_blocks:
            made = digest if group_of(digest) else content.get(seals[block], made_up.of_block(digest).tobytes())
            keys[block] = pack_key((parent or salt, made))
        requests = [self._new_request(self.recording.requests[number]) for number in numbers]
        self.scheduler.restore(state | {"keys": keys}, requests, tokens)


def _list(numbers: Iterator[int]) -> list[int]:
    """A list that is recorded with its length before it."""
    return [next(numbers) for _ in range(next(numbers))]
