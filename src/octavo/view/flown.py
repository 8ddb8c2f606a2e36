"""A dump of the flight recorder, run again: the same calls to the same scheduler, which decides as it did.

Tokens are made up from the names of blocks, so that what was found in the cache is found again. Of a full block only
the last token tells what it is:

    prompt, output   1 1 1 n1 | 1 1 1 n2 | 1 1 1 n3 | 1 1        n1, n2, ...: numbers for names

Two samples that part within a block differ at its end, and only full blocks are ever compared.
"""

from __future__ import annotations

import gzip
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
from octavo.errors import TraceError
from octavo.view.flight import NAME_BYTES, STOPS, VERSION, Arrival, FlightFile, Leg, Op, check
from octavo.view.frozen import State, bare_request, thaw

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
        self._marks: dict[bytes, bytes] = {}  # of the full blocks that begin as a pin ends
        for arrival in file.arrivals:
            for block, marks in arrival.marks.items():
                self._marks |= dict.fromkeys(self._names_at(arrival, block), marks)

    def _names_at(self, arrival: Arrival, block: int) -> Iterator[bytes]:
        """What a block of a request is called once it is full: by its prompt, or by what each sample or beam says."""
        begin = NAME_BYTES * block
        every = [arrival.names, *(arrival.names + said.names for said in arrival.samples.values())]
        yield from {names[begin : begin + NAME_BYTES] for names in every if len(names) > begin}
        choices: Iterator[Any] = iter(arrival.choices)
        for _ in range((block + 1) * self.block_size - arrival.num_prompt):
            names = [(next(choices), next(choices))[1] for _ in range(next(choices, 0))]
            yield from (name for name in names if len(name) == NAME_BYTES)

    @classmethod
    def load(cls, path: Path, *, every: bool = False) -> Flight:
        """With `every`, all tokens of a block tell what it is: for blocks of another size, and not exact any more.

        Raises `TraceError` for what is no dump, or one of another version; `OSError` if it cannot be read."""
        try:
            with gzip.open(path) as packed:
                data = packed.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise TraceError(f"{path} has over {MOST_BYTES >> 30} GiB; a dump of the flight recorder has less")
            file = msgspec.msgpack.decode(data, type=FlightFile)
        except (gzip.BadGzipFile, EOFError, msgspec.MsgspecError) as error:
            raise TraceError(f"{path} is no dump of the flight recorder: {error}") from None
        if file.version != VERSION:
            text = f"{path} was written by another Octavo: its version is {file.version}, this one reads {VERSION}"
            raise TraceError(text)
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
        return self.of_names(arrival, arrival.names, arrival.num_prompt)

    def sample(self, arrival: Arrival, index: int) -> array[int]:
        """Prompt and output of one sample."""
        said = arrival.samples.get(index)
        if said is None:
            return self.prompt(arrival)
        tokens = self.of_names(arrival, arrival.names + said.names, arrival.num_prompt + said.num_tokens)
        if said.stopped:
            tokens[-1] = STOP
        return tokens

    def of_names(self, arrival: Arrival, names: bytes, length: int) -> array[int]:
        """So many tokens that fill these blocks."""
        size, tokens = self.block_size, array("i")
        for i in range(0, len(names), NAME_BYTES):
            tokens += self.block(names[i : i + NAME_BYTES])
        tokens += array("i", (FILL,)) * (length - len(tokens))
        for block, marks in () if self._every else arrival.marks.items():
            tokens[block * size : block * size + len(marks) // NAME_BYTES] = self._numbers_of(marks)
        return tokens

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
        if meaning in (b"", STOPS):
            return STOP if meaning else FILL
        return self.number(meaning)

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
            lengths, failed = plan.samples, []
            if op is not Op.RESULT:
                lengths = [next(numbers) for _ in range(next(numbers))]
                failed = [next(numbers) for _ in range(next(numbers))]
            result = StepResult(self._tokens(plan, lengths), dict.fromkeys(failed, "as it was"))
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
            scheduler.fail(scheduler.in_flight[next(numbers)])
        return Turn(op, time_s)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._last_step = event

    # -- what the device said ------------------------------------------------------------------------------------------

    def _tokens(self, plan: StepPlan, lengths: list[int]) -> list[Any]:
        tokens: list[Any] = []
        for i, (seq, length) in enumerate(zip(plan.sequences, lengths, strict=True)):
            if i in plan.draws and seq.request.decide is None:
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
            request.forked, request.must_wait = True, request.host_wait
        return request

    def _output(self, arrival: Arrival, index: int, length: int) -> array[int]:
        begin = arrival.num_prompt
        return array("i", self.flight.sample(arrival, index)[begin : begin + length])

    def _make(self, said: State, arrival: Arrival) -> Request:
        decide = self._decide(arrival) if arrival.decides else None
        prompt = self.flight.prompt(arrival)
        return bare_request(str(arrival.number), prompt, said, stop=STOP, salt=arrival.salt, decide=decide)

    def _frozen_tokens(self, request: State, said: State) -> array[int]:
        """Those of a sequence that was there when a leg began."""
        arrival = self.flight.arrivals[request["number"]]
        length = said["num_tokens"]
        if said["said"] is not None:
            return self.flight.of_names(arrival, said["said"], length)
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
