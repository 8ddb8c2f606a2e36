"""The flight recorder: keeps the inputs of an engine's last minutes, so that they can be replayed.

It records each command that the scheduler gets (`core.commands`) with its time: arrivals, aborts, stops, planned steps,
and how many tokens each step returned. The scheduler's decisions follow from these, so they are not stored. Once a
minute the recorder takes a snapshot of the scheduler and begins a new segment. It drops the oldest segment when the
later ones reach back far enough, or when memory runs short.

    segment     snapshot | request, plan, request, plan, result, plan, result, ...
    segment                                                      snapshot | plan, result, abort, ...

`format` describes the file, `player` reads it.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from octavo.core import commands as cmd
from octavo.core import events as ev
from octavo.core.policy import PreemptionCosts
from octavo.core.request import Request
from octavo.core.snapshot import State
from octavo.engine.engine import Engine
from octavo.view.recording.digests import Digests
from octavo.view.recording.format import (
    DIGEST_BYTES,
    VERSION,
    CallKind,
    RecordedRequest,
    RecordingFile,
    Segment,
    plan_crc,
    write_file,
)
from octavo.view.recording.request_log import RequestLog

logger = logging.getLogger("octavo.flight")

KEEP_S = 600.0
SEGMENT_S = 60.0
"""Seconds between two snapshots."""
MAX_BYTES = 64 << 20
"""Approximate limit of the recorder's memory. Two segments are kept in any case."""
MIN_SEGMENT_RATIO = 1000
"""A segment lasts at least this many times as long as its snapshot took."""
MAX_FILES = 20
"""Dumps kept in a directory: an engine that crashes repeatedly does not fill the disk."""
SUFFIX = ".flight"


@dataclass(slots=True)
class _OpenSegment:
    """A segment while it grows. `keys` has the content of each sealed block when it began, as the pool packs it."""

    snapshot: State
    keys: list[bytes | None]
    present: list[RecordedRequest]
    begin_s: float
    requests: list[RecordedRequest] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    times_s: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    costs: array[float] = field(default_factory=lambda: array("d"))
    checksums: array[int] = field(default_factory=lambda: array("I"))
    num_digests: int = 0

    def add(self, kind: CallKind, time_s: float, *numbers: int) -> None:
        self.kinds.append(kind)
        self.times_s.append(time_s)
        if numbers:
            self.numbers.extend(numbers)

    def add_plan(self, time_s: float, costs: PreemptionCosts) -> None:
        self.add(CallKind.PLAN, time_s)
        self.costs.extend((costs.token_s, costs.step_s, costs.move_s))
        self.checksums.append(0)  # set with the plan's event; an empty plan has none

    @property
    def num_call_bytes(self) -> int:
        num_bytes = 9 * len(self.kinds) + 8 * (len(self.numbers) + len(self.costs)) + 4 * len(self.checksums)
        return num_bytes + 500 * len(self.requests) + DIGEST_BYTES * self.num_digests

    @property
    def num_bytes(self) -> int:
        return self.num_call_bytes + 32 * len(self.keys) + 500 * len(self.present)

    def close(self, digests: Digests) -> Segment:
        """The segment so far, as it is written."""
        arrays = (self.kinds, self.times_s, self.numbers, self.costs, self.checksums)
        sealed = digests.of_sealed(self.keys, array("q", self.snapshot["pool"]["seal_id"]), self._digests_by_seal())
        return Segment(self.snapshot, sealed, *(bytes(memoryview(a)) for a in arrays))

    def _digests_by_seal(self) -> dict[int, bytes]:
        """Seal id -> block digest, for blocks of the sequences that were present when the segment began."""
        requests = {request.number: request for request in self.present}
        digests: dict[int, bytes] = {}
        for seq in self.snapshot["sequences"]:
            request = requests[self.snapshot["requests"][seq["request"]]["number"]]
            sample = request.samples.get(seq["index"])
            known = seq["beam_digests"] or request.block_digests + (b"" if sample is None else sample.block_digests)
            for i, seal in enumerate(seq["seal_ids"][: len(known) // DIGEST_BYTES]):
                digests[seal] = known[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
        return digests


class FlightRecorder:
    """Records the inputs of an engine from now on. The engine may be idle or in the middle of its work.

    directory   where dumps go; None: `dump` needs a path
    keep_s      how far back a dump reaches, if memory allows; up to a segment further
    segment_s   seconds between two snapshots
    max_bytes   approximate limit of the recorder's memory

    It costs a few microseconds a step, and a digest for each block of a request's prompt and output.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path | None = None,
        *,
        keep_s: float = KEEP_S,
        segment_s: float = SEGMENT_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.keep_s, self.segment_s, self.max_bytes = keep_s, segment_s, max_bytes
        self._engine, self._scheduler = engine, engine.scheduler
        self._clock = clock
        self._digests = Digests(self._scheduler.cache.block_size)
        self._requests = RequestLog(self._digests)
        self._num_dumps = 0
        self._segments: deque[_OpenSegment] = deque()
        self._detach = self._scheduler.tee.attach(self._record), self._scheduler.events.subscribe(self._listen)
        self._begin_segment(clock())

    def detach(self) -> None:
        """Stop recording. The recording stays."""
        for detach in self._detach:
            detach()

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the recorder."""
        return sum(segment.num_bytes for segment in self._segments)

    # -- commands ------------------------------------------------------------------------------------------------------

    def _record(self, command: cmd.Command) -> None:
        now, requests = self._clock(), self._requests
        match command:
            case cmd.Schedule():
                self._add_plan(now)
            case cmd.Update():
                self._add_result(command, now)
            case cmd.BeamsSelected(request, parents, selected):
                requests.add_choices(request, parents, selected)
            case cmd.Add(request, max_tokens):
                recorded = requests.add(request, max_tokens)
                self._segments[-1].requests.append(recorded)
                self._segments[-1].num_digests += len(recorded.block_digests) // DIGEST_BYTES
                self._add(CallKind.ADD, now)
            case cmd.Abort(request, reason):
                self._add(CallKind.ABORT, now, requests[request].number, reason == "error")
            case cmd.Stop(sequence):
                self._add(CallKind.STOP, now, requests[sequence.request].number, sequence.index)
            case cmd.Unpin(sequence):
                self._add(CallKind.UNPIN, now, requests.unpin(sequence.request))
            case cmd.ResetPrefixCache():
                self._add(CallKind.RESET, now)
            case cmd.Fail(step, limit):
                self._add(CallKind.FAIL, now, self._scheduler.in_flight.index(step), limit)
            case cmd.Confine(members):
                self._add(CallKind.CONFINE, now, len(members), *requests.numbers(members))
            case cmd.LimitSteps(limit):
                self._add(CallKind.STEP_LIMIT, now, limit)

    def _add(self, kind: CallKind, now: float, *numbers: int) -> None:
        self._segments[-1].add(kind, now, *numbers)

    def _add_plan(self, now: float) -> None:
        segment, scheduler = self._segments[-1], self._scheduler
        self._requests.forget_ended(scheduler.in_flight[0].plan.step if scheduler.in_flight else scheduler.num_steps)
        if now - segment.begin_s > self.segment_s or segment.num_call_bytes > self.max_bytes // 8:
            segment = self._begin_segment(now)
            if members := scheduler.confined_to:  # older readers of this version do not take it from the snapshot
                segment.add(CallKind.CONFINE, now, len(members), *self._requests.numbers(members))
        segment.add_plan(now, scheduler.policy.costs)

    def _add_result(self, update: cmd.Update, now: float) -> None:
        step, result, last = update
        lengths = list(map(len, result.tokens))
        if result.corrupt:
            self._add(CallKind.CORRUPT, now, len(result.corrupt), *result.corrupt)
        if num_accepted := sum(num_right for passes in result.drafts.values() for _, num_right in passes):
            self._add(CallKind.ACCEPTED, now, num_accepted)
        if last and lengths == step.plan.num_sampled.tolist() and not result.errors:
            self._add(CallKind.RESULT, now)
        else:
            kind = CallKind.UNEVEN_RESULT if last else CallKind.PARTIAL_RESULT
            self._add(kind, now, len(lengths), *lengths, len(result.errors), *result.errors)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._segments[-1].checksums[-1] = plan_crc(event)
        elif isinstance(event, ev.Finished):
            is_pinned = event.request_id in self._scheduler.cache.pins
            recorded = self._requests.finish(event.request_id, self._scheduler.num_steps, is_pinned=is_pinned)
            num_bytes = sum(len(sample.block_digests) for sample in recorded.samples.values())
            self._segments[-1].num_digests += num_bytes // DIGEST_BYTES

    # -- segments ------------------------------------------------------------------------------------------------------

    def _begin_segment(self, now: float) -> _OpenSegment:
        """Take a snapshot, and drop the oldest segment if the later ones reach back far enough."""
        (state, roster), log = self._scheduler.snapshot(), self._requests
        present = [log[request] if request in log else self._add_present(request) for request in roster.requests]
        for entry, recorded in zip(state["requests"], present, strict=True):
            entry["number"] = recorded.number
        for entry, seq in zip(state["sequences"], roster.sequences, strict=True):
            entry["beam_digests"] = None if seq.request.select_beams is None else log.beam_digests(seq)
        state["num_beam_choices"] = {r.number: len(r.beam_choices) for r in present if r.beam_choices}
        segment = _OpenSegment(state, state.pop("keys"), present, now)
        self._segments.append(segment)
        self.segment_s = max(self.segment_s, MIN_SEGMENT_RATIO * (self._clock() - now))
        while len(self._segments) > 2 and (
            now - self._segments[1].begin_s > self.keep_s or self.num_bytes > self.max_bytes
        ):
            self._segments.popleft()
        return segment

    def _add_present(self, request: Request) -> RecordedRequest:
        """Add a request that was there before the recorder."""
        assert request.max_tokens is not None
        return self._requests.add(request, request.max_tokens)

    # -- dumps ---------------------------------------------------------------------------------------------------------

    def dump(self, reason: str = "asked", path: Path | None = None) -> Path:
        """Write all segments into a new file of the directory, or to `path`, and return its path. The engine goes on.

        Raises `OSError` if the file cannot be written.
        """
        if path is None:
            assert self.directory is not None, "a recorder without a directory needs a path"
            self.directory.mkdir(parents=True, exist_ok=True)
            self._num_dumps += 1
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._num_dumps}-{reason}{SUFFIX}"
            path = self.directory / name
        self._requests.record_outputs()
        requests = {request.number: request for request in self._segments[0].present}
        requests |= {request.number: request for segment in self._segments for request in segment.requests}
        engine = {"max_model_len": self._engine.limits.max_model_len, "overlap": self._engine.overlap}
        segments = [segment.close(self._digests) for segment in self._segments]
        settings = self._scheduler.settings()
        write_file(RecordingFile(VERSION, reason, settings, engine, list(requests.values()), segments), path)
        if self.directory is not None:  # never the new file: the clock may have been ahead when the others were named
            for old in sorted({*self.directory.glob(f"*{SUFFIX}")} - {path})[: 1 - MAX_FILES]:
                old.unlink(missing_ok=True)
        return path

    def dump_last(self, reason: str) -> None:
        """Dump when the engine crashes. Never raises."""
        try:
            logger.error("the engine crashed; its last minutes are in %s", self.dump(reason))
        except Exception as error:
            logger.error("the flight recorder could not be written: %s", error)
