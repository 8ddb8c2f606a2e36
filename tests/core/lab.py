"""`Lab`: one scheduler over the oracle, driven plan by plan by a test, with all checks after every call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.core import events as ev
from octavo.core.block_pool import BlockPool
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import Slice, StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.scheduling import preemption
from octavo.params.sampling_params import SamplingParams
from tests.proof import oracle as o

SWAP = Policy(mode=PreemptionMode.SWAP)
RECOMPUTE = Policy(mode=PreemptionMode.RECOMPUTE)
ANY = SamplingParams(max_tokens=None)


Worlds = Callable[..., "Lab"]
"""Makes a `Lab` that runs to its end after the test: `world` in conftest.py."""

COLUMNS = ("rows", "starts", "counts", "num_sampled")


class Planned:
    """A step with all that a test may read: its plan, columns as lists, and the scheduler's side of it."""

    def __init__(self, in_flight: InFlightStep) -> None:
        self.in_flight = in_flight

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.in_flight if name in InFlightStep.__slots__ else self.in_flight.plan, name)
        return value.tolist() if name in COLUMNS else value

    def __bool__(self) -> bool:
        return bool(self.in_flight)


class Lab:
    """`plan` makes and submits a step, `land` commits the oldest one in flight, `run` finishes all."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 2,
        *,
        host: int = 0,
        rows: int = 8,
        budget: int = 256,
        window: int = 1,
        watermark: int = 0,
        policy: Policy | None = None,
        caching: bool = True,
        attention_window: int = 0,
        windows: tuple[int, ...] = (),
        max_chunk: int = 0,
        state_blocks: int = 0,
        interval: int = 0,
        habits: o.Habits | None = None,
        listen: bool = True,
    ) -> None:
        self.cache = KVCacheManager(
            num_blocks,
            block_size,
            host,
            num_rows=rows,
            enable_prefix_caching=caching,
            attention_window=attention_window,
            windows=windows,
            max_chunk=max_chunk,
            state_blocks=state_blocks,
            checkpoint_interval=interval or (block_size if state_blocks else 0),
        )
        self.pool = self.cache.pool
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=budget,
            decode_window=window,
            num_watermark_blocks=watermark,
            policy=policy,
        )
        self.oracle = o.Oracle(self.scheduler, habits or o.Habits())
        self.events: list[ev.Event] = []
        if listen:
            self.cache.events.subscribe(self.events.append, blocks=True)
        self.flight: deque[tuple[InFlightStep, Any]] = deque()
        self.requests: dict[str, Request] = {}
        self.finished: list[str] = []

    def add(self, name: str, prompt: list[int], max_tokens: int | None, **options: Any) -> Request:
        request = make(name, prompt, max_tokens, **options)
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def plan(self) -> Planned:
        step = self.scheduler.schedule()
        o.check(self.scheduler)
        if step:
            self.flight.append((step, self.oracle.submit(step.plan)))
        self.oracle.check_checkpoints()
        return Planned(step)

    def part(self) -> list[str]:
        """Commit the next column of the oldest decode window in flight."""
        step, running = self.flight[0]
        columns = running.poll()
        assert columns is not None
        return self._record_finished(self.scheduler.update(step, columns, last=False))

    def land(self) -> list[str]:
        step, running = self.flight.popleft()
        return self._record_finished(self.scheduler.update(step, running.result()))

    def err(self, request: Request) -> list[str]:
        """Commit the oldest step in flight with non-finite logits of this request."""
        step, running = self.flight.popleft()
        i = next(i for i, s in enumerate(step.sequences) if s.request is request)
        return self._record_finished(self.scheduler.update(step, StepResult(running.result().tokens, {i: "NaN"})))

    def fail(self, limit: int = 0) -> list[str]:
        """Fail the oldest step in flight and all after it."""
        void = list(self.flight)
        self.flight.clear()
        redone = self.scheduler.fail(void[0][0], limit)
        self.oracle.fail([running.plan for _, running in void])
        o.check(self.scheduler)
        return [r.request_id for r in redone]

    def step(self) -> Planned:
        plan = self.plan()
        self.land()
        return plan

    def preempt(self, request: Request, policy: Policy | None = None) -> StepPlan:
        """Preempt a request between two steps, by `policy` if given. Returns the plan of its swaps, submitted."""
        plan = preempt(self.scheduler, request, policy)
        if plan:
            self.oracle.submit(plan)
        return plan

    def abort(self, name: str) -> None:
        self.scheduler.abort(name)
        o.check(self.scheduler)

    def run(self, depth: int = 1, limit: int = 500, *, unpins: bool = False) -> None:
        """Run until all has finished. Checks that outputs equal the reference's, or a prefix if ended early."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            plan = self.plan() if len(self.flight) < depth else None
            o.need(plan or self.flight or not self.scheduler.requests, o.Stall, self.scheduler.requests)
            if self.flight and (not plan or len(self.flight) >= depth):
                self.land()
        assert not self.scheduler.has_work, "livelock"
        for name in list(self.cache.pins) if unpins else ():
            assert self.scheduler.unpin(name)
        self.at_rest()

    def at_rest(self) -> None:
        for request in self.requests.values():
            got, want = o.outputs(request), o.reference(request)
            if (
                all(s.finish_reason in ("stop", "length", "pruned") for s in request.finished_sequences)
                and not request.error
            ):
                assert got == want, (request.request_id, got, want)
            elif request.select_beams is None:
                whole = dict(want)
                assert all(tokens == whole[i][: len(tokens)] for i, tokens in got)
        assert self.pool.num_used == self.pool.num_refs == self.cache.num_pinned == 0
        assert self.cache.swap_space.num_used == 0
        assert self.cache.rows.num_free == self.scheduler.max_num_seqs
        assert not o.holders(self.cache)

    def emitted(self, *kinds: type) -> list[ev.Event]:
        return [e for e in self.events if isinstance(e, kinds)]

    def reasons(self, name: str) -> list[str]:
        """Return the wait reasons of a request in order."""
        return [e.reason for e in self.events if isinstance(e, ev.Waiting) and e.request_id == name]

    def _record_finished(self, finished: list[Request]) -> list[str]:
        o.check(self.scheduler)
        self.oracle.check_checkpoints()
        names = [r.request_id for r in finished]
        self.finished += names
        return names


def crowded(world: Worlds, policy: Policy, *, steps: int = 3, late: int = 0, **options: int) -> Lab:
    """A and B fill a pool of 6 blocks in three steps; in the fourth A needs one more, and B, the later, gives way.

    `late` of those steps are still in flight when this returns.
    """
    lab = world(6, host=6, policy=policy, **options)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    for _ in range(steps):
        lab.plan()
        if len(lab.flight) > late:
            lab.land()
    return lab


def names(plan: Planned) -> list[str]:
    return [s.request.request_id for s in plan.sequences]


def preempt(scheduler: Scheduler, request: Request, policy: Policy | None = None) -> StepPlan:
    """Preempt a request, as a step does for want of blocks. Returns the plan of its swaps."""
    plan, usual = StepPlan(scheduler.num_steps), scheduler.policy
    scheduler.policy = policy or usual
    preemption.preempt(scheduler, request, request, 0, InFlightStep(plan))
    scheduler.policy = usual
    return plan


def state_of(cache: KVCacheManager, *sequences: Sequence) -> Any:
    """The whole state of a manager and of sequences, for comparison."""
    slots = [k for k in Sequence.__slots__ if k != "windows"]
    attributes = [[list(v) if isinstance(v := getattr(s, k), list) else v for k in slots] for s in sequences]
    attributes += [[(list(ids), num_dropped) for ids, num_dropped in s.tables] for s in sequences]
    return cache.snapshot(o.Themselves((), ())), attributes, [dict(s.request.shared_on_device) for s in sequences]


def make(name: str, prompt: list[int], max_tokens: int | None, **options: Any) -> Request:
    beam = options.pop("beam", 0)
    if beam:
        options.update(width=beam, num_samples=beam, select_beams=o.keep_best(beam))
    params = options.pop("sampling_params", ANY)
    return Request(name, prompt, params, max_tokens=max_tokens, **options)


def answer(prompt: list[int], num: int, index: int = 0) -> list[int]:
    """Return the output of sample `index` by the oracle's model, without stop tokens."""
    request = make("", prompt, num, width=index + 1)
    return dict(o.reference(request))[index][len(prompt) :]


def slice_of(plan: Planned, request: Request, index: int = 0) -> Slice | None:
    """The slice of one sequence of a request in a plan."""
    for s, seq in zip(plan.slices(), plan.sequences, strict=True):
        if seq.request is request and seq.index == index:
            return s
    return None


def sequence(tokens: list[int], limit: int = 1 << 20, **options: Any) -> Sequence:
    """Make a sequence without a scheduler, for tests of `KVCacheManager`."""
    request = make("s", tokens, None, **options)
    request.begin(0, (0, 0), limit)
    return request.sequences[0]


def arrange(pool: BlockPool, *block_ids: int) -> None:
    """Allocate and release blocks of an unused pool so that `allocate` returns these next, in this order."""
    taken = [pool.allocate() for _ in range(max(block_ids))]
    for block in [b for b in taken if b not in block_ids] + list(reversed(block_ids)):
        pool.release(block)


def settle(cache: KVCacheManager, tokens: list[int], count: int | None = None, **options: Any) -> Sequence:
    """A sequence that looked its prompt up and computed `count` positions (all but the last token)."""
    seq = sequence(tokens, **options)
    cache.attach(seq, cache.prefixes.lookup(seq))
    count = len(tokens) - 1 if count is None else count
    cache.grow(seq, count - seq.num_computed, StepPlan())
    seq.num_computed = count
    cache.prefixes.seal(seq)
    seq.request.status = Status.RUNNING
    return seq


def fork(cache: KVCacheManager, parent: Sequence) -> Sequence:
    """Add a copy of a sequence to its request."""
    child = Sequence(parent.request, len(parent.request.sequences), parent.token_ids[:], parent.max_length)
    cache.fork(parent, child)
    parent.request.sequences.append(child)
    return child
