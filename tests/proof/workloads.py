"""Random workloads for the oracle.

They have arrivals, chats, forks, beam searches, aborts, stops, preemption, swaps, and failing steps and requests.

`run(seed)` makes a small workload from a seed, drives the real scheduler until every request has finished, and checks
after every call. `python -m tests.proof.workloads 0 1000` runs seeds 0 to 999 and prints totals of what they reached.
With `--drafts` the same requests speculate, with `--groups` the cache has window groups, and with `--states` sequences
have recurrent states, some requests have marks, repeat an earlier prompt, or resume outputs of an engine that stopped.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from octavo.core import events as ev
from octavo.core.block_pool import BLOCKS_PER_SHARD, BlockPool, group_key
from octavo.core.cache.prefix_index import Prefix, PrefixIndex
from octavo.core.cache.swapping import Swapping
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionChoice, PreemptionCosts, PreemptionMode, VictimPolicy
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.scheduling import preemption, scheduler_state
from octavo.errors import CapacityError
from octavo.params.sampling_params import SamplingParams
from tests.proof import oracle as o
from tests.proof.oracle import Invariant, Stall, WrongOutput, holders, need

MAX_STEPS = 8000
KINDS = ("", "swap", "chat", "prefix")
"""Mixed; swap-heavy; the next turn of a chat, with its stop tokens; one common prefix."""


class RandomPolicy(Policy):
    """Preempts each victim in a random mode."""

    def __init__(self, rnd: random.Random, by_priority: bool) -> None:
        super().__init__(by_priority)
        self.random = rnd

    def preemption_mode(self, victim: Request, num_blocks: int, num_positions: int) -> PreemptionChoice:
        return PreemptionChoice(self.random.choice(list(PreemptionMode)), "lot")


class Fairness:
    """Checks a step's fairness to tenants and short prompts: made before the step is planned, checked after."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.longest = scheduler.policy.long_prefill_token_threshold
        self.max_longs = scheduler.max_long_prefills
        sequences = [seq for request in scheduler.running for seq in request.sequences]
        self.length = {seq: len(seq.token_ids) + seq.num_pending for seq in sequences}
        self.due = {seq: length - seq.num_computed for seq, length in self.length.items()}
        self.num_preemptions = scheduler.num_preemptions
        self.swapped = list(scheduler.swapped)
        # Steps that are confined to some requests are not shared.
        tenants = {} if scheduler.confined_to else scheduler.tenants.present
        self.served = {number: tenant.served for number, tenant in tenants.items()}
        self.stuck = any(r.wait_reason in ("blocks", "rows") for r in scheduler.waiting)

    def check(self, step: InFlightStep, totals: Counter[str]) -> None:
        prompts: Counter[int] = Counter()  # positions of prompts, by tenant
        longs: Counter[int] = Counter()
        whole: Counter[int] = Counter()
        unmet: set[int] = set()
        plan, scheduler = step.plan, self.scheduler
        unverified = map(plan.num_unverified, range(len(plan.rows)))
        for seq, count, start, extra in zip(step.sequences, plan.counts, plan.starts, unverified, strict=True):
            tenant, due = seq.request.tenant, self.length.get(seq, len(seq.token_ids)) - start
            count -= extra  # drafts take what is left, and are not charged
            whole[tenant] += count
            if due <= 1:
                continue
            prompts[tenant] += count
            wants = min(due, self.longest or due, scheduler.cache.max_chunk)
            if scheduler.cache.state_blocks and (start + count) % scheduler.cache.block_size == 0:
                wants = count  # it may end at a mark
            if count < wants and seq is seq.request.only_sequence:
                unmet.add(tenant)
            if self.longest and due > self.longest:
                need(count <= self.longest, Invariant, "a long prompt takes more than its part", seq)
                longs[tenant] += seq.request not in self.swapped
        need(max(longs.values(), default=0) <= self.max_longs, Invariant, "long prompts at a time", longs)
        totals["long prompts"] += bool(longs)
        if len(self.served) > 1:
            self._are_level(step, prompts, longs, whole, unmet, totals)

    def _are_level(
        self,
        step: InFlightStep,
        prompts: Counter[int],
        longs: Counter[int],
        whole: Counter[int],
        unmet: set[int],
        totals: Counter[str],
    ) -> None:
        """Check that no tenant prefills more while a less served one wants more."""
        scheduler, present = self.scheduler, self.scheduler.tenants.present
        after = {number: tenant.served for number, tenant in present.items()}
        need(after == {n: served + whole[n] for n, served in self.served.items()}, Invariant, "served", after)
        if self.stuck or self.swapped or scheduler.num_preemptions > self.num_preemptions:
            return
        if any(r.wait_reason in STOPPED for r in scheduler.waiting):
            return
        if any(start and seq not in self.due for seq, start in zip(step.sequences, step.plan.starts, strict=True)):
            return  # cache hits reduced what was due, and other tenants got the rest
        if any(
            not n and len(s.request.sequences) > 1 for s, n in zip(step.sequences, step.plan.num_sampled, strict=True)
        ):
            return  # so did blocks of siblings, where a group is rebuilt
        planned = {seq.request for seq in step.sequences}
        if whole.total() < scheduler.max_num_scheduled_tokens and any(
            map(self._lacks_blocks, {*scheduler.running} - planned)
        ):
            return  # drafts in flight hold the blocks of a running request: the step ends there
        for request in scheduler.running:
            due = 0 if request.only_sequence is None else self.due.get(request.only_sequence, 0)
            if due > 1 and request not in planned and not self._is_long(due):
                unmet.add(request.tenant)
        for number, tenant in present.items():
            full = longs[number] >= self.max_longs  # another long prefill has to wait, and lets shorter ones pass
            tried = (r for r in tenant.waiting if not (full and r.is_long_prefill(self.longest)))
            if (first := next(tried, None)) is not None and first.wait_reason in ("", "budget"):
                unmet.add(number)
        for poor in unmet:
            for rich, count in prompts.items():
                totals["shared steps"] += rich != poor
                minimum = 1 + sum(r.tenant == rich for r in scheduler.running)
                is_level = count <= minimum or after[rich] <= after[poor] + len(after)
                need(is_level, Invariant, "unfair", rich, poor, after, prompts)

    def _lacks_blocks(self, request: Request) -> bool:
        """Whether a request that was not planned in a step with budget left could only lack blocks: it decodes."""
        seq = request.only_sequence
        if not self.scheduler.num_speculative_tokens or seq is None or (request.needs_result and request.num_pending):
            return False
        decodes = self.due.get(seq) == 1 or self.scheduler.cache.windows  # in these, prefills may lack blocks, too
        return bool(decodes) and self.length.get(seq, 0) < seq.max_length

    def _is_long(self, due: int) -> bool:
        return 0 < self.longest < due


class GivingWay:
    """Checks which requests give way to other tenants in a step: made before the step is planned, checked after.

    ends   request that gave way or waited for its place -> the length from which on it may give way; -1 until it runs
    since  request that gave way or waits for its place -> since which step
    """

    def __init__(self, scheduler: Scheduler, ends: dict[Request, int], since: dict[Request, int]) -> None:
        self.scheduler, self.ends, self.since, self.step = scheduler, ends, since, scheduler.num_steps
        self.running = {r: r.num_preemptions for r in scheduler.running}
        self.rows: Counter[int] = Counter()
        for request in self.running:
            self.rows[request.tenant] += request.width
        self.others = [*scheduler.swapped, *scheduler.waiting]
        waited = {r: self.step - since[r] for r in self.others if since.get(r, -1) >= 0}
        overdue = [r for r, num in waited.items() if num >= scheduler_state.PATIENCE_STEPS]
        self.late = {r for r in overdue if not self.rows[r.tenant]}
        self.claims = [r for r in self.others if self._is_clear(r)]

    def _may(self, request: Request, claim: Request) -> bool:
        """Whether the request may give way to this one, apart from their tenants' rows."""
        length = max(len(seq.token_ids) for seq in request.sequences)
        urgent = self.scheduler.policy.by_priority and request.priority < claim.priority
        return request.tenant != claim.tenant and not (request.pin or urgent) and length >= self.ends.get(request, 0)

    def _is_clear(self, claim: Request) -> bool:
        """Whether it waits for one row, one may give way for it, and no other tenant waits."""
        scheduler = self.scheduler
        if claim.wait_reason != "rows" or claim.width > 1 or claim.num_pending or scheduler.confined_to:
            return False
        first = next(r for r in self.others if r.tenant == claim.tenant)
        if first is not claim or any(r.tenant != claim.tenant for r in self.others):
            return False
        most = max(self.rows.values(), default=0)
        is_full = self.rows.total() == scheduler.max_num_seqs and most > self.rows[claim.tenant] + 1
        return is_full and any(self._may(r, claim) and self.rows[r.tenant] == most for r in self.running)

    def check(self, totals: Counter[str]) -> list[Request]:
        """Return the requests that gave way."""
        scheduler = self.scheduler
        gone = [r for r, num in self.running.items() if r not in scheduler.running and r.num_preemptions == num]
        for request in gone:
            claims = [r for r in self.others if self._may(request, r)]
            fewer = [r for r in claims if self.rows[r.tenant] + r.width < self.rows[request.tenant]]
            need(fewer or self.late & set(claims), Invariant, "gave way to nobody", request)
            totals["gave way" if fewer else "gave way to an overdue one"] += 1
        need(not self.claims or gone, Invariant, "no way was given", self.claims)
        for request in scheduler.running:
            if self.ends.get(request, 0) < 0:
                self.ends[request] = len(request.sequences[0].token_ids) + scheduler_state.TURN_TOKENS
        waiting = [r for r in scheduler.waiting if r.wait_reason in ("rows", "blocks")]
        for request in (*waiting, *gone):
            if self.since.get(request, -1) < 0:
                self.since[request] = self.step
            self.ends[request] = -1
        for request in scheduler.requests.values():
            if request.status is Status.RUNNING:
                self.since[request] = -1
            known = self.since.setdefault(request, -1)
            is_new = known in (-1, self.step) and self.step <= request.waits_since <= self.step + 1
            need(request.waits_since == known or is_new, Invariant, "waits since", request, known)
            if is_new:  # the reason may have changed since, or was set after the step was planned
                self.since[request], self.ends[request] = request.waits_since, -1
        return gone


class StateWatch:
    """Counts what happens to states and their checkpoints, and checks where they are left."""

    class Before(NamedTuple):
        """What was there before a call: the seal of each checkpoint's head, and the state of each running sequence."""

        heads: dict[int, int]
        states: dict[Sequence, list[int]]
        refs: dict[int, int]
        last_seal: int

    def __init__(self, world: World) -> None:
        self.cache, self.scheduler, self.totals = world.cache, world.scheduler, world.totals

    def count(self, what: str, num: Any = 1) -> None:
        self.totals["state: " + what] += int(num)

    def before(self) -> Before:
        pool = self.cache.pool
        heads = {ids[-1]: pool.seal_id[ids[-1]] for ids in o.chains(self.cache)}
        states = {s: s.state[:] for r in self.scheduler.running for s in r.sequences}
        return self.Before(
            heads, states, {ids[-1]: pool.refs[ids[-1]] for ids in states.values() if ids}, pool.last_seal_id
        )

    def landed(self, before: Before) -> None:
        pool = self.cache.pool
        self.count("sealed by a result", sum(seal > before.last_seal for seal in self.before().heads.values()))
        for head, seal in before.heads.items():
            self.count("seal lost by a result", pool.seal_id[head] != seal)

    def planned(self, before: Before, step: InFlightStep, came: list[Request]) -> None:
        pool, plan, size = self.cache.pool, step.plan, self.cache.block_size
        self.count("sealed", sum(seal > before.last_seal for seal in self.before().heads.values()))
        written = {seq.state[-1] for seq in step.sequences if seq.state}
        gone = [head for head, seal in before.heads.items() if pool.seal_id[head] != seal]
        owned = {ids[-1]: seq for seq, ids in before.states.items() if ids}
        for head in gone:
            in_place = head in written and owned.get(head) in step.sequences
            self.count("written in place" if in_place else "evicted")
        for seq in step.sequences:
            ids = before.states.get(seq, [])
            if ids and seq.state != ids:
                self.count("moved, shared" if before.refs[ids[-1]] > 1 else "moved, sealed")
        self.count("blocks copied", len(plan.copies))
        for request in came:
            seq = request.sequences[0]
            found = seq in step.sequences and plan.starts[step.sequences.index(seq)]
            self.count("found", bool(found))
            self.count("found at the last mark", found == (len(seq.token_ids) - 1) // size * size > 0)
            self.count("found with preemptions", bool(found and request.num_preemptions))
        waits = [r for r in self.scheduler.waiting if r.wait_reason == "prefix in flight"]
        self.count("waited on", len(waits))
        self.count("swapped out", any(r.status is Status.SWAPPED for r in step.swapped_requests))
        self.count("swapped in", any(r.status is Status.RUNNING for r in step.swapped_requests))
        self.count(
            "groups that share one",
            any(
                len(r.sequences) > 1 and len({s.state[-1] for s in r.sequences if s.state}) == 1
                for r in self.scheduler.running
            ),
        )
        for seq, start, count, num_sampled in zip(
            step.sequences, plan.starts, plan.counts, plan.num_sampled, strict=True
        ):
            self._ends_at_marks(seq, start, start + count, num_sampled)

    def _ends_at_marks(self, seq: Sequence, start: int, end: int, num_sampled: int) -> None:
        """Check that a slice passes no mark, and that it leaves a checkpoint at one."""
        cache, request, size = self.cache, seq.request, self.cache.block_size
        if not cache.enable_prefix_caching:
            need(not seq.marks, Invariant, "marks without a prefix cache", seq)
            return
        num = len(request.prompt_token_ids)
        last = (num - 1) // size * size
        marks = {min(mark // size * size, last) for mark in request.marks} or {last}
        marks |= {*seq.marks}
        passed = [mark for mark in marks if start < mark < end]
        need(not passed, Invariant, "a slice passes a mark", seq, start, end, passed)
        parent = seq.seal_ids[end // size - 1] if end in marks and len(seq.seal_ids) >= end // size else 0
        if parent and parent in {*cache.pool.seal_id}:
            need(cache.pool.find(group_key(parent, len(cache.windows))), Invariant, "no checkpoint at a mark", seq, end)
            self.count("at the end of a slice")
        if request.is_single and end > num and end % cache.checkpoint_interval == 0:
            self.count("a stop in the output")


STOPPED = ("blocks", "rows", "behind a swapped request", "in flight", "prefix in flight", "long prefill")
"""Wait reasons with which shares may stay unequal: a slice that was shortened is not extended again."""


class World:
    """A workload: one scheduler, one oracle, and the requests to add."""

    def __init__(
        self,
        seed: int,
        totals: Counter[str],
        *,
        kind: str | None = None,
        listen: bool | None = None,
        speculates: bool = False,
        groups: bool = False,
        states: bool = False,
    ) -> None:
        self.seed = seed
        self.random = rnd = random.Random(seed)
        self.totals = totals
        drawn = rnd.choice(["", *KINDS])
        self.kind = drawn if kind is None else kind
        self.tight = rnd.random() < 0.6
        size = 1 if self.kind == "chat" else rnd.choice([1, 2, 3, 4, 8])
        num_blocks = max(4, rnd.randint(40, 90 if self.tight else 130) // size)
        grouped = random.Random(seed + 0.1875) if groups else None
        windows = grouped.choices([1, 2, 3, 5, 9, 16], k=grouped.choice([1, 1, 2, 3])) if grouped else []
        num_blocks = int(num_blocks * (1 + grouped.choice([0, 0.3, 0.6, 1]) * len(windows))) if grouped else num_blocks
        self.stating = stating = random.Random(seed + 0.3125) if states else None
        state_blocks = stating.choice([1, 1, 2, 3, 4]) if stating else 0
        num_blocks += state_blocks * stating.choice([1, 2, 4, 8]) if stating else 0
        num_host = num_blocks if self.kind == "swap" else rnd.choice([0, num_blocks // 2, num_blocks])
        self.rows = rnd.choice([2, 4, 8, 16])
        per_shard = BLOCKS_PER_SHARD if seed % 4 else max(1, num_blocks // 3)  # few: as in a pool of many thousands
        with mock.patch("octavo.core.block_pool.BLOCKS_PER_SHARD", per_shard):
            self.cache = KVCacheManager(
                num_blocks,
                size,
                num_host,
                num_rows=self.rows,
                enable_prefix_caching=rnd.random() < 0.9,
                attention_window=0 if grouped or stating else random.Random(~seed).choice([0, 0, 0, 2, 3, 5, 9, 16]),
                windows=windows,
                max_chunk=grouped.choice([1, 2, 3, 8, 16, 40]) if grouped else 0,
                state_blocks=state_blocks,
                checkpoint_interval=size * stating.choice([1, 2, 4]) if stating else 0,
            )
        self.seen: Counter[str] = Counter()
        self.num_out_events = self.num_out_plans = 0  # swapped-out blocks according to events and to plans
        listens, to_blocks = rnd.random() < 0.5, rnd.random() < 0.5
        if listens if listen is None else listen:
            self.cache.events.subscribe(self._listen, blocks=to_blocks)
        by_priority = rnd.random() < 0.5
        mode = rnd.choice([None, *PreemptionMode, "lot", "lot"])
        if self.kind == "swap":
            mode = PreemptionMode.SWAP
        policy = RandomPolicy(rnd, by_priority) if mode == "lot" else Policy(by_priority, mode)
        also = random.Random(seed + 0.5)
        policy.ageing = also.choice([0, 1, 4])
        policy.victims = also.choice(list(VictimPolicy))
        fair = self.fair = random.Random(seed + 0.625)  # tenants, calls and long prompts, in most worlds
        policy.long_prefill_token_threshold = fair.choice([0, 0, 1, 2, 5, 9])
        policy.max_long_partial_prefills = fair.choice([1, 1, 2])
        self.num_tenants = fair.choice([1, 2, 2, 3])
        policy.costs = PreemptionCosts(
            token_s=also.choice([0, 1, 1]), move_s=also.choice([0.1, size / 2, size]), kept=0.2
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=rnd.choice([self.rows, self.rows + 3, 32, 256]),
            decode_window=rnd.choice([1, 1, 2, 4, 8]),
            num_watermark_blocks=rnd.choice([0, 0, 1, 3]),
            policy=policy,
        )
        if rnd.random() < 0.4:
            o.watch_eviction(self.cache)
        coin = lambda: rnd.random() < 0.5  # noqa: E731
        self.habits = o.Habits(coin(), coin(), coin(), coin(), coin())
        self.habits.corrupts = random.Random(seed + 0.4375).choice([0.0, 0.0 if self.kind != "swap" else 0.3, 0.3])
        self.drafting = random.Random(seed + 0.8125) if speculates else None
        if self.drafting:
            self.scheduler.num_speculative_tokens = self.drafting.choice([1, 2, 3, 5, 8])
            self.habits.drafts = self.drafting.choice(["right", "wrong", "random", "lot", "lot"])
            self.habits.lazy = self.drafting.random() < 0.3
        self.oracle = o.Oracle(self.scheduler, self.habits, seed)
        self.states = StateWatch(self) if states else None
        self.depth = rnd.choice([1, 2, 2, 3])
        self.failing = rnd.choice([0.0, 0.0, 0.0, 0.05])
        self.short = random.Random(seed + 0.75)  # of memory, in some of the worlds where steps fail
        self.halving = random.Random(seed + 0.375)  # of requests, after steps that failed
        self.broken = random.Random(seed + 0.125)  # numbers, in some worlds, of one slice
        self.breaking = self.broken.choice([0.0, 0.0, 0.02])
        self.requests = self._requests()
        self.wanted = {r.request_id: r for r in self.requests}
        self.stopped: set[str] = set()
        self.aborted: set[str] = set()
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.turn_ends: dict[Request, int] = {}
        self.waits_since: dict[Request, int] = {}
        self.authors: dict[int, Sequence] = {}  # block -> who wrote into it last
        self.flight: deque[tuple[InFlightStep, Any]] = deque()

    def _listen(self, event: ev.Event) -> None:
        name = type(event).__name__
        if isinstance(event, ev.Preempted):
            name += " " + event.how
            self.num_out_events += event.num_blocks if event.how == "swap" else 0
        elif isinstance(event, ev.Waiting):
            name += " for " + event.reason
        self.seen[name] += 1
        if isinstance(event, ev.SwappedIn | ev.Admitted):
            self._leaves_room(self.scheduler.requests[event.request_id])
        if isinstance(event, ev.Step):
            need(event.used + event.cached + event.free == self.cache.pool.num_blocks, Invariant, "Step event", event)

    def _leaves_room(self, request: Request) -> None:
        """Check that a preempted request resumes only with headroom for all running requests to grow."""
        scheduler, cache = self.scheduler, self.cache
        if request.num_preemptions and len(scheduler.running) > 1:
            left = max(s.max_length - len(s.token_ids) for s in request.sequences)
            growth = cache.blocks_for(min(left, 16 << (request.num_preemptions - 1)))
            need(cache.pool.num_available >= growth * scheduler.num_rows_taken, Invariant, "no room to grow", request)

    def _requests(self) -> list[Request]:
        rnd, todo = self.random, []
        skips = random.Random(self.seed + 0.375)
        token = lambda: rnd.randrange(o.VOCAB)  # noqa: E731
        prefixes = [[token() for _ in range(rnd.randint(1, 20))] for _ in range(2)]
        for i in range(rnd.randint(1, 14)):
            prompt = (rnd.choice(prefixes) if rnd.random() < 0.6 else []) + [token() for _ in range(rnd.randint(1, 12))]
            if rnd.random() < 0.2 or self.kind == "chat":
                prompt = list(rnd.choice(prefixes))
            if self.kind in ("swap", "prefix"):
                prompt = prefixes[0] + [token() for _ in range(rnd.randint(1, 4))]
            salt = rnd.choice([b"", b"", b"tenant"]) if self.kind == "" else b""
            if todo and rnd.random() < 0.25:  # next turn of a chat: an earlier output, its stop token included
                before = rnd.choice(todo)
                more = o.reference(before)[0][1]
                if len(more) < 50:
                    prompt, salt = more + [token() for _ in range(rnd.randint(1, 3))], before.salt
            kind = rnd.random()
            width = rnd.randint(2, 4) if kind < 0.25 else rnd.randint(1, 4) if kind < 0.45 else 1
            beam = 0.25 <= kind < 0.45
            stops = rnd.choice([(), (), (), (0,)]) if self.kind != "chat" else (0,)
            request = Request(
                f"r{i}",
                prompt,
                SamplingParams(max_tokens=None, skip_reading_prefix_cache=skips.random() < 0.1),
                max_tokens=rnd.randint(8, 24) if self.tight else rnd.randint(1, rnd.choice([4, 12, 30])),
                stop_ids=stops,
                priority=rnd.choice([0, 0, 0, 1]),
                salt=salt,
                width=width,
                num_samples=width,
                select_beams=o.keep_best(width) if beam else None,
                use_structured_output=rnd.random() < 0.15,
            )
            todo.append(request)
        for request in todo:
            request.tenant = self.fair.randrange(self.num_tenants)
            request.index_in_call = self.fair.choice([0, 0, 0, 1, 3])
        self._add_pins(todo, prefixes)
        if self.drafting:
            for request in todo:
                request.num_draft_tokens = self.drafting.choice([0, 1, 2, 4, 8])
        if self.stating:
            todo = self._with_marks(todo, self.stating)
        return todo

    def _with_marks(self, todo: list[Request], rnd: random.Random) -> list[Request]:
        """Add marks, retries of prompts, and outputs so far of an engine that stopped."""
        for i, before in enumerate(todo[:]):
            if rnd.random() < 0.3 and not before.pin:
                again = Request(
                    f"again{i}",
                    before.prompt_token_ids,
                    before.sampling_params,
                    max_tokens=before.max_tokens,
                    salt=before.salt,
                    tenant=before.tenant,
                    stop_ids=before.stop_ids,
                    resume=self._begun(before, rnd) if rnd.random() < 0.3 else None,
                )
                todo.insert(rnd.randrange(len(todo) + 1), again)
        for request in todo:
            num = len(request.prompt_token_ids)
            request.marks = tuple(rnd.randint(-2, num + 4) for _ in range(rnd.choice([0, 0, 1, 1, 2, 3])))
        return todo

    def _begun(self, request: Request, rnd: random.Random) -> dict[int, list[int]] | None:
        """Return outputs with which one sequence of this request may resume; None if its output has one token."""
        prompt, max_tokens, stops = request.prompt_token_ids, request.max_tokens, request.stop_ids
        alone = Request("", prompt, SamplingParams(max_tokens=None), max_tokens=max_tokens, stop_ids=stops)
        alone.salt = request.salt
        output = o.reference(alone)[0][1][len(prompt) :]
        return {0: output[: rnd.randrange(1, len(output))]} if len(output) > 1 else None

    def _add_pins(self, todo: list[Request], prefixes: list[list[int]]) -> None:
        """Pin prompts in some workloads, before or among requests that begin with them."""
        rnd = random.Random(self.seed + 0.25)
        if rnd.random() < 0.7:
            return
        for i in range(rnd.randint(1, 3)):
            prompt = rnd.choice([*prefixes, list(rnd.choice(todo).prompt_token_ids)])
            salt = rnd.choice([b"", b"", b"tenant"]) if self.kind == "" else b""
            params = SamplingParams(max_tokens=None)
            pin = Request(f"pin{i}", prompt, params, max_tokens=1, salt=salt, pin=True)
            todo.insert(rnd.randrange(len(todo) + 1), pin)

    # -- driving -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        to_come = deque(self.requests)
        want = {r.request_id: o.reference(r) for r in self.requests}
        rnd, scheduler, turns = self.random, self.scheduler, 0
        while to_come or scheduler.requests or self.flight:
            turns += 1
            need(turns < MAX_STEPS, Stall, "livelock")
            while to_come and (rnd.random() < (0.9 if self.tight else 0.4) or not (scheduler.requests or self.flight)):
                self._add(to_come.popleft(), want)
            if rnd.random() < 0.04:
                self._interfere()
            plan = self._plan() if len(self.flight) < self.depth else None
            if self.flight and (not plan or len(self.flight) >= self.depth or rnd.random() < 0.2):
                self._land()
            elif plan is not None and not plan and not self.flight and not to_come:
                need(not scheduler.requests, Stall, "nothing planned, nothing in flight", scheduler.requests)
        self._at_rest(want)

    def _add(self, request: Request, want: dict[str, Any]) -> None:
        self.totals["requests"] += 1
        try:
            self.scheduler.add(request)
        except CapacityError:
            self.totals["refused"] += 1
            want.pop(request.request_id)

    def _interfere(self) -> None:
        rnd, scheduler = self.random, self.scheduler
        request = self.wanted[rnd.choice(list(self.wanted))]
        name = request.request_id
        if name in scheduler.requests:
            self.totals["abort " + request.status.value + (" in flight" if request.num_pending else "")] += 1
            if rnd.random() < 0.3 and not request.num_pending:
                self.totals["stop a sequence"] += 1
                self.stopped.add(name)
                if scheduler.stop(rnd.choice(request.sequences)):
                    self.finished.add(name)
            else:
                self.aborted.add(name)
                scheduler.abort(name)
        if scheduler.cache.pins and rnd.random() < 0.3:
            self.totals["unpinned while others run"] += bool(scheduler.running)
            scheduler.unpin(rnd.choice(list(scheduler.cache.pins)))
        need(scheduler.unpin("unknown") is None, Invariant, "unpinned nothing")
        scheduler.abort("unknown")
        if rnd.random() < 0.1:
            self.cache.reset_prefix_cache()
        o.check(scheduler)

    def _plan(self) -> InFlightStep:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        fairness, giving = Fairness(scheduler), GivingWay(scheduler, self.turn_ends, self.waits_since)
        watched = self.states.before() if self.states else None
        step = scheduler.schedule()
        plan = step.plan
        if self.states and watched:
            self.states.planned(watched, step, came=[r for r in waiting if r in scheduler.running])
        fairness.check(step, self.totals)
        gone = giving.check(self.totals)
        o.check(scheduler)
        left = [r for r in running if r not in scheduler.running and r not in gone]
        came = [r for r in waiting if r in scheduler.running]
        need(not (left and (came or plan.swap_ins)), Invariant, "admitted in a step that preempted")
        for request in scheduler.swapped if came else ():
            others = scheduler.tenants.several and request.tenant not in {r.tenant for r in came}
            need(others and request in self.turn_ends, Invariant, "admitted while others are swapped", request)
        planned = {seq.request for seq in step.sequences}
        need(not scheduler.confined_to or planned <= scheduler.confined_to, Invariant, "planned though not confined")
        need(all(len(r.sequences) > 1 or r.sequences[0] in step.sequences for r in came), Invariant, "no slice")
        limit, alone = scheduler.max_num_scheduled_tokens, len(planned) == 1
        need(plan.num_tokens <= limit or (alone and set(plan.counts) == {1}), Invariant, "token budget", limit)
        need(limit <= scheduler.max_num_batched_tokens, Invariant, "limit", limit)
        passes = map(plan.num_passes, range(len(plan.rows)))
        need(all(n <= scheduler.decode_window for n in passes), Invariant, "window")
        self.totals["slices with drafts"] += len(plan.drafts)
        self.num_out_plans += len(plan.swap_outs)
        need(not self.cache.events.active or self.num_out_events == self.num_out_plans, Invariant, "swap-out events")
        self._computed_once(step, came)
        self._note_authors(step)
        if step:
            self.flight.append((step, self.oracle.submit(plan)))
        self.oracle.check_checkpoints()
        return step

    def _computed_once(self, step: InFlightStep, came: list[Request]) -> None:
        """Check that of two requests admitted together only one computes a common first block."""
        if not self.cache.enable_prefix_caching or self.states:  # a prefix without a state spares nothing
            return
        first = {}
        plan, size = step.plan, self.cache.block_size
        for request in came:
            seq = request.sequences[0]
            if seq not in step.sequences or request.sampling_params.skip_reading_prefix_cache:
                continue
            i = step.sequences.index(seq)
            end = plan.starts[i] // size * size + size
            if end <= min(plan.starts[i] + plan.counts[i], len(seq.token_ids) - 1):
                content = (request.salt, seq.token_ids[:end].tobytes())
                need(content not in first, Invariant, "computed twice in one step", request, first.get(content))
                first[content] = request

    def _note_authors(self, step: InFlightStep) -> None:
        brought, size = {dst for _, dst in step.plan.swap_ins}, self.cache.block_size
        for request in step.swapped_requests:
            if request.status is Status.RUNNING:
                for seq in request.sequences:
                    self.authors |= {b: seq for ids, _ in seq.holdings for b in ids if b in brought}
        for seq, start, count in zip(step.sequences, step.plan.starts, step.plan.counts, strict=True):
            if seq.num_unverified and not seq.finish_reason:  # it starts there or earlier
                count, start = start + count, min(start, len(seq.token_ids) - 1)
                count -= start
            for ids, _ in seq.tables:
                self.authors |= dict.fromkeys(ids[start // size : -(-(start + count) // size)], seq)
            self.authors |= dict.fromkeys(seq.state, seq)

    def _break(self, step: InFlightStep, result: StepResult) -> set[int]:
        """Report non-finite logits for a random slice now and then.

        Returns the blocks that must leave the index: those that the request's sequences wrote, except blocks that other
        requests share by now.
        """
        if result.corrupt:
            return set()  # a corrupt block may itself cause an error
        live = [
            i
            for i, seq in enumerate(step.sequences)
            if seq.request.status is not Status.FINISHED and i not in step.void_slices
        ]
        away = [i for i in live if step.sequences[i].request.status is not Status.RUNNING]  # rare, so chosen more often
        if not live or self.broken.random() >= self.breaking * (10 if away else 1):
            return set()
        i = self.broken.choice(away or live)
        request = step.sequences[i].request
        result.errors[i] = "NaN"
        self.failed.add(request.request_id)
        self.totals["error " + request.status.value] += 1
        others = [s for r in self.scheduler.running if r is not request for s in r.sequences]
        shared = {b for seq in [*others, *self.cache.pins.values()] for ids, _ in seq.holdings for b in ids}
        return {b for b, author in self.authors.items() if author in request.sequences} - shared

    def _are_not_indexed(self, blocks: set[int]) -> None:
        pool = self.cache.pool
        sealed = {pool.seal_id[b]: b for b in range(1, pool.num_blocks + 1) if pool.seal_id[b]}
        for block in blocks:
            key = pool.key_of(block)
            while key is not None and not isinstance(key[0], bytes):
                key = pool.key_of(sealed[key[0]]) if key[0] in sealed else None
            need(key is None, Invariant, "a failed request's block is in the index", block)

    def _land(self) -> None:
        step, running = self.flight[0]
        scheduler, totals = self.scheduler, self.totals
        if step.plan.swap_ins and self.halving.random() < 0.1:  # swapped-in blocks may be corrupt
            self._confine(list(scheduler.running))
        if self.random.random() < self.failing:
            totals["failed steps"] += 1
            void = [r.plan for _, r in self.flight]
            self.flight.clear()
            limit = 0
            if self.seed % 3 == 0:
                totals["out of memory"] += 1
                limit = self.short.randint(1, max(1, step.plan.num_tokens // 2))
            redone = scheduler.fail(step, limit)
            need(not limit or scheduler.max_num_scheduled_tokens == limit, Invariant, "limit", limit)
            self.oracle.fail(void)
            totals["recomputed after a failed step"] += len(redone)
            need(all(r.status is Status.WAITING and not r.num_pending for r in redone), Invariant, "not taken back")
            self._confine(redone)
            return
        while (part := running.poll()) is not None:
            totals["columns"] += 1
            self._take_in(self._update(step, running, part, last=False))
            o.check(scheduler)
            if self.random.random() < 0.3:
                break
        self.flight.popleft()
        result = running.result()
        void = self._break(step, result)
        self._take_in(self._update(step, running, result))
        self._are_not_indexed(void)
        if scheduler.confined_to and self.halving.random() < 0.3:
            self._confine([*scheduler.running, *scheduler.waiting])
        if scheduler.max_num_scheduled_tokens < scheduler.max_num_batched_tokens and self.short.random() < 0.1:
            totals["steps grow again"] += 1
            scheduler.limit_steps(min(scheduler.max_num_batched_tokens, 2 * scheduler.max_num_scheduled_tokens))
        o.check(scheduler)

    def _confine(self, requests: list[Request]) -> None:
        """Confine steps to random requests, like an engine that searches for the request which fails its steps."""
        scheduler = self.scheduler
        chosen = [r for r in requests if self.halving.random() < 0.5]
        if chosen and self.halving.random() < 0.7:
            self.totals["confined"] += 1
            self.totals["confined while others run"] += any(r not in chosen for r in scheduler.running)
            scheduler.confine(chosen)
            need(set(scheduler.running + scheduler.swapped) <= set(chosen), Invariant, "others hold something")
        elif scheduler.confined_to:
            scheduler.confine(())
        o.check(scheduler)

    def _update(self, step: InFlightStep, running: Any, result: StepResult, *, last: bool = True) -> list[Request]:
        """Commit a result and check that nothing computed from corrupt blocks is committed or indexed."""
        scheduler, num_before = self.scheduler, self.cache.num_corrupt
        corrupt, before = len(result.corrupt), [r for r in scheduler.running if r.num_pending]
        poisoned = {i for i in self.oracle.poisoned.get(id(running.plan), ()) if not step.sequences[i].finish_reason}
        watched = self.states.before() if self.states else None
        finished = scheduler.update(step, result, last=last)
        if self.states and watched:
            self.states.landed(watched)
        self.oracle.check_checkpoints()
        need(self.cache.num_corrupt - num_before == corrupt, Invariant, "corrupt blocks are counted", corrupt)
        need(poisoned <= step.void_slices, WrongOutput, "computed from corrupt blocks", poisoned - step.void_slices)
        if last:
            self.oracle.poisoned.pop(id(running.plan), None)
        if corrupt:
            self.totals["corrupt blocks"] += corrupt
            self.totals["corrupt blocks while confined"] += bool(scheduler.confined_to)
            redone = [r for r in before if r.status is Status.WAITING]
            self.totals["others recomputed"] += len(redone) - len({step.swap_in_requests[b] for b in result.corrupt})
            self.totals["unaffected by a corrupt block"] += len(before) - len(redone)
        return finished

    def _take_in(self, finished: list[Request]) -> None:
        for request in finished:
            need(request.request_id not in self.finished, WrongOutput, "finished twice", request)
            self.finished.add(request.request_id)

    def _at_rest(self, want: dict[str, Any]) -> None:
        pool = self.cache.pool
        for name in list(self.cache.pins):
            self.scheduler.unpin(name)
            o.check(self.scheduler)
        self.oracle.check_checkpoints()
        need(not any(pool.refs) and pool.num_cached + pool.num_free == pool.num_blocks, Invariant, "blocks leaked")
        need(self.cache.swap_space.num_used == 0, Invariant, "host blocks leaked")
        need(self.cache.rows.num_free == self.rows and not self.scheduler.num_rows_taken, Invariant, "rows leaked")
        need(not holders(self.cache) and self.cache.stats().num_used == 0, Invariant, "holders leaked")
        for name, wanted in want.items():
            request = self.wanted[name]
            got = o.outputs(request)
            if name in self.aborted | self.stopped | self.failed:
                if request.select_beams is None:
                    whole = dict(wanted)
                    need(all(t == whole[j][: len(t)] for j, t in got), WrongOutput, name, "cut short")
            else:
                need(got == wanted, WrongOutput, name, got, wanted)
                need(name in self.finished, WrongOutput, name, "never reported")


def run(
    seed: int,
    totals: Counter[str] | None = None,
    *,
    kind: str | None = None,
    speculates: bool = False,
    groups: bool = False,
    states: bool = False,
) -> Counter[str]:
    """Run the workload of this seed to its end. Raises the oracle's findings."""
    totals = Counter() if totals is None else totals
    world = World(seed, totals, kind=kind, speculates=speculates, groups=groups, states=states)
    with mock.patch.object(scheduler_state, "PATIENCE_STEPS", world.fair.choice([2, 5, 64])):
        world.run()
    totals.update(world.oracle.counts)
    totals.update(world.seen)
    totals["prefix hits"] += world.cache.prefixes.num_hits
    totals["blocks dropped"] += world.cache.num_dropped
    totals["workloads"] += 1
    return totals


def hunt(seconds: float, first: int = 0) -> str:
    """Return the first seed from `first` on that fails within this time, with or without drafts; "" if none does."""
    seed, end = first, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            run(seed)
            run(seed, speculates=True)
            run(seed, groups=True)
            run(seed, speculates=True, groups=True)
            run(seed, states=True)
            run(seed, groups=True, states=True)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}"
        seed += 1
    return ""


@contextmanager
def covering(totals: Counter[str]) -> Iterator[None]:
    """Count events inside the core meanwhile, by wrapping its functions."""
    whole: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, note: Callable[..., Callable[[Any], None] | None]) -> None:
        """Call `note` before each call, and what it returns with the result."""
        inner = getattr(owner, name)

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            after = note(self, *args)
            result = inner(self, *args, **kwargs)
            if after is not None:
                after(result)
            return result

        whole.append((owner, name, inner))
        setattr(owner, name, outer)

    def preempt(_: Any, victim: Request, for_request: Request, *__: Any) -> None:
        totals["preempt a group" if len(victim.sequences) > 1 else "preempt one"] += 1
        totals["preempt in flight"] += victim.num_pending > 0
        totals["preempt drafts in flight"] += any(s.num_unverified > 0 for s in victim.sequences)
        totals["preempt a window in flight"] += any(s.num_pending > 1 for s in victim.sequences)
        totals["preempt itself"] += victim is for_request

    wrap(preemption, "preempt", preempt)

    def shrink(cache: KVCacheManager, seq: Sequence, count: int) -> None:
        where = seq.request.status
        trims = cache.blocks_for(seq.num_computed - count) < len(seq.block_ids)
        totals[f"trim {where.value}"] += trims
        totals["trim with drafts in flight"] += trims and seq.num_unverified > 0

    wrap(KVCacheManager, "shrink", shrink)
    wrap(KVCacheManager, "pin", lambda *_: totals.update(["pin"]))

    def attach(cache: KVCacheManager, seq: Any, prefix: Any) -> None:
        tails = {s.block_ids[-1] for s in cache.pins.values() if s.num_computed % cache.block_size}
        totals["share a pin's tail"] += bool(prefix.block_ids) and prefix.block_ids[-1] in tails
        totals["share a pin"] += any(b in s.block_ids for s in cache.pins.values() for b in prefix.block_ids[:1])

    wrap(KVCacheManager, "attach", attach)
    wrap(PrefixIndex, "sibling_prefix", lambda *_: totals.update(["rebuild a sibling"]))
    wrap(KVCacheManager, "fork", lambda c, p, *_: totals.update(["fork " + p.request.status.value]))
    watch_windows(wrap, totals)
    try:
        yield
    finally:
        for owner, name, inner in whole:
            setattr(owner, name, inner)


def watch_windows(wrap: Callable[..., None], totals: Counter[str]) -> None:
    """Count what happens to the blocks of window groups."""

    def count(what: str, num: Any) -> None:
        totals["window: " + what] += bool(num)

    def evict(pool: BlockPool, block: int, _: str) -> None:
        key = pool.key_of(block)
        if key is not None and len(key[1]) > 1:
            below = [pool.find(group_key(pool.seal_id[block], group)) for group in range(pool.num_windows)]
            count("evicted with its full block", any(b and not pool.refs[b] for b in below))
            count("unsealed in use with its full block", any(b and pool.refs[b] for b in below))

    def attach(cache: KVCacheManager, seq: Sequence, prefix: Prefix) -> None:
        pinned = any(prefix.block_ids[:1] == s.block_ids[:1] for s in cache.pins.values())
        count("share a pin", pinned and any(any(table.block_ids) for table in prefix.windows))

    def drop(cache: KVCacheManager, seq: Sequence, _: StepPlan) -> Callable[[Any], None]:
        before = [table.num_dropped for table in seq.windows]
        unverified = seq.num_unverified
        return lambda _: count(
            "drop with drafts in flight", unverified and before != [t.num_dropped for t in seq.windows]
        )

    def unseal(cache: KVCacheManager, mark: int) -> Callable[[Any], None]:
        keys = map(cache.pool.key_of, cache.pool.sealed_after(mark))
        count("unsealed by a failed step", any(key is not None and len(key[1]) == 1 for key in keys))
        old = {s for s in cache.holders if all(seal <= mark for seal in s.seal_ids)}
        return lambda affected: count("a newer block under an older one", not old.isdisjoint(affected))

    def discard(index: PrefixIndex, seq: Sequence) -> None:
        run = index._find_sealed_prefix(seq, len(seq.token_ids) // index.block_size)
        others = set(seq.block_ids).isdisjoint
        keys = [
            (seal, g) for b, seal in zip(run.block_ids, run.seal_ids, strict=True) for g in range(len(index.windows))
        ]
        below = [index.pool.find(group_key(*key)) for key in keys]
        count("discarded", any(below))
        theirs = {
            seal for b, seal in zip(run.block_ids, run.seal_ids, strict=True) if others([b]) and index.pool.refs[b]
        }
        count("discarded under another's", any(b for b, (seal, _) in zip(below, keys, strict=True) if seal in theirs))

    def swap_out(_: Swapping, request: Request, __: StepPlan) -> Callable[[Any], None]:
        return lambda done: count(
            "swap out", done and any(any(t.block_ids) for s in request.sequences for t in s.windows)
        )

    def swap_in(_: Swapping, request: Request, *__: Any) -> None:
        count("swap in", any(any(t.block_ids) for s in request.sequences for t in s.windows))
        count(
            "swap in one that stayed on the device",
            any(min(t.block_ids, default=0) < 0 for s in request.sequences for t in s.windows),
        )

    wrap(BlockPool, "_evict", evict)
    wrap(BlockPool, "renew", lambda *_: count("renew", 1))
    wrap(PrefixIndex, "_trim_to_windows", lambda _, run: lambda got: count("trim a hit", got[2] < run[2]))
    wrap(PrefixIndex, "_has_windows_at", lambda *_: lambda has: count("a pin lacks it", not has))
    wrap(
        PrefixIndex, "sibling_prefix", lambda *_: lambda got: count("of a sibling", any(t.num_dropped for t in got[3]))
    )
    wrap(KVCacheManager, "attach", attach)
    wrap(KVCacheManager, "_copy_on_write", lambda _, __, group, *___: count("copy on write", group))
    wrap(KVCacheManager, "drop_out_of_window", drop)
    wrap(KVCacheManager, "unseal_after", unseal)
    wrap(PrefixIndex, "discard", discard)
    wrap(Swapping, "swap_out", swap_out)
    wrap(Swapping, "swap_in", swap_in)


def main(first: int, last: int, **options: bool) -> int:
    """options: of `run`"""
    totals: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    begin = time.time()
    with covering(totals):
        for seed in range(first, last):
            try:
                run(seed, totals, **options)
            except Exception as error:
                bad[f"{type(error).__name__} {str(error)[:60]}"] += 1
                if sum(bad.values()) <= 3:
                    print("seed", seed)
                    traceback.print_exc()
    for name, n in sorted(totals.items()):
        print(f"{n:>12,}  {name}")
    print(dict(bad) or "no failures", f"{time.time() - begin:.1f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    flags = {"speculates": "--drafts", "groups": "--groups", "states": "--states"}
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), **{name: flag in sys.argv for name, flag in flags.items()}))
