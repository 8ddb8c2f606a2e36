"""A dump of the flight recorder, run again: the same calls to the same scheduler, which decides as it did.

Tokens are made up from the names of blocks, so that what was found in the cache is found again. Of a full block only
the last token tells what it is:

    prompt, output   1 1 1 n1 | 1 1 1 n2 | 1 1 1 n3 | 1 1        n1, n2, ...: numbers for names

Two samples that part within a block differ at its end, and only full blocks are ever compared. But for the tails of
pins: whatever begins as one of these, and all that beams say, has marks for tokens there, m1 m2 m3 n1.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.core import events as ev
from octavo.core.block_pool import _pack
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import State, bare_request, thaw
from octavo.errors import TraceError
from octavo.view.recording.recorder import NAME_BYTES, STOPS, VERSION, Arrival, FlightFile, Leg, Op, Versioned, check

MOST_BYTES = 1 << 30
"""Of a dump, unpacked: what is larger is none."""
FILL, STOP, FIRST_NAME = 1, 2, 3


class Turn(NamedTuple):
    """One call to the scheduler, and what came of it.

    time_s    since the beginning of the recording
    plan      of a PLAN the new one, which may be empty; of a result, the one that it belongs to
    request   that arrived or was aborted
    finished  by a result
    """

    op: Op
    time_s: float
    plan: StepPlan | None = None
    request: Request | None = None
    finished: Seq[Request] = ()


class Flight:
    """What a dump holds, and the tokens that stand for what was said."""

    def __init__(self, file: FlightFile, *, every: bool = False) -> None:
        self.file = file
        self._every = every
        self.arrivals = {arrival.number: arrival for arrival in file.arrivals}
        self.block_size: int = file.settings["block_size"]
        self._numbers: dict[bytes, int] = {}
        self._marks: dict[bytes, bytes] = {}  # of full blocks, by name: of their first tokens
        self._ends: dict[int, bytes] = {}  # of what is behind the full blocks of a prompt, by the request's number
        self._learn_marks()

    def _learn_marks(self) -> None:
        """Whoever has a block has it with the same tokens, and whoever goes on from a prompt has its end.

        prompt   a b . .        One who came before a pin has fewer marks than one who came after it with the same
        sample   a b c d = n1   block: so they pass on what they know until nobody learns anything.
        other    a b c d = n1
        """
        size = NAME_BYTES * self.block_size
        ends: list[tuple[Arrival, list[bytes]]] = []
        for arrival in self.file.arrivals:
            num_full = len(arrival.names) // NAME_BYTES
            told = [(arrival.names, arrival.marks)]
            told += [(arrival.names + said.names, said.marks) for said in arrival.samples.values()]
            for names, marks in told:
                for block, some in marks.items():
                    self._learn(names[block * NAME_BYTES : (block + 1) * NAME_BYTES], some)
            for meaning in arrival.choices:
                if isinstance(meaning, bytes) and len(meaning) == size:
                    self._learn(meaning[-NAME_BYTES:], meaning[:-NAME_BYTES])
            if num_end := NAME_BYTES * (arrival.num_prompt % self.block_size):
                known = [marks.get(num_full, b"")[:num_end] for _, marks in told]
                self._ends[arrival.number] = max(known, key=len)
                followers = [said.names[:NAME_BYTES] for said in arrival.samples.values() if said.names]
                if followers:
                    ends.append((arrival, followers))
        news = True
        while news:
            news = False
            for arrival, followers in ends:
                num_end = NAME_BYTES * (arrival.num_prompt % self.block_size)
                known = [self._ends[arrival.number], *(self._marks.get(name, b"")[:num_end] for name in followers)]
                end = self._ends[arrival.number] = max(known, key=len)
                for name in followers:
                    news |= self._learn(name, end)

    def _learn(self, name: bytes, marks: bytes) -> bool:
        """Whether that is more than was known; the marks of one block are the beginning of one another."""
        more = bool(name) and len(marks) > len(self._marks.get(name, b""))
        if more:
            self._marks[name] = marks
        return more

    @classmethod
    def load(cls, path: Path, *, every: bool = False) -> Flight:
        """With `every`, all tokens of a block tell what it is: for blocks of another size, and not exact any more.

        Raises `TraceError` for what is no dump, or one of another version; `OSError` if it cannot be read."""
        try:
            with gzip.open(path) as packed:
                data = packed.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise TraceError(f"{path} has over {MOST_BYTES >> 30} GiB; a dump of the flight recorder has less")
            version = msgspec.msgpack.decode(data, type=Versioned).version
            if version != VERSION:
                text = f"{path} was written by another Octavo: its version is {version}, this one reads {VERSION}"
                raise TraceError(text)
            file = msgspec.msgpack.decode(data, type=FlightFile)
        except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.MsgspecError) as error:
            raise TraceError(f"{path} is no dump of the flight recorder: {error}") from None
        return cls(file, every=every)

    @property
    def begin_s(self) -> float:
        """The first time in it, on the clock of the engine."""
        return next((array("d", leg.times_s)[0] for leg in self.file.legs if leg.times_s), 0.0)

    @property
    def end_s(self) -> float:
        """The last, since the first."""
        last = next((array("d", leg.times_s)[-1] for leg in reversed(self.file.legs) if leg.times_s), 0.0)
        return last - self.begin_s

    # -- tokens --------------------------------------------------------------------------------------------------------

    def prompt(self, arrival: Arrival) -> array[int]:
        return self.of_names(arrival.names, self._ends.get(arrival.number, b""), arrival.num_prompt)

    def sample(self, arrival: Arrival, index: int) -> array[int]:
        """Prompt and output of one sample."""
        said = arrival.samples.get(index)
        if said is None:
            return self.prompt(arrival)
        names = arrival.names + said.names
        marks = said.marks.get(len(names) // NAME_BYTES, b"")
        if not said.names:
            marks = max(marks, self._ends.get(arrival.number, b""), key=len)
        tokens = self.of_names(names, marks, arrival.num_prompt + said.num_tokens)
        if said.stopped:
            tokens[-1] = STOP
        return tokens

    def of_names(self, names: bytes, marks: bytes, length: int) -> array[int]:
        """So many tokens that fill these blocks, with these marks behind them."""
        tokens = array("i")
        for i in range(0, len(names), NAME_BYTES):
            tokens += self.block(names[i : i + NAME_BYTES])
        if not self._every:
            tokens += self._numbers_of(marks)
        return tokens + array("i", (FILL,)) * (length - len(tokens))

    def block(self, name: bytes) -> array[int]:
        """The tokens of a full one."""
        if self._every:
            return array("i", (self.number(name),)) * self.block_size
        tokens = array("i", (FILL,)) * self.block_size
        if marks := self._marks.get(name):
            tokens[: len(marks) // NAME_BYTES] = self._numbers_of(marks)
        tokens[-1] = self.number(name)
        return tokens

    def _numbers_of(self, names: bytes) -> array[int]:
        return array("i", [self.number(names[i : i + NAME_BYTES]) for i in range(0, len(names), NAME_BYTES)])

    def token(self, meaning: bytes) -> int:
        """A beam's."""
        return STOP if meaning == STOPS else self.number(meaning[-NAME_BYTES:])

    def number(self, name: bytes) -> int:
        """A token for a name."""
        return self._numbers.setdefault(name, FIRST_NAME + len(self._numbers))

    def replay(self, first_leg: int = 0) -> Replay:
        return Replay(self, first_leg)


class Replay:
    """A flight from the beginning of one of its legs. `scheduler` is as it was then; subscribe to its events, and then
    take the `turns`.
    """

    def __init__(self, flight: Flight, first_leg: int = 0) -> None:
        self.flight = flight
        self.legs = flight.file.legs[first_leg:]
        self._whole: dict[Request, dict[int, array[int]]] = {}
        self._last_step: ev.Step | None = None
        self._corrupt: list[int] = []  # what the next result reports
        begin = self.legs[0].begin
        self._num_choices: dict[int, int] = begin["num_choices"]
        present = {said["number"] for said in begin["requests"]}
        arrivals = [a for a in flight.file.arrivals if a.number not in present]
        if first_leg:
            before = sum(leg.ops.count(Op.ADD) for leg in flight.file.legs[:first_leg])
            num_first = len(flight.file.arrivals) - sum(leg.ops.count(Op.ADD) for leg in flight.file.legs)
            arrivals = flight.file.arrivals[num_first + before :]
        self._arrivals = iter(arrivals)
        self.scheduler = self._thawed(self.legs[0])
        self.scheduler.events.subscribe(self._listen)

    def turns(self) -> Iterator[Turn]:
        """Everything that happened, once more.

        Raises `TraceError` where this Octavo plans something else than the one that was recorded, or the file is
        damaged; and whatever the engine died of, at the same place.
        """
        begin_s = self.flight.begin_s
        for number, leg in enumerate(self.legs):
            numbers, costs = iter(array("q", leg.numbers)), iter(array("d", leg.costs))
            checks = iter(array("I", leg.checks))
            for op, at in zip(leg.ops, array("d", leg.times_s), strict=True):
                turn = self._turn(Op(op), at - begin_s, numbers, costs)
                if turn.op is Op.PLAN and next(checks) != (check(self._last_step) if turn.plan else 0):
                    raise TraceError(
                        f"step {self.scheduler.num_steps - 1}, {turn.time_s:.3f} s in (leg {number}), was planned "
                        "otherwise: the recording is another version's; replay it with that one"
                    )
                yield turn

    def _turn(self, op: Op, time_s: float, numbers: Iterator[int], costs: Iterator[float]) -> Turn:
        scheduler = self.scheduler
        if op is Op.PLAN:
            known = scheduler.policy.costs
            known.token_s, known.step_s, known.move_s = next(costs), next(costs), next(costs)
            return Turn(op, time_s, scheduler.schedule())
        if op in (Op.RESULT, Op.UNEVEN, Op.PART):
            plan = scheduler.in_flight[0]
            lengths, failed = plan.num_sampled, []
            if op is not Op.RESULT:
                lengths = [next(numbers) for _ in range(next(numbers))]
                failed = [next(numbers) for _ in range(next(numbers))]
            result = StepResult(self._tokens(plan, lengths), dict.fromkeys(failed, "as it was"), corrupt=self._corrupt)
            self._corrupt = []
            finished = scheduler.update(plan, result, last=op is not Op.PART)
            for request in finished:
                self._whole.pop(request, None)
            return Turn(op, time_s, plan, None, finished)
        if op is Op.ADD:
            request = self._request(next(self._arrivals))
            scheduler.add(request)
            return Turn(op, time_s, None, request)
        if op is Op.ABORT:
            name, failed_too = str(next(numbers)), next(numbers)
            aborted = scheduler.abort(name, "error" if failed_too else "abort")
            return Turn(op, time_s, None, aborted)
        if op is Op.STOP:
            request, index = scheduler.requests[str(next(numbers))], next(numbers)
            scheduler.stop(next(seq for seq in request.sequences if seq.index == index))
        elif op is Op.UNPIN:
            scheduler.unpin(str(next(numbers)))
        elif op is Op.RESET:
            scheduler.cache.reset_prefix_cache()
        elif op is Op.FAIL:
            scheduler.fail(scheduler.in_flight[next(numbers)], next(numbers))
        elif op is Op.CONFINE:
            scheduler.confine([scheduler.requests[str(next(numbers))] for _ in range(next(numbers))])
        elif op is Op.LIMIT:
            scheduler.max_num_scheduled_tokens = next(numbers)
        elif op is Op.CORRUPT:
            self._corrupt = [next(numbers) for _ in range(next(numbers))]
        return Turn(op, time_s)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._last_step = event

    # -- what the device said ------------------------------------------------------------------------------------------

    def _tokens(self, plan: StepPlan, lengths: list[int]) -> list[Any]:
        tokens: list[Any] = []
        for i, (seq, length) in enumerate(zip(plan.sequences, lengths, strict=True)):
            if i in plan.num_samples and seq.request.select_beams is None:
                first = len(seq.request.prompt_token_ids)
                tokens.append([self._next(seq.request, index, first, 1)[0] for index in range(length)])
            else:
                tokens.append(self._next(seq.request, seq.index, len(seq.token_ids), length))
        return tokens

    def _next(self, request: Request, index: int, begin: int, length: int) -> list[int]:
        """What a sample says from a position on. Past the end of what is known, it does not matter."""
        samples = self._whole.setdefault(request, {})
        if index not in samples:
            samples[index] = self.flight.sample(self.flight.arrivals[int(request.request_id)], index)
        known = samples[index][begin : begin + length].tolist()
        return known + [FILL] * (length - len(known))

    def _decide(self, arrival: Arrival) -> Callable[[list[tuple[Sequence, Any]]], list[tuple[Sequence, int]]]:
        choices: Iterator[Any] = iter(arrival.choices)
        for _ in range(self._num_choices.get(arrival.number, 0)):
            next(choices)

        def decide(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
            return [(parents[next(choices)][0], self.flight.token(next(choices))) for _ in range(next(choices))]

        return decide

    # -- how it began --------------------------------------------------------------------------------------------------

    def _request(self, arrival: Arrival) -> Request:
        said = {name: getattr(arrival, name) for name in arrival.__struct_fields__}
        request = self._make(said, arrival)
        if arrival.resumed:
            request.resume = {i: self._output(arrival, i, length) for i, length in arrival.resumed.items()}
            request.forked, request.needs_result = True, False
        return request

    def _output(self, arrival: Arrival, index: int, length: int) -> array[int]:
        begin = arrival.num_prompt
        return array("i", self.flight.sample(arrival, index)[begin : begin + length])

    def _make(self, said: State, arrival: Arrival) -> Request:
        decide = self._decide(arrival) if arrival.decides else None
        prompt = self.flight.prompt(arrival)
        return bare_request(str(arrival.number), prompt, said, stop=STOP, salt=arrival.salt, select_beams=decide)

    def _frozen_tokens(self, request: State, said: State) -> array[int]:
        """Those of a sequence that was there when a leg began."""
        arrival = self.flight.arrivals[request["number"]]
        length = said["num_tokens"]
        if said["said"] is not None:
            num_names = NAME_BYTES * (length // self.flight.block_size)
            return self.flight.of_names(said["said"][:num_names], said["said"][num_names:], length)
        return array("i", self.flight.sample(arrival, said["index"])[:length])

    def _thawed(self, leg: Leg) -> Scheduler:
        size, begin = self.flight.block_size, leg.begin
        content: dict[int, bytes] = {}  # seal -> tokens, as the sequences have them
        for said in begin["sequences"]:
            tokens = self._frozen_tokens(begin["requests"][said["request"]], said)
            for i, seal in enumerate(said["seal_ids"]):
                content.setdefault(seal, tokens[i * size : (i + 1) * size].tobytes())
        keys: list[bytes | None] = [None] * (self.flight.file.settings["num_blocks"] + 1)
        seals = array("q", begin["pool"]["seal_id"])
        for block, parent, salt, name in leg.keys:
            tokens_of_name = self.flight.block(name)
            keys[block] = _pack((parent or salt, content.get(seals[block], tokens_of_name.tobytes())))

        def make_request(said: State) -> Request:
            return self._make(said, self.flight.arrivals[said["number"]])

        return thaw(self.flight.file.settings, begin | {"keys": keys}, make_request, self._frozen_tokens)
