"""Small worlds, exhaustively: blocks of 2, pools of 1 to 8, up to three requests with prompts and outputs of 1 to 5.

One and two requests also run with a window group, and with states, with and without a window group, in pools of up to
10 blocks.

Every accepted request finishes with the right output, and nothing leaks or stalls. That holds undisturbed, and with one
request aborted, swapped or recomputed before any step. `make test` runs some worlds, `make prove` all.

Worlds that are equivalent to others are omitted:

* Without stop tokens only lengths matter, so two kinds of prompts suffice: all alike (each a prefix of the next) and
  all different.
* Only the smallest pool that holds all requests at their maximum length is run, not larger ones.
* The preemption mode matters only with a preemption: swapping is run where recomputation preempted.
* Steps overlap or not, and decode windows are 1 or 3. One and two requests run in all four combinations, three requests
  with neither and with both. Speculation with two drafts, all right or all wrong, runs in some of them.
* Three requests with a disturbance have prompts and outputs of 1, 2 and 5.
* Windows are 1, 2 and 3: a wider one differs only by a whole block. Two requests with a window group have prompts and
  outputs of 1, 2 and 5, and every ninth disturbance. So have two requests with states.
* States take one or two blocks. Checkpoints are a block or two apart.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest

from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Status
from octavo.core.scheduler import Scheduler
from octavo.integers import cdiv
from tests.core.lab import make, preempt
from tests.proof import oracle as o

Shape = tuple[int, int]
"""Tokens of a request's prompt, and of its output."""

SIZE = 2
SHAPES = list(product(range(1, 6), range(1, 6)))
FEW = list(product((1, 2, 5), (1, 2, 5)))
RIGHT, WRONG = "right", "wrong"
ALL_WAYS = [(1, 1, ""), (1, 3, ""), (2, 1, ""), (2, 3, ""), (1, 1, WRONG), (2, 1, WRONG), (2, 1, RIGHT), (2, 3, WRONG)]
HOW = {1: ALL_WAYS, 2: ALL_WAYS, 3: [(1, 1, ""), (2, 3, ""), (2, 1, WRONG)]}


class Memory(NamedTuple):
    """A window group's window, 0 without one; the most positions of a step, 0: any; a state's blocks; and the tokens
    between two checkpoints of it."""

    window: int = 0
    max_chunk: int = 0
    state_blocks: int = 0
    interval: int = 0


GROUPS = [Memory(1, 4), Memory(2, 2), Memory(3, 2), Memory(3, 4)]
STATES = [Memory(0, 0, 1, SIZE), Memory(0, 0, 2, 2 * SIZE), Memory(1, 4, 2, SIZE), Memory(3, 2, 1, 2 * SIZE)]
ABORT, RECOMPUTE, SWAP = "abort", PreemptionMode.RECOMPUTE.value, PreemptionMode.SWAP.value


class Event(NamedTuple):
    """Request `index` is aborted or preempted before turn `turn`."""

    turn: int
    index: int
    how: str


class World(NamedTuple):
    num_blocks: int
    shapes: tuple[Shape, ...]
    alike: bool
    depth: int
    window: int
    drafts: str
    """`Habits.drafts`; "": no speculation."""
    mode: str
    """The preemption mode."""
    memory: Memory = Memory()
    event: Event | None = None

    def cache(self) -> KVCacheManager:
        window, max_chunk, state_blocks, interval = self.memory
        return KVCacheManager(
            self.num_blocks,
            SIZE,
            self.num_blocks,
            num_rows=3,
            windows=(window,) if window else (),
            max_chunk=max_chunk,
            state_blocks=state_blocks,
            checkpoint_interval=interval,
        )


class Story(NamedTuple):
    """A run: the number of preemptions, and the state of each request before each turn."""

    num_preemptions: int
    turns: list[list[Status]]


def longest(shape: Shape, memory: Memory) -> int:
    """The most blocks that this request holds: those of a window, and of a step, in a window group, and of a state."""
    num_blocks = cdiv(shape[0] + shape[1] - 1, SIZE)
    in_window = min(num_blocks, 1 + cdiv(memory.window + memory.max_chunk - 2, SIZE)) if memory.window else 0
    return num_blocks + in_window + memory.state_blocks


@functools.cache
def reference(prompt: tuple[int, ...], max_tokens: int) -> list[tuple[int, list[int]]]:
    request = make("", list(prompt), max_tokens)
    return o.reference(request)


def prompt_of(world: World, i: int) -> list[int]:
    return [0 if world.alike else i + 1] * world.shapes[i][0]


def play(world: World) -> Story:
    """Run one world to its end. Raises the oracle's findings."""
    cache = world.cache()
    policy = Policy(mode=PreemptionMode(world.mode))
    k = 2 if world.drafts else 0
    limits = {"max_num_batched_tokens": 16, "decode_window": world.window, "num_speculative_tokens": k}
    scheduler = Scheduler(cache, **limits, policy=policy)
    oracle = o.Oracle(scheduler, o.Habits(drafts=world.drafts))
    requests = [make(str(i), prompt_of(world, i), num, num_draft_tokens=k) for i, (_, num) in enumerate(world.shapes)]
    for request in requests:
        scheduler.add(request)
    flight: deque[tuple[InFlightStep, Any]] = deque()
    turns: list[list[Status]] = []
    aborted = None
    while scheduler.has_work:
        o.need(len(turns) < 200, o.Stall, "livelock")
        turns.append([r.status for r in requests])
        if world.event is not None and world.event.turn == len(turns) - 1:
            request = requests[world.event.index]
            if world.event.how == ABORT:
                aborted = request
                scheduler.abort(request.request_id)
            else:
                oracle.submit(preempt(scheduler, request, Policy(mode=PreemptionMode(world.event.how))))
            o.check(scheduler)
        step = None
        if len(flight) < world.depth:
            step = scheduler.schedule()
            o.check(scheduler)
            o.need(step or flight or not scheduler.requests, o.Stall, "nothing planned, nothing in flight")
            if step:
                flight.append((step, oracle.submit(step.plan)))
        if flight and (not step or len(flight) == world.depth):
            landed, running = flight.popleft()
            scheduler.update(landed, running.result())
            o.check(scheduler)
            oracle.check_checkpoints()
    pool = cache.pool
    o.need(not any(pool.refs) and pool.num_used == 0, o.Invariant, "blocks leaked")
    o.need(cache.swap_space.num_used == 0 and not o.holders(cache), o.Invariant, "host blocks leaked")
    o.need(cache.rows.num_free == 3 and not scheduler.num_rows_taken, o.Invariant, "rows leaked")
    for i, request in enumerate(requests):
        want = reference(tuple(prompt_of(world, i)), world.shapes[i][1])
        got = o.outputs(request)
        if request is aborted:
            o.need(got[0][1] == want[0][1][: len(got[0][1])], o.WrongOutput, got, want)
        else:
            o.need(got == want, o.WrongOutput, got, want)
    return Story(scheduler.num_preemptions, turns)


def plain(shapes: tuple[Shape, ...], memories: list[Memory]) -> Iterator[World]:
    """Yield the undisturbed worlds of these requests. Worlds that differ only in `mode` are adjacent."""
    for memory in memories:
        needs = [longest(shape, memory) for shape in shapes]
        for num_blocks in range(max(needs), min(10 if any(memory) else 8, sum(needs)) + 1):
            for alike in (False, True) if len(shapes) > 1 else (False,):
                for way in HOW[len(shapes)]:
                    if memory.state_blocks and way[-1]:  # no drafts with states
                        continue
                    for mode in (RECOMPUTE, SWAP):
                        yield World(num_blocks, shapes, alike, *way, mode, memory)


def events_in(story: Story) -> Iterator[Event]:
    """Yield every possible disturbance of a run."""
    for turn, states in enumerate(story.turns):
        for index, status in enumerate(states):
            if status is not Status.FINISHED:
                yield Event(turn, index, ABORT)
            if status is Status.RUNNING:
                yield Event(turn, index, RECOMPUTE)
                yield Event(turn, index, SWAP)


def play_all(
    shapes: tuple[Shape, ...],
    seen: Counter[str],
    *,
    interfere: bool,
    every: int = 1,
    memories: list[Memory] | None = None,
) -> None:
    """Run all worlds of these requests, with every `every`-th disturbance. An error carries the failing world.

    memories  each world with each of these
    """
    world, preempted = None, False
    try:
        for world in plain(shapes, memories or [Memory()]):
            if world.mode == SWAP and not preempted:
                continue
            story = play(world)
            preempted = story.num_preemptions > 0
            seen["worlds"] += 1
            seen[f"{len(shapes)} requests"] += 1
            seen["preempting"] += preempted
            seen["with drafts"] += bool(world.drafts)
            seen["with a window group"] += world.memory.window > 0
            seen["with states"] += world.memory.state_blocks > 0
            if interfere:
                for event in list(events_in(story))[::every]:
                    play(world := world._replace(event=event))
                    seen["worlds"] += 1
                    seen[f"{len(shapes)} requests, one aborted or thrown out"] += 1
    except Exception as error:
        raise type(error)(*error.args, world) from error


def everything() -> Iterator[tuple[tuple[Shape, ...], dict[str, Any]]]:
    """Yield the runs of `make prove`: requests, and options of `play_all`."""
    for num in (1, 2):
        yield from ((shapes, {"interfere": True}) for shapes in product(SHAPES, repeat=num))
    few = set(FEW)
    yield from ((shapes, {"interfere": few.issuperset(shapes)}) for shapes in product(SHAPES, repeat=3))
    for memories in (GROUPS, STATES):
        yield from (((shape,), {"interfere": True, "memories": memories}) for shape in SHAPES)
        options = {"interfere": True, "every": 9, "memories": memories}
        yield from ((shapes, options) for shapes in product(FEW, repeat=2))


def test_one_request() -> None:
    seen: Counter[str] = Counter()
    for shape in SHAPES:
        play_all((shape,), seen, interfere=True, every=3)
    assert seen["1 requests"] == 8 * 25 and seen["with drafts"] == 4 * 25
    assert seen["1 requests, one aborted or thrown out"] == 640


def test_two_requests() -> None:
    seen: Counter[str] = Counter()
    for shapes in list(product(SHAPES, repeat=2))[::37]:
        play_all(shapes, seen, interfere=True, every=31)
    assert seen["preempting"] > 20 and seen["2 requests, one aborted or thrown out"] > 400


def test_three_requests() -> None:
    seen: Counter[str] = Counter()
    for shapes in list(product(SHAPES, repeat=3))[::271]:
        play_all(shapes, seen, interfere=True, every=61)
    assert seen["preempting"] > 50 and seen["3 requests, one aborted or thrown out"] > 400


def test_window_groups() -> None:
    seen: Counter[str] = Counter()
    for shape in FEW[2::3]:
        play_all((shape,), seen, interfere=True, every=5, memories=GROUPS)
    for shapes, memory in ((((5, 5), (2, 5)), GROUPS[2]), (((5, 2), (1, 5)), GROUPS[1])):
        play_all(shapes, seen, interfere=True, every=61, memories=[memory])
    assert seen["with a window group"] == seen["1 requests"] + seen["2 requests"] > 300
    assert seen["preempting"] > 100 and seen["2 requests, one aborted or thrown out"] > 200


def test_states() -> None:
    seen: Counter[str] = Counter()
    for shape in FEW[2::2]:
        play_all((shape,), seen, interfere=True, every=5, memories=STATES)
    for memory, shapes in zip(
        STATES, (((5, 5), (5, 5)), ((5, 2), (5, 5)), ((5, 5), (5, 2)), ((5, 5), (2, 5))), strict=True
    ):
        play_all(shapes, seen, interfere=True, every=31, memories=[memory])
    assert seen["with states"] == seen["1 requests"] + seen["2 requests"] > 200
    assert seen["preempting"] > 100 and seen["2 requests, one aborted or thrown out"] > 200


def test_a_failing_world_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(o, "check", lambda _: o.need(False, o.Invariant, "planted"))
    with pytest.raises(o.Invariant, match=r"planted.*World"):
        play_all(((1, 1),), Counter(), interfere=False)
