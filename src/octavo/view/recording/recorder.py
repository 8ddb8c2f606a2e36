"""What an engine was given in the last minutes, kept so that it can be run again: "why was it slow, and would this have
helped?"

The recorder stands before the scheduler's methods and notes each call: who arrived, was aborted or stopped, that a step
was planned, and how much of it came back; with the time of each. What is decided follows from these, so decisions need
no space. Once a minute a copy of the pool and the queues is taken (`view.frozen`) and a new leg of the flight begins;
the oldest leg is forgotten when those behind it reach back far enough, or when memory runs short.

    leg     copy | arrival, plan, arrival, plan, result, plan, result, ...
    leg                                                     copy | plan, result, abort, ...

There is no text in it, and no token. Blocks of prompts and outputs have names, 8-byte digests under a key that is
forgotten with the recorder, so that it shows who shares what with whom and not what it is. `view.flown` reads a dump.
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
from octavo.core.kv_cache_manager import common
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, SelectBeams, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import State, freeze, settings_of
from octavo.engine.engine import Engine

logger = logging.getLogger("octavo.flight")

VERSION = 5
KEEP_S = 600.0
LEG_S = 60.0
"""Between two copies of pool and queues."""
MOST_BYTES = 64 << 20
"""Of the recorder's memory, about. Two legs are kept in any case."""
SHARE = 1000
"""A leg lasts at least so many times as long as the copy at its beginning took."""
NAME_BYTES = 8
"""Of a block's name: among a million, two are the same by chance once in forty million recordings."""
MOST_ENDS = 64
"""Of beams' blocks whose names are kept, so that a name need not be made anew for each token behind it."""
MOST_FILES = 20
"""Dumps kept in a folder: an engine that dies again and again does not fill the disk."""
SUFFIX = ".flight"
STOPS = b"stop"
"""In the place of a name."""


class Op(IntEnum):
    """What happened. `numbers` has for it:

    ADD, RESET    nothing; the next of the leg's requests arrives
    ABORT         the request, and whether it failed
    UNPIN         the request
    STOP          the request, and the index of the sample that ended in a stop string
    PLAN          nothing; `costs` three numbers of seconds that preemption goes by, `checks` what was planned
    RESULT        nothing: all of the oldest plan in flight came back
    UNEVEN, PART  the number of slices, for each how many tokens came; the number of those that failed, and which. Of a
                  PART more is to come
    FAIL          which of the plans in flight failed, and what steps are limited to if that was for memory, else 0
    LIMIT         what steps are limited to from here on
    CONFINE       the number of requests that alone are planned from here on, and which; 0: all are
    CORRUPT       how many host blocks came back corrupt in the result that follows, and which
    """

    ADD = 0
    ABORT = 1
    STOP = 2
    UNPIN = 3
    RESET = 4
    PLAN = 5
    RESULT = 6
    UNEVEN = 7
    PART = 8
    FAIL = 9
    LIMIT = 10
    CONFINE = 11
    CORRUPT = 12


class Sample(msgspec.Struct, array_like=True):
    """What was generated: so many tokens, the last of them perhaps a stop token; `names` of the blocks that these fill,
    behind those of the prompt; `marks` as an arrival has them, of the blocks behind the prompt's full ones."""

    num_tokens: int
    stopped: bool
    names: bytes
    marks: dict[int, bytes] = {}


class Arrival(msgspec.Struct, array_like=True):
    """A request. `names` are those of the full blocks of its prompt.

    resumed   index -> tokens of an output that another engine had made
    samples   by index; of those that run yet, as far as they are. Of a beam search, none
    choices   of a beam search: for each step how many continuations, and for each its parent's place, and what its
              token comes to: its mark; where it fills a block, the marks of the block and then its name; `STOPS` if it
              ends the beam
    marks     block of the prompt -> marks of its first tokens, as many as a pin's tail has of them; of the last block
              of a beam search, of all. A mark names a token within a block, with those before it
    """

    number: int
    num_prompt: int
    max_tokens: int
    width: int
    num_draws: int
    decides: bool
    constrained: bool
    pin: bool
    priority: int
    skips: bool
    salt: bytes
    names: bytes
    resumed: dict[int, int] = {}
    samples: dict[int, Sample] = {}
    choices: list[int | bytes] = []
    marks: dict[int, bytes] = {}
    tenant: int = 0
    rank: int = 0


class Leg(msgspec.Struct, array_like=True):
    """A part of a flight, as it is written. Arrays are bytes: of `Op`s, seconds, and numbers of 8 or 4 bytes."""

    begin: State
    keys: list[tuple[int, int, bytes, bytes]]
    ops: bytes
    times_s: bytes
    numbers: bytes
    costs: bytes
    checks: bytes


class Versioned(msgspec.Struct):
    """Of a dump what every version of it has."""

    version: int


class FlightFile(msgspec.Struct):
    """All that a dump holds. `arrivals` are in order, those first who were there when the first leg began."""

    version: int
    why: str
    settings: State
    engine: State
    arrivals: list[Arrival]
    legs: list[Leg]


@dataclass(slots=True)
class _OpenLeg:
    """A leg, while it grows."""

    begin: State
    present: list[Arrival]
    begin_s: float
    arrivals: list[Arrival] = field(default_factory=list)
    ops: bytearray = field(default_factory=bytearray)
    times_s: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    costs: array[float] = field(default_factory=lambda: array("d"))
    checks: array[int] = field(default_factory=lambda: array("I"))
    num_names: int = 0

    @property
    def num_noted_bytes(self) -> int:
        noted = 9 * len(self.ops) + 8 * (len(self.numbers) + len(self.costs)) + 4 * len(self.checks)
        return noted + 500 * len(self.arrivals) + NAME_BYTES * self.num_names

    @property
    def num_bytes(self) -> int:
        return self.num_noted_bytes + 32 * len(self.begin["keys"]) + 500 * len(self.present)


class FlightRecorder:
    """Attach it to an engine that has nothing to do yet, or in the middle: from then on its inputs are kept.

    directory   where dumps go; None: only where `dump` is told
    keep_s      how far back a dump reaches, if memory allows, and up to a leg further

    A step costs a few microseconds, and a request a digest for each block of its prompt and its output.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path | None = None,
        *,
        keep_s: float = KEEP_S,
        leg_s: float = LEG_S,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.keep_s, self.leg_s, self.most_bytes = keep_s, leg_s, most_bytes
        self._engine, self._scheduler = engine, engine.scheduler
        self._size = self._scheduler.cache.block_size
        self._clock = clock
        self._key = secrets.token_bytes(16)
        self._live: dict[Request, Arrival] = {}  # and those that ended with a plan in flight
        self._ended: deque[tuple[int, Request]] = deque()  # with the step up to which they are needed
        self._named: dict[str, Request] = {}
        self._num_arrivals = self._num_dumps = 0
        self._tails: dict[bytes, dict[bytes, array[int]]] = {}  # name before -> tails of pins; few, once each, and stay
        self._ends: dict[tuple[Request, bytes], bytes] = {}  # full blocks of beams -> the last one's name
        self._last_step: ev.Step | None = None
        self._limit = self._scheduler.max_num_scheduled_tokens  # as the recording has it
        self._legs: deque[_OpenLeg] = deque()
        self._stand_before(self._scheduler)
        self._unsubscribe = self._scheduler.events.subscribe(self._listen)
        self._new_leg(clock())

    # -- before the scheduler's methods --------------------------------------------------------------------------------

    def _stand_before(self, scheduler: Scheduler) -> None:
        add, abort, stop, unpin = scheduler.add, scheduler.abort, scheduler.stop, scheduler.unpin
        schedule, update, fail = scheduler.schedule, scheduler.update, scheduler.fail
        confine, reset = scheduler.confine, scheduler.cache.reset_prefix_cache

        def noted_add(request: Request) -> None:
            now = self._clock()
            if request.select_beams is not None:
                request.select_beams = self._noted_decide(request)
            add(request)  # first: who is refused has not been here
            self._arrived(request)
            self._note(Op.ADD, now)

        def noted_abort(request_id: str, reason: str = "abort") -> Request | None:
            request = scheduler.requests.get(request_id)
            if request is not None:
                self._note(Op.ABORT, self._clock(), self._live[request].number, reason == "error")
            return abort(request_id, reason)

        def noted_stop(sequence: Sequence, reason: str = "stop") -> bool:
            self._note(Op.STOP, self._clock(), self._live[sequence.request].number, sequence.index)
            return stop(sequence, reason)

        def noted_unpin(name: str) -> int | None:
            pin = scheduler.cache.pins.get(name)
            if pin is not None:
                self._note(Op.UNPIN, self._clock(), self._live.pop(pin.request).number)
            return unpin(name)

        def noted_reset() -> int:
            self._note(Op.RESET, self._clock())
            return reset()

        def noted_schedule() -> StepPlan:
            now = self._clock()
            leg = self._legs[-1]
            if now - leg.begin_s > self.leg_s or leg.num_noted_bytes > self.most_bytes // 8:
                leg = self._new_leg(now)
                if scheduler.confined_to:  # which the beginning of a leg does not hold
                    self._note_confined(scheduler.confined_to)
            if scheduler.max_num_scheduled_tokens != self._limit:
                self._limit = scheduler.max_num_scheduled_tokens
                self._note(Op.LIMIT, now, self._limit)
            costs = scheduler.policy.costs
            leg.costs.extend((costs.token_s, costs.step_s, costs.move_s))
            self._note(Op.PLAN, now)
            plan = schedule()
            leg.checks.append(check(self._last_step) if plan else 0)
            return plan

        def noted_update(plan: StepPlan, result: StepResult, *, last: bool = True) -> list[Request]:
            lengths = list(map(len, result.tokens))
            if result.corrupt:
                self._note(Op.CORRUPT, self._clock(), len(result.corrupt), *result.corrupt)
            if last and lengths == plan.num_sampled and not result.errors:
                self._note(Op.RESULT, self._clock())
            else:
                numbers = (len(lengths), *lengths, len(result.errors), *result.errors)
                self._note(Op.UNEVEN if last else Op.PART, self._clock(), *numbers)
            finished = update(plan, result, last=last)
            self._forget_ended()
            return finished

        def noted_fail(plan: StepPlan, limit: int = 0) -> list[Request]:
            self._note(Op.FAIL, self._clock(), scheduler.in_flight.index(plan), limit)
            self._limit = limit or self._limit
            return fail(plan, limit)

        def noted_confine(requests: Iterable[Request]) -> None:
            confine(members := tuple(requests))
            self._note_confined(members)

        mine: dict[str, Any] = {
            "add": noted_add,
            "abort": noted_abort,
            "stop": noted_stop,
            "unpin": noted_unpin,
            "schedule": noted_schedule,
            "update": noted_update,
            "fail": noted_fail,
            "confine": noted_confine,
        }
        for name, method in mine.items():
            setattr(scheduler, name, method)
        setattr(scheduler.cache, "reset_prefix_cache", noted_reset)  # noqa: B010  # a method, which mypy guards

    def detach(self) -> None:
        """Leave the engine as it was; what was recorded stays."""
        self._unsubscribe()
        for name in ("add", "abort", "stop", "unpin", "schedule", "update", "fail", "confine"):
            vars(self._scheduler).pop(name, None)
        vars(self._scheduler.cache).pop("reset_prefix_cache", None)

    def _note_confined(self, requests: Collection[Request]) -> None:
        self._note(Op.CONFINE, self._clock(), len(requests), *(self._live[request].number for request in requests))

    def _note(self, op: Op, now: float, *numbers: int) -> None:
        leg = self._legs[-1]
        leg.ops.append(op)
        leg.times_s.append(now)
        if numbers:
            leg.numbers.extend(numbers)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._last_step = event
        elif isinstance(event, ev.Finished):
            request = self._named.pop(event.request_id)
            arrival = self._live[request]
            self._tell(request, arrival)
            self._legs[-1].num_names += sum(len(s.names) for s in arrival.samples.values()) // NAME_BYTES
            if request.request_id not in self._scheduler.cache.pins:
                self._ended.append((self._scheduler.num_steps, request))

    def _forget_ended(self) -> None:
        """Those of whom nothing is in flight any more."""
        in_flight = self._scheduler.in_flight
        oldest = in_flight[0].step if in_flight else self._scheduler.num_steps
        while self._ended and self._ended[0][0] <= oldest:
            del self._live[self._ended.popleft()[1]]

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrived(self, request: Request) -> Arrival:
        names = b"".join(self._names(request.prompt_token_ids, self._root(request.salt)))
        assert request.max_tokens is not None
        arrival = self._live[request] = Arrival(
            self._num_arrivals,
            len(request.prompt_token_ids),
            request.max_tokens,
            request.width,
            request.num_samples,
            request.select_beams is not None,
            request.use_structured_output,
            request.pin,
            request.priority,
            request.sampling_params.skip_reading_prefix_cache,
            self._salt(request.salt),
            names,
            {index: len(list(output)) for index, output in (request.resume or {}).items()},
            tenant=request.tenant,
            rank=request.index_in_call,
        )
        arrival.samples, arrival.choices, arrival.marks = {}, [], {}
        tail = request.prompt_token_ids[len(names) // NAME_BYTES * self._size :]
        if request.pin and tail:
            self._tails.setdefault(names[-NAME_BYTES:] or self._root(request.salt), {})[tail.tobytes()] = tail
        self._num_arrivals += 1
        self._named[request.request_id] = request
        if self._legs:  # else it was here before us
            self._legs[-1].arrivals.append(arrival)
            self._legs[-1].num_names += len(names) // NAME_BYTES
        return arrival

    def _tell(self, request: Request, arrival: Arrival) -> None:
        """Write down what is known of it by now. A pin's tail, what is behind its last full block, is shared token by
        token: there, marks stand for tokens."""
        prompt, num_full = request.prompt_token_ids, len(arrival.names) // NAME_BYTES
        arrival.marks = self._shared_marks(request, prompt, arrival.names, 0)
        if arrival.decides:
            end = arrival.names[-NAME_BYTES:] or self._root(request.salt)
            arrival.marks[num_full] = self._marks(end, prompt[num_full * self._size :])
            return
        arrival.samples = {}
        for seq in (*request.sequences, *request.finished_sequences):
            names = self._all_names(request, seq.token_ids)
            arrival.samples[seq.index] = Sample(
                len(seq.token_ids) - arrival.num_prompt,
                seq.stop_token is not None,
                names[len(arrival.names) :],
                self._shared_marks(request, seq.token_ids, names, num_full),
            )

    def _shared_marks(self, request: Request, tokens: array[int], names: bytes, first: int) -> dict[int, bytes]:
        """Of the blocks from `first` on, as many marks as any pin's tail has tokens in common with them."""
        size, marks = self._size, {}
        for block in range(first, len(names) // NAME_BYTES + 1) if self._tails else ():
            before = names[(block - 1) * NAME_BYTES : block * NAME_BYTES] if block else self._root(request.salt)
            held = tokens[block * size : (block + 1) * size]
            num = max([common(tail, held) for tail in self._tails.get(before, {}).values()], default=0)
            if num:
                marks[block] = self._marks(before, held[:num])
        return marks

    def _marks(self, before: bytes, tokens: array[int]) -> bytes:
        """Of the first tokens of a block behind a named one."""
        return b"".join(self._digest(before, b"mark" + tokens[: i + 1].tobytes()) for i in range(len(tokens)))

    def _names(self, tokens: array[int], parent: bytes, begin: int = 0) -> Iterator[bytes]:
        """Of the full blocks from one on: each is a digest of its tokens and the name before it."""
        size = self._size
        for end in range((begin + 1) * size, len(tokens) + 1, size):
            parent = self._digest(parent, tokens[end - size : end].tobytes())
            yield parent

    def _root(self, salt: bytes) -> bytes:
        """What stands before the first block."""
        return self._digest(b"root", salt)

    def _digest(self, parent: bytes, data: bytes) -> bytes:
        return blake2b(parent + data, digest_size=NAME_BYTES, key=self._key).digest()

    def _noted_decide(self, request: Request) -> SelectBeams:
        decide = request.select_beams
        assert decide is not None

        def noted(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
            before = {seq: seq.token_ids[:] for seq, _ in parents}
            chosen = decide(parents)
            places, choices = list(before), self._live[request].choices
            choices.append(len(chosen))
            for parent, token in chosen:
                choices += (places.index(parent), self._meaning(request, before[parent], token))
            return chosen

        return noted

    def _meaning(self, request: Request, before: array[int], token: int) -> bytes:
        """What a beam's next token comes to, see `Arrival.choices`."""
        if token in request.stop_ids:
            return STOPS
        begin = len(before) // self._size * self._size
        end, tokens = self._end_of(request, before[:begin]), before[begin:] + array("i", (token,))
        if len(tokens) < self._size:
            return self._digest(end, b"mark" + tokens.tobytes())
        return self._marks(end, tokens[:-1]) + self._digest(end, tokens.tobytes())

    def _end_of(self, request: Request, tokens: array[int]) -> bytes:
        """The name of the last of the full blocks that a beam has filled."""
        key = request, tokens.tobytes()
        if key not in self._ends:
            if len(self._ends) >= MOST_ENDS:
                self._ends.clear()
            self._ends[key] = self._all_names(request, tokens)[-NAME_BYTES:] or self._root(request.salt)
        return self._ends[key]

    def _all_names(self, request: Request, tokens: array[int]) -> bytes:
        names = self._live[request].names
        begin, parent = len(names) // NAME_BYTES, names[-NAME_BYTES:] or self._root(request.salt)
        return names + b"".join(self._names(tokens, parent, begin))

    # -- legs ----------------------------------------------------------------------------------------------------------

    def _new_leg(self, now: float) -> _OpenLeg:
        """Copy pool and queues, and forget the oldest leg if those behind it reach back far enough."""
        present: dict[int, Arrival] = {}

        def number_of(request: Request) -> int:
            arrival = self._live.get(request) or self._arrived(request)
            present[arrival.number] = arrival
            return arrival.number

        def said_by(seq: Sequence) -> bytes | None:
            if seq.request.select_beams is None:
                return None
            names = self._all_names(seq.request, seq.token_ids)
            end = names[-NAME_BYTES:] or self._root(seq.request.salt)
            return names + self._marks(end, seq.token_ids[len(names) // NAME_BYTES * self._size :])

        begin = freeze(self._scheduler, number_of, said_by)
        begin["num_choices"] = {number: len(arrival.choices) for number, arrival in present.items() if arrival.choices}
        leg = _OpenLeg(begin, list(present.values()), now)
        self._legs.append(leg)
        self.leg_s = max(self.leg_s, SHARE * (self._clock() - now))
        while len(self._legs) > 2 and (
            now - self._legs[1].begin_s > self.keep_s or sum(leg.num_bytes for leg in self._legs) > self.most_bytes
        ):
            self._legs.popleft()
        return leg

    @property
    def num_bytes(self) -> int:
        """What the recorder takes, about."""
        return sum(leg.num_bytes for leg in self._legs)

    # -- dumps ---------------------------------------------------------------------------------------------------------

    def dump(self, why: str = "asked", path: Path | None = None) -> Path:
        """Write all legs into a new file of the directory, or to `path`; returns where. The engine goes on as before.

        Raises `OSError` if it cannot be written.
        """
        if path is None:
            assert self.directory is not None, "a recorder without a directory has to be told where"
            self.directory.mkdir(parents=True, exist_ok=True)
            self._num_dumps += 1
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._num_dumps}-{why}{SUFFIX}"
            path = self.directory / name
        for request in self._named.values():
            self._tell(request, self._live[request])
        arrivals = {a.number: a for a in self._legs[0].present}
        arrivals |= {a.number: a for leg in self._legs for a in leg.arrivals}
        about = {"max_model_len": self._engine.max_model_len, "overlap": self._engine.overlap}
        legs = [self._closed(leg) for leg in self._legs]
        file = FlightFile(VERSION, why, settings_of(self._scheduler), about, list(arrivals.values()), legs)
        data = gzip.compress(msgspec.msgpack.encode(file), compresslevel=1)
        beside = path.with_suffix(".part")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(data)
            beside.replace(path)
        finally:  # on a full disk, say, what there is of it must not stay
            beside.unlink(missing_ok=True)
        if self.directory is not None:  # never this one, whatever the clock said when the others were named
            for old in sorted({*self.directory.glob(f"*{SUFFIX}")} - {path})[: 1 - MOST_FILES]:
                old.unlink(missing_ok=True)
        return path

    def dump_last(self, why: str) -> None:
        """What is left to do when the engine dies: never raises."""
        try:
            logger.error("the engine dies; its last minutes are in %s", self.dump(why))
        except Exception as error:
            logger.error("the flight recorder could not be written: %s", error)

    def _closed(self, leg: _OpenLeg) -> Leg:
        begin = {name: value for name, value in leg.begin.items() if name != "keys"}
        arrays = (leg.ops, leg.times_s, leg.numbers, leg.costs, leg.checks)
        return Leg(begin, self._named_keys(leg), *(bytes(memoryview(a)) for a in arrays))

    def _named_keys(self, leg: _OpenLeg) -> list[tuple[int, int, bytes, bytes]]:
        """For each sealed block the seal before it, the salt where there is none, and the name of its content.

        A parent has an older seal than its children, so that its name is known before theirs. One that is in the pool
        no more is known to a sequence, or to nobody: then the child is not found again, and has any name.
        """
        seals = array("q", leg.begin["pool"]["seal_id"])
        blocks = sorted((b for b, packed in enumerate(leg.begin["keys"]) if packed is not None), key=seals.__getitem__)
        names = self._names_of_sequences(leg)
        keys = []
        for block in blocks:
            parent, tokens = _unpack(leg.begin["keys"][block])
            if isinstance(parent, bytes):
                salt, before, seal = self._salt(parent), self._root(parent), 0
            else:
                salt, before, seal = (
                    b"",
                    names.get(parent) or self._digest(b"lost", parent.to_bytes(8, "little")),
                    parent,
                )
            names[seals[block]] = self._digest(before, tokens)
            keys.append((block, seal, salt, names[seals[block]]))
        return keys

    def _names_of_sequences(self, leg: _OpenLeg) -> dict[int, bytes]:
        """Seal -> name, as far as the sequences know that were there when a leg began."""
        arrivals = {arrival.number: arrival for arrival in leg.present}
        names: dict[int, bytes] = {}
        for seq in leg.begin["sequences"]:
            arrival = arrivals[leg.begin["requests"][seq["request"]]["number"]]
            sample = arrival.samples.get(seq["index"])
            known = seq["said"] or arrival.names + (b"" if sample is None else sample.names)
            for i, seal in enumerate(seq["seal_ids"][: len(known) // NAME_BYTES]):
                names[seal] = known[NAME_BYTES * i : NAME_BYTES * (i + 1)]
        return names

    def _salt(self, salt: bytes) -> bytes:
        """Stands for a tenant's. None stays none."""
        return self._digest(b"salt", salt) if salt else b""


def check(step: ev.Step | None) -> int:
    """A number that tells most plans apart: a replay that planned something else is found out by it."""
    return 0 if step is None else zlib.crc32(repr(tuple(step)).encode())
