"""The flight recorder: keeps the inputs of an engine's last minutes, so that they can be replayed.

It wraps the scheduler's methods and records each call with its time: arrivals, aborts, stops, planned steps, and how
many tokens each step returned. The scheduler's decisions follow from these calls, so they are not stored. Once a minute
the recorder takes a snapshot of the pool and the queues (`core.snapshot`) and begins a new segment. It drops the oldest
segment when the later ones reach back far enough, or when memory runs short.

    segment     snapshot | request, plan, request, plan, result, plan, result, ...
    segment                                                      snapshot | plan, result, abort, ...

A recording holds no text and no tokens. Blocks of prompts and outputs are stored as 8-byte digests under a key that is
discarded with the recorder: a recording shows which requests share content, not the content. `view.recording.player`
reads a dump.
"""

from __future__ import annotations

import gzip
import logging
import os
import secrets
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from octavo.core import events as ev
from octavo.core.block_pool import _unpack
from octavo.core.kv_cache_manager import common_prefix_length
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, SelectBeams, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import SchedulerState, scheduler_settings, snapshot_scheduler
from octavo.engine.engine import Engine

logger = logging.getLogger("octavo.flight")

VERSION = 6
KEEP_S = 600.0
SEGMENT_S = 60.0
"""Seconds between two snapshots."""
MAX_BYTES = 64 << 20
"""Approximate limit of the recorder's memory. Two segments are kept in any case."""
MIN_SEGMENT_RATIO = 1000
"""A segment lasts at least this many times as long as its snapshot took."""
DIGEST_BYTES = 8
"""Among a million blocks, two digests collide by chance once in forty million recordings."""
MAX_CACHED_DIGESTS = 64
"""Digests of beams' last full blocks that are cached, so that they are not recomputed for each token."""
MAX_FILES = 20
"""Dumps kept in a directory: an engine that crashes repeatedly does not fill the disk."""
SUFFIX = ".flight"
STOP_MARK = b"stop"
"""Stands in place of a digest."""


class CallKind(IntEnum):
    """A recorded call to the scheduler, and what `Segment.numbers` holds for it.

    ADD, RESET      nothing; ADD takes the next request of the segment
    ABORT           the request, and 1 if it failed
    UNPIN           the request
    STOP            the request, and the index of the sample that ended in a stop string
    PLAN            nothing; `costs` has preemption's three costs in seconds, `checksums` the plan's checksum
    RESULT          nothing: all tokens of the oldest plan in flight returned
    UNEVEN_RESULT   the number of slices, the number of tokens of each; the number of failed slices, and their indices
    PARTIAL_RESULT  the same; more of the result follows
    FAIL            the index of the failed plan in flight, and the new step limit if it ran out of memory, else 0
    STEP_LIMIT      the new step limit
    CONFINE         the number of requests that alone are planned from here on, and the requests; 0: all are
    CORRUPT         the number of corrupt host blocks that the next result reports, and their ids
    """

    ADD = 0
    ABORT = 1
    STOP = 2
    UNPIN = 3
    RESET = 4
    PLAN = 5
    RESULT = 6
    UNEVEN_RESULT = 7
    PARTIAL_RESULT = 8
    FAIL = 9
    STEP_LIMIT = 10
    CONFINE = 11
    CORRUPT = 12


class RecordedSample(msgspec.Struct, array_like=True):
    """An output: its number of tokens, and whether the last one is a stop token.

    block_digests   of its full blocks, after those of the prompt
    token_digests   as `RecordedRequest.token_digests`, for blocks after the prompt's full ones
    """

    num_tokens: int
    stopped: bool
    block_digests: bytes
    token_digests: dict[int, bytes] = {}


class RecordedRequest(msgspec.Struct, array_like=True):
    """A request. `block_digests` are those of the full blocks of its prompt.

    resumed        index -> number of output tokens that another engine had generated
    samples        by index, as far as they have been generated; empty for a beam search
    beam_choices   of a beam search: for each step the number of continuations, and for each continuation the index of
                   its parent and the encoded token: its token digest; if it fills a block, the token digests of the
                   block and then the block digest; `STOP_MARK` if it ends the beam
    token_digests  block index of the prompt -> digests of its first tokens, as many as it has in common with the tail
                   of a pin; for the last block of a beam search, of all tokens. A token digest covers a token and those
                   before it in the block
    """

    number: int
    num_prompt: int
    max_tokens: int
    width: int
    num_draws: int
    beam_search: bool
    constrained: bool
    pin: bool
    priority: int
    skip_prefix_cache: bool
    salt: bytes
    block_digests: bytes
    resumed: dict[int, int] = {}
    samples: dict[int, RecordedSample] = {}
    beam_choices: list[int | bytes] = []
    token_digests: dict[int, bytes] = {}
    tenant: int = 0
    rank: int = 0


class Segment(msgspec.Struct, array_like=True):
    """A part of a recording as it is written. Arrays are bytes: u8 `CallKind`s, f64 seconds, i64 numbers, f64 costs and
    u32 checksums.

    sealed_blocks   (block, seal id of its parent, salt if it has none, block digest)
    """

    snapshot: SchedulerState
    sealed_blocks: list[tuple[int, int, bytes, bytes]]
    kinds: bytes
    times_s: bytes
    numbers: bytes
    costs: bytes
    checksums: bytes


class RecordingFile(msgspec.Struct):
    """Everything a dump holds. `requests` are in order of arrival; those present when the first segment began come
    first."""

    version: int
    reason: str
    settings: SchedulerState
    engine: dict[str, Any]
    requests: list[RecordedRequest]
    segments: list[Segment]


@dataclass(slots=True)
class _OpenSegment:
    """A segment while it grows."""

    snapshot: SchedulerState
    present: list[RecordedRequest]
    begin_s: float
    requests: list[RecordedRequest] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    times_s: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    costs: array[float] = field(default_factory=lambda: array("d"))
    checksums: array[int] = field(default_factory=lambda: array("I"))
    num_digests: int = 0

    @property
    def num_call_bytes(self) -> int:
        num_bytes = 9 * len(self.kinds) + 8 * (len(self.numbers) + len(self.costs)) + 4 * len(self.checksums)
        return num_bytes + 500 * len(self.requests) + DIGEST_BYTES * self.num_digests

    @property
    def num_bytes(self) -> int:
        return self.num_call_bytes + 32 * len(self.snapshot["keys"]) + 500 * len(self.present)


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
        self._block_size = self._scheduler.cache.block_size
        self._clock = clock
        self._key = secrets.token_bytes(16)
        self._live: dict[Request, RecordedRequest] = {}  # and those that ended with a plan in flight
        self._ended: deque[tuple[int, Request]] = deque()  # with the step up to which they are needed
        self._requests: dict[str, Request] = {}
        self._num_requests = self._num_dumps = 0
        self._tails: dict[bytes, dict[bytes, array[int]]] = {}  # digest before -> tails of pins; few, never removed
        self._last_digests: dict[tuple[Request, bytes], bytes] = {}  # full blocks of a beam -> digest of the last one
        self._last_step: ev.Step | None = None
        self._step_limit = self._scheduler.max_num_scheduled_tokens  # as recorded
        self._segments: deque[_OpenSegment] = deque()
        self._wrap_methods(self._scheduler)
        self._unsubscribe = self._scheduler.events.subscribe(self._listen)
        self._new_segment(clock())

    # -- the scheduler's methods ---------------------------------------------------------------------------------------

    def _wrap_methods(self, scheduler: Scheduler) -> None:
        add, abort, stop, unpin = scheduler.add, scheduler.abort, scheduler.stop, scheduler.unpin
        schedule, update, fail = scheduler.schedule, scheduler.update, scheduler.fail
        confine, reset = scheduler.confine, scheduler.cache.reset_prefix_cache

        def recorded_add(request: Request) -> None:
            now = self._clock()
            if request.select_beams is not None:
                request.select_beams = self._recorded_select_beams(request)
            add(request)  # first: a request that is refused is not recorded
            self._add_request(request)
            self._record(CallKind.ADD, now)

        def recorded_abort(request_id: str, reason: str = "abort") -> Request | None:
            request = scheduler.requests.get(request_id)
            if request is not None:
                self._record(CallKind.ABORT, self._clock(), self._live[request].number, reason == "error")
            return abort(request_id, reason)

        def recorded_stop(sequence: Sequence, reason: str = "stop") -> bool:
            self._record(CallKind.STOP, self._clock(), self._live[sequence.request].number, sequence.index)
            return stop(sequence, reason)

        def recorded_unpin(request_id: str) -> int | None:
            pin = scheduler.cache.pins.get(request_id)
            if pin is not None:
                self._record(CallKind.UNPIN, self._clock(), self._live.pop(pin.request).number)
            return unpin(request_id)

        def recorded_reset() -> int:
            self._record(CallKind.RESET, self._clock())
            return reset()

        def recorded_schedule() -> StepPlan:
            now = self._clock()
            segment = self._segments[-1]
            if now - segment.begin_s > self.segment_s or segment.num_call_bytes > self.max_bytes // 8:
                segment = self._new_segment(now)
                if scheduler.confined_to:  # not part of a snapshot
                    self._record_confine(scheduler.confined_to)
            if scheduler.max_num_scheduled_tokens != self._step_limit:
                self._step_limit = scheduler.max_num_scheduled_tokens
                self._record(CallKind.STEP_LIMIT, now, self._step_limit)
            costs = scheduler.policy.costs
            segment.costs.extend((costs.token_s, costs.step_s, costs.move_s))
            self._record(CallKind.PLAN, now)
            plan = schedule()
            segment.checksums.append(plan_crc(self._last_step) if plan else 0)
            return plan

        def recorded_update(plan: StepPlan, result: StepResult, *, last: bool = True) -> list[Request]:
            lengths = list(map(len, result.tokens))
            if result.corrupt:
                self._record(CallKind.CORRUPT, self._clock(), len(result.corrupt), *result.corrupt)
            if last and lengths == plan.num_sampled and not result.errors:
                self._record(CallKind.RESULT, self._clock())
            else:
                numbers = (len(lengths), *lengths, len(result.errors), *result.errors)
                self._record(CallKind.UNEVEN_RESULT if last else CallKind.PARTIAL_RESULT, self._clock(), *numbers)
            finished = update(plan, result, last=last)
            self._forget_ended()
            return finished

        def recorded_fail(plan: StepPlan, limit: int = 0) -> list[Request]:
            self._record(CallKind.FAIL, self._clock(), scheduler.in_flight.index(plan), limit)
            self._step_limit = limit or self._step_limit
            return fail(plan, limit)

        def recorded_confine(requests: Iterable[Request]) -> None:
            confine(members := tuple(requests))
            self._record_confine(members)

        methods: dict[str, Any] = {
            "add": recorded_add,
            "abort": recorded_abort,
            "stop": recorded_stop,
            "unpin": recorded_unpin,
            "schedule": recorded_schedule,
            "update": recorded_update,
            "fail": recorded_fail,
            "confine": recorded_confine,
        }
        for name, method in methods.items():
            setattr(scheduler, name, method)
        setattr(scheduler.cache, "reset_prefix_cache", recorded_reset)  # noqa: B010  # mypy forbids to assign a method

    def detach(self) -> None:
        """Restore the scheduler's methods. The recording stays."""
        self._unsubscribe()
        for name in ("add", "abort", "stop", "unpin", "schedule", "update", "fail", "confine"):
            vars(self._scheduler).pop(name, None)
        vars(self._scheduler.cache).pop("reset_prefix_cache", None)

    def _record_confine(self, requests: Collection[Request]) -> None:
        self._record(CallKind.CONFINE, self._clock(), len(requests), *(self._live[r].number for r in requests))

    def _record(self, kind: CallKind, now: float, *numbers: int) -> None:
        segment = self._segments[-1]
        segment.kinds.append(kind)
        segment.times_s.append(now)
        if numbers:
            segment.numbers.extend(numbers)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._last_step = event
        elif isinstance(event, ev.Finished):
            request = self._requests.pop(event.request_id)
            recorded = self._live[request]
            self._add_outputs(request, recorded)
            self._segments[-1].num_digests += (
                sum(len(s.block_digests) for s in recorded.samples.values()) // DIGEST_BYTES
            )
            if request.request_id not in self._scheduler.cache.pins:
                self._ended.append((self._scheduler.num_steps, request))

    def _forget_ended(self) -> None:
        """Forget ended requests that no plan in flight holds."""
        in_flight = self._scheduler.in_flight
        oldest = in_flight[0].step if in_flight else self._scheduler.num_steps
        while self._ended and self._ended[0][0] <= oldest:
            del self._live[self._ended.popleft()[1]]

    # -- requests ------------------------------------------------------------------------------------------------------

    def _add_request(self, request: Request) -> RecordedRequest:
        block_digests = b"".join(self._block_digests(request.prompt_token_ids, self._root_digest(request.salt)))
        assert request.max_tokens is not None
        recorded = self._live[request] = RecordedRequest(
            self._num_requests,
            len(request.prompt_token_ids),
            request.max_tokens,
            request.width,
            request.num_samples,
            request.select_beams is not None,
            request.use_structured_output,
            request.pin,
            request.priority,
            request.sampling_params.skip_reading_prefix_cache,
            self._salt_digest(request.salt),
            block_digests,
            {index: len(list(output)) for index, output in (request.resume or {}).items()},
            tenant=request.tenant,
            rank=request.index_in_call,
        )
        recorded.samples, recorded.beam_choices, recorded.token_digests = {}, [], {}
        tail = request.prompt_token_ids[len(block_digests) // DIGEST_BYTES * self._block_size :]
        if request.pin and tail:
            before = block_digests[-DIGEST_BYTES:] or self._root_digest(request.salt)
            self._tails.setdefault(before, {})[tail.tobytes()] = tail
        self._num_requests += 1
        self._requests[request.request_id] = request
        if self._segments:  # else it was there before the recorder
            self._segments[-1].requests.append(recorded)
            self._segments[-1].num_digests += len(block_digests) // DIGEST_BYTES
        return recorded

    def _add_outputs(self, request: Request, recorded: RecordedRequest) -> None:
        """Record what is known of a request's output by now. The tail of a pin, after its last full block, is shared
        token by token, so token digests are recorded there."""
        prompt, num_full = request.prompt_token_ids, len(recorded.block_digests) // DIGEST_BYTES
        recorded.token_digests = self._tail_digests(request, prompt, recorded.block_digests, 0)
        if recorded.beam_search:
            before = recorded.block_digests[-DIGEST_BYTES:] or self._root_digest(request.salt)
            recorded.token_digests[num_full] = self._token_digests(before, prompt[num_full * self._block_size :])
            return
        recorded.samples = {}
        for seq in (*request.sequences, *request.finished_sequences):
            block_digests = self._all_block_digests(request, seq.token_ids)
            recorded.samples[seq.index] = RecordedSample(
                len(seq.token_ids) - recorded.num_prompt,
                seq.stop_token is not None,
                block_digests[len(recorded.block_digests) :],
                self._tail_digests(request, seq.token_ids, block_digests, num_full),
            )

    def _tail_digests(self, request: Request, tokens: array[int], block_digests: bytes, first: int) -> dict[int, bytes]:
        """Token digests of the blocks from `first` on: as many as a block has tokens in common with the tail of any
        pin."""
        size, found = self._block_size, {}
        for block in range(first, len(block_digests) // DIGEST_BYTES + 1) if self._tails else ():
            end = block * DIGEST_BYTES
            before = block_digests[end - DIGEST_BYTES : end] if block else self._root_digest(request.salt)
            held = tokens[block * size : (block + 1) * size]
            num = max([common_prefix_length(tail, held) for tail in self._tails.get(before, {}).values()], default=0)
            if num:
                found[block] = self._token_digests(before, held[:num])
        return found

    def _token_digests(self, before: bytes, tokens: array[int]) -> bytes:
        """Digests of the first tokens of a block; `before` is the digest of the block before it."""
        return b"".join(self._digest(before, b"mark" + tokens[: i + 1].tobytes()) for i in range(len(tokens)))

    def _block_digests(self, tokens: array[int], before: bytes, first: int = 0) -> Iterator[bytes]:
        """Digests of the full blocks from `first` on: each covers its tokens and the digest before it."""
        size = self._block_size
        for end in range((first + 1) * size, len(tokens) + 1, size):
            before = self._digest(before, tokens[end - size : end].tobytes())
            yield before

    def _root_digest(self, salt: bytes) -> bytes:
        """The digest before the first block."""
        return self._digest(b"root", salt)

    def _digest(self, before: bytes, data: bytes) -> bytes:
        return blake2b(before + data, digest_size=DIGEST_BYTES, key=self._key).digest()

    def _recorded_select_beams(self, request: Request) -> SelectBeams:
        select_beams = request.select_beams
        assert select_beams is not None

        def recorded(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
            before = {seq: seq.token_ids[:] for seq, _ in parents}
            chosen = select_beams(parents)
            order, choices = list(before), self._live[request].beam_choices
            choices.append(len(chosen))
            for parent, token in chosen:
                choices += (order.index(parent), self._encode_beam_token(request, before[parent], token))
            return chosen

        return recorded

    def _encode_beam_token(self, request: Request, before: array[int], token: int) -> bytes:
        """A beam's next token, as in `RecordedRequest.beam_choices`."""
        if token in request.stop_ids:
            return STOP_MARK
        begin = len(before) // self._block_size * self._block_size
        last, tokens = self._last_digest(request, before[:begin]), before[begin:] + array("i", (token,))
        if len(tokens) < self._block_size:
            return self._digest(last, b"mark" + tokens.tobytes())
        return self._token_digests(last, tokens[:-1]) + self._digest(last, tokens.tobytes())

    def _last_digest(self, request: Request, tokens: array[int]) -> bytes:
        """The digest of the last of a beam's full blocks."""
        key = request, tokens.tobytes()
        if key not in self._last_digests:
            if len(self._last_digests) >= MAX_CACHED_DIGESTS:
                self._last_digests.clear()
            digest = self._all_block_digests(request, tokens)[-DIGEST_BYTES:]
            self._last_digests[key] = digest or self._root_digest(request.salt)
        return self._last_digests[key]

    def _all_block_digests(self, request: Request, tokens: array[int]) -> bytes:
        prompt = self._live[request].block_digests
        first, before = len(prompt) // DIGEST_BYTES, prompt[-DIGEST_BYTES:] or self._root_digest(request.salt)
        return prompt + b"".join(self._block_digests(tokens, before, first))

    # -- segments ------------------------------------------------------------------------------------------------------

    def _new_segment(self, now: float) -> _OpenSegment:
        """Take a snapshot, and drop the oldest segment if the later ones reach back far enough."""
        present: dict[int, RecordedRequest] = {}

        def number_of(request: Request) -> int:
            recorded = self._live.get(request) or self._add_request(request)
            present[recorded.number] = recorded
            return recorded.number

        def beam_digests(seq: Sequence) -> bytes | None:
            if seq.request.select_beams is None:
                return None
            digests = self._all_block_digests(seq.request, seq.token_ids)
            before = digests[-DIGEST_BYTES:] or self._root_digest(seq.request.salt)
            tail = seq.token_ids[len(digests) // DIGEST_BYTES * self._block_size :]
            return digests + self._token_digests(before, tail)

        state = snapshot_scheduler(self._scheduler, number_of, beam_digests)
        state["num_beam_choices"] = {n: len(r.beam_choices) for n, r in present.items() if r.beam_choices}
        segment = _OpenSegment(state, list(present.values()), now)
        self._segments.append(segment)
        self.segment_s = max(self.segment_s, MIN_SEGMENT_RATIO * (self._clock() - now))
        while len(self._segments) > 2 and (
            now - self._segments[1].begin_s > self.keep_s or self.num_bytes > self.max_bytes
        ):
            self._segments.popleft()
        return segment

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the recorder."""
        return sum(segment.num_bytes for segment in self._segments)

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
        for request in self._requests.values():
            self._add_outputs(request, self._live[request])
        requests = {request.number: request for request in self._segments[0].present}
        requests |= {request.number: request for segment in self._segments for request in segment.requests}
        engine = {"max_model_len": self._engine.limits.max_model_len, "overlap": self._engine.overlap}
        segments = [self._closed(segment) for segment in self._segments]
        settings, recorded = scheduler_settings(self._scheduler), list(requests.values())
        file = RecordingFile(VERSION, reason, settings, engine, recorded, segments)
        data = gzip.compress(msgspec.msgpack.encode(file), compresslevel=1)
        part = path.with_suffix(".part")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(data)
            part.replace(path)
        finally:  # an incomplete file, of a full disk for example, must not stay
            part.unlink(missing_ok=True)
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

    def _closed(self, segment: _OpenSegment) -> Segment:
        state = {name: value for name, value in segment.snapshot.items() if name != "keys"}
        arrays = (segment.kinds, segment.times_s, segment.numbers, segment.costs, segment.checksums)
        return Segment(state, self._sealed_blocks(segment), *(bytes(memoryview(a)) for a in arrays))

    def _sealed_blocks(self, segment: _OpenSegment) -> list[tuple[int, int, bytes, bytes]]:
        """For each sealed block the seal id of its parent, the salt if it has none, and the block digest.

        A parent has an older seal than its children, so its digest is known first. If the parent is no longer in the
        pool, a sequence knows its digest. If no sequence does, the child cannot be found again and gets any digest.
        """
        seals = array("q", segment.snapshot["pool"]["seal_id"])
        keys = segment.snapshot["keys"]
        blocks = sorted((b for b, packed in enumerate(keys) if packed is not None), key=seals.__getitem__)
        digests = self._digests_by_seal(segment)
        sealed = []
        for block in blocks:
            parent, tokens = _unpack(keys[block])
            if isinstance(parent, bytes):
                salt, before, seal = self._salt_digest(parent), self._root_digest(parent), 0
            else:
                before = digests.get(parent) or self._digest(b"lost", parent.to_bytes(8, "little"))
                salt, seal = b"", parent
            digests[seals[block]] = self._digest(before, tokens)
            sealed.append((block, seal, salt, digests[seals[block]]))
        return sealed

    def _digests_by_seal(self, segment: _OpenSegment) -> dict[int, bytes]:
        """Seal id -> block digest, for blocks of the sequences that were present when a segment began."""
        requests = {request.number: request for request in segment.present}
        digests: dict[int, bytes] = {}
        for seq in segment.snapshot["sequences"]:
            request = requests[segment.snapshot["requests"][seq["request"]]["number"]]
            sample = request.samples.get(seq["index"])
            known = seq["beam_digests"] or request.block_digests + (b"" if sample is None else sample.block_digests)
            for i, seal in enumerate(seq["seal_ids"][: len(known) // DIGEST_BYTES]):
                digests[seal] = known[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
        return digests

    def _salt_digest(self, salt: bytes) -> bytes:
        """The digest of a tenant's salt; b"" stays b""."""
        return self._digest(b"salt", salt) if salt else b""


def plan_crc(step: ev.Step | None) -> int:
    """A checksum of a plan's `Step` event, by which a replay detects that it planned something else."""
    return 0 if step is None else zlib.crc32(repr(tuple(step)).encode())
