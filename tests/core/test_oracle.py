"""Random and directed workloads over the oracle; `make prove` runs a thousand times as many."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.core import events as ev
from octavo.core.plan import BlockCopy, StepPlan, TableWrite
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request
from tests.core.lab import ANY, RECOMPUTE, SWAP, Lab
from tests.proof import oracle as o
from tests.proof.workloads import KINDS, World, covering, run


def test_random_workloads() -> None:
    totals: Counter[str] = Counter()
    for seed in range(300):
        run(seed, totals)
    reached = [
        *("Admitted", "Preempted recompute", "Preempted swap", "SwappedIn", "SwapLost", "Recomputed", "Copied"),
        *("Waiting for blocks", "Waiting for rows", "Waiting for budget", "Waiting for in flight"),
        *("Waiting for prefix in flight", "Waiting for behind a swapped request", "Evicted"),
        *("abort waiting", "abort running", "abort running in flight", "abort swapped", "stop a sequence"),
        *("windows", "columns", "failed steps", "refused", "fed by the row"),
        *("Pinned", "Unpinned", "unpinned while others run", "out of memory", "steps grow again"),
        *("error running", "error waiting", "error swapped"),
    ]
    assert [what for what in reached if not totals[what]] == []
    assert totals["slots read"] > 190_000 and totals["steps"] > 5_000


@pytest.mark.parametrize("kind", KINDS)
def test_workloads_of_each_kind(kind: str) -> None:
    """Chat turns, swap-heavy, and a prefix common to all."""
    totals: Counter[str] = Counter()
    for seed in range(1_000, 1_030):
        run(seed, totals, kind=kind)
    assert totals["workloads"] == 30
    if kind == "swap":
        assert totals["blocks out"] > 50
    if kind in ("chat", "prefix"):
        assert totals["prefix hits"] > 100


@pytest.mark.parametrize("groups", [False, True])
def test_random_workloads_with_states(groups: bool) -> None:
    totals: Counter[str] = Counter()
    for seed in range(60):
        run(seed, totals, states=True, groups=groups)
    reached = [
        *(
            "sealed",
            "sealed by a result",
            "at the end of a slice",
            "a stop in the output",
            "evicted",
            "written in place",
        ),
        *("moved, sealed", "moved, shared", "found", "found at the last mark", "found with preemptions", "waited on"),
        *("swapped out", "swapped in", "groups that share one", "seal lost by a result"),
    ]
    assert [what for what in reached if not totals["state: " + what]] == []
    assert totals["checkpoints read"] > 1_000 and totals["states read"] > 1_000


@pytest.mark.parametrize("drafts", [False, True])
def test_random_workloads_with_window_groups(drafts: bool) -> None:
    totals: Counter[str] = Counter()
    with covering(totals):
        for seed in range(60):
            run(seed, totals, groups=True, speculates=drafts)
    reached = [
        *("trim a hit", "evicted with its full block", "unsealed in use with its full block", "renew"),
        *("copy on write", "of a sibling", "share a pin", "swap out", "swap in"),
        *("unsealed by a failed step", "discarded", "discarded under another's"),
        *(["drop with drafts in flight"] if drafts else []),
    ]
    assert [what for what in reached if not totals[f"window: {what}"]] == []
    assert totals["slots of windows read"] > 20_000


def test_a_seed_determines_the_workload() -> None:
    assert run(7) == run(7)


@pytest.mark.parametrize("first", [0, 120])
def test_random_workloads_with_corrupt_blocks(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 120):
        run(seed, totals, kind="swap")
    assert totals["corrupt blocks"] > 10 and totals["unaffected by a corrupt block"] > 5


# -- memory: a tenth of what all would need ----------------------------------------------------------------------------


def two_hundred() -> list[Request]:
    rnd = random.Random(11)
    system = [rnd.randrange(o.VOCAB) for _ in range(12)]
    requests = []
    for i in range(200):
        prompt = (system if i % 3 == 0 else []) + [rnd.randrange(o.VOCAB) for _ in range(rnd.randint(4, 40))]
        width = 3 if i % 20 == 7 else 1
        decide = o.keep_best(2) if i % 20 == 13 else None
        requests.append(
            Request(
                f"r{i}",
                prompt,
                ANY,
                max_tokens=rnd.randint(4, 40),
                stop_ids=[0] if i % 5 == 0 else [],
                width=2 if decide else width,
                num_samples=2 if decide else width,
                select_beams=decide,
            )
        )
    return requests


def serve(num_blocks: int, policy: Policy, *, watch: bool, host: int = 0) -> tuple[Lab, dict[str, list]]:
    lab = Lab(num_blocks, 4, host=host, rows=64, budget=128, window=4, policy=policy, listen=False)
    for request in two_hundred():
        lab.scheduler.add(request)  # raises if it is refused
        lab.requests[request.request_id] = request
    while lab.scheduler.has_work:
        if len(lab.flight) < 2:
            step = lab.scheduler.schedule()
            if step:
                lab.flight.append((step, lab.oracle.submit(step.plan)))
        if len(lab.flight) == 2 or not step:
            landed, running = lab.flight.popleft()
            lab.finished += [r.request_id for r in lab.scheduler.update(landed, running.result())]
        if watch:
            held = [s for r in lab.scheduler.running for s in r.sequences if s.block_ids]
            stats = lab.cache.stats()
            assert all(s.room - s.num_computed < 4 for s in held)
            assert stats.num_unfilled_slots <= 3 * len(held)
            assert stats.num_used <= stats.num_blocks
    o.check(lab.scheduler)
    return lab, {name: o.outputs(r) for name, r in lab.requests.items()}


@pytest.mark.parametrize("policy", [SWAP, RECOMPUTE, Policy(), Policy(by_priority=True)])
def test_a_tenth_of_the_memory_serves_all_requests(policy: Policy) -> None:
    """A pool for a tenth of 200 requests: none is refused, and all outputs equal those of an unlimited run."""
    lab = Lab(10_000, 4)
    all_at_once = sum(
        lab.cache.blocks_at_max_length(len(r.prompt_token_ids), r.max_tokens or 0, r.width) for r in two_hundred()
    )
    _, unlimited = serve(all_at_once, policy, watch=False)
    lab, outputs = serve(all_at_once // 10, policy, watch=True, host=all_at_once // 10)
    assert outputs == unlimited == {r.request_id: o.reference(r) for r in lab.requests.values()}
    assert len(lab.finished) == 200 == len(set(lab.finished))
    assert lab.scheduler.num_preemptions > 20
    stats = lab.scheduler.stats()
    assert stats.num_used == 0 and stats.num_host_used == 0


# -- the oracle itself: what it must notice ----------------------------------------------------------------------------


def decoding() -> tuple[Lab, StepPlan]:
    """A sequence of five tokens in three blocks, and the plan of its next step, not yet submitted."""
    lab = Lab(8)
    lab.add("A", [1, 2, 3, 4, 0], 8)
    lab.step()
    return lab, lab.scheduler.schedule().plan


def test_the_oracle_notices_a_changed_slot() -> None:
    lab, plan = decoding()
    lab.oracle.kv[1][0] = 12345
    with pytest.raises(o.ReadBack, match="'position', 0, 'of', 6"):
        lab.oracle.submit(plan)


def test_the_oracle_notices_a_wrong_table() -> None:
    lab, plan = decoding()
    plan.table_writes.append(TableWrite(0, 0, (2, 1)))
    with pytest.raises(o.ReadBack):
        lab.oracle.submit(plan)


def test_the_oracle_notices_a_hole_in_a_table_and_blocks_that_do_not_exist() -> None:
    for write, kind in ((TableWrite(0, 5, (4,)), o.ReadBack), (TableWrite(0, 0, (9,)), o.Invariant)):
        lab, plan = decoding()
        plan.table_writes.append(write)
        with pytest.raises(kind):
            lab.oracle.submit(plan)


def test_the_oracle_notices_an_extra_copy() -> None:
    lab, plan = decoding()
    plan.copies.append(BlockCopy(2, 1))
    with pytest.raises(o.ReadBack):
        lab.oracle.submit(plan)
    lab, plan = decoding()
    plan.copies += [BlockCopy(5, 6), BlockCopy(6, 7)]
    with pytest.raises(o.Invariant, match="depend"):
        lab.oracle.submit(plan)


def test_the_oracle_notices_a_repeated_row() -> None:
    lab, plan = decoding()
    for mine in (plan.rows, plan.starts, plan.counts, plan.num_sampled, lab.scheduler.in_flight[-1].sequences):
        mine += mine
    with pytest.raises(o.Invariant, match="a row twice"):
        lab.oracle.submit(plan)


def test_the_structure_check_notices_a_leak() -> None:
    lab, _ = decoding()
    o.check(lab.scheduler)
    lab.pool.allocate()
    with pytest.raises(o.Invariant, match="references"):
        o.check(lab.scheduler)


def test_the_oracle_reads_every_slot_of_every_slice() -> None:
    lab = Lab(20)
    lab.add("A", [1, 2, 3], 4)
    lab.add("B", [4, 5], 3)
    read = []
    while lab.scheduler.has_work:
        before = lab.oracle.counts["slots read"]
        lab.step()
        read.append(lab.oracle.counts["slots read"] - before)
    assert read == [3 + 2, 4 + 3, 5 + 4, 6]


def test_the_reference_needs_no_memory() -> None:
    lab = Lab(20, policy=Policy(mode=PreemptionMode.SWAP), host=4)
    request = lab.add("A", [1, 2, 3], 6, beam=3)
    want = o.reference(request)
    lab.run()
    assert o.outputs(request) == want and len(want) >= 1
    assert lab.emitted(ev.Finished)


def test_the_oracle_notices_tokens_computed_from_a_corrupt_block() -> None:
    """The oracle's device does not report the corruption here: wrong tokens are noticed all the same."""
    noticed = 0
    for seed in range(60):
        world = World(seed, Counter(), kind="swap")
        world.habits.corrupts = 0.5
        world.oracle.checksums = Silent()
        try:
            world.run()
        except o.WrongOutput:
            noticed += 1
    assert noticed > 5


class Silent(dict):
    """Checksums that are equal to anything."""

    def __getitem__(self, block: int) -> object:
        return Equal()


class Equal:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]
