"""Speculation in the scheduler and the KV cache: upper bounds, rejected drafts, and the blocks that they give back.

What a step returns is given by hand here; tests/core/test_oracle.py runs whole workloads with drafts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import Drafts, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Status
from octavo.core.scheduler import Scheduler
from tests.core.lab import make, preempt
from tests.proof import oracle as o
from tests.proof.workloads import World, covering, run

TOKEN = 7
"""What the device samples, always."""


class Bench:
    """A scheduler whose results a test makes: it chooses how many tokens each slice returns."""

    def __init__(self, num_blocks: int = 20, size: int = 4, *, host: int = 0, k: int = 3, **options: Any) -> None:
        of_cache = {name: options.pop(name) for name in ("attention_window", "windows", "max_chunk") if name in options}
        self.cache = KVCacheManager(num_blocks, size, host, num_rows=4, **of_cache)
        self.scheduler = Scheduler(self.cache, num_speculative_tokens=k, **options)

    def add(self, name: str, prompt: list[int], max_tokens: int, k: int = 3, **options: Any) -> Request:
        request = make(name, prompt, max_tokens, num_draft_tokens=k, **options)
        self.scheduler.add(request)
        return request

    def plan(self) -> InFlightStep:
        step = self.scheduler.schedule()
        o.check(self.scheduler)
        return step

    def land(self, step: InFlightStep, *nums: int) -> list[Request]:
        """Commit the whole result: `nums` tokens per slice."""
        finished = self.scheduler.update(step, StepResult([[TOKEN] * num for num in nums]))
        o.check(self.scheduler)
        return finished

    def part(self, step: InFlightStep, *nums: int) -> None:
        self.scheduler.update(step, StepResult([[TOKEN] * num for num in nums]), last=False)
        o.check(self.scheduler)


def numbers(request: Request) -> tuple[int, int, int, int]:
    """(tokens known, positions computed at most, tokens pending at most, of both how many unverified)."""
    (seq,) = request.sequences
    return len(seq.token_ids), seq.num_computed, seq.num_pending, seq.num_unverified


def test_drafts_make_a_slice_an_upper_bound() -> None:
    bench = Bench()
    request = bench.add("A", [0] * 6, 20)
    plan = bench.plan().plan
    assert plan.drafts == {0: Drafts(num_passes=1, num_draft_tokens=3)}  # the pass that ends the prompt has drafts
    assert (plan.counts.tolist(), plan.num_sampled.tolist()) == ([6 + 3], [1 + 3])
    assert plan.num_passes(0) == 1 and plan.num_unverified(0) == 3
    assert next(plan.slices()).drafts == Drafts(1, 3)
    assert numbers(request) == (6, 9, 4, 3) and len(request.sequences[0].block_ids) == 3


def test_a_row_setup_has_the_salt_of_a_request_that_drafts() -> None:
    bench = Bench()
    bench.add("A", [0] * 6, 20, salt=b"mine")
    bench.add("B", [0] * 6, 20, k=0, salt=b"yours")
    assert [setup.salt for setup in bench.plan().plan.row_setups] == [b"mine", b""]


def test_the_next_step_starts_at_the_bound_and_a_result_lowers_it() -> None:
    bench = Bench()
    request = bench.add("A", [0] * 6, 20)
    first, second = bench.plan(), bench.plan()
    assert second.plan.starts.tolist() == [9] and not second.plan.host_tokens
    assert numbers(request) == (6, 13, 8, 6) and len(request.sequences[0].block_ids) == 4
    bench.land(first, 1)
    assert numbers(request) == (7, 10, 4, 3) and len(request.sequences[0].block_ids) == 3  # what the second may write
    bench.land(second, 2)
    assert numbers(request) == (9, 8, 0, 0) and len(request.sequences[0].block_ids) == 2  # exact


def test_all_drafts_accepted_trims_nothing() -> None:
    bench = Bench()
    request = bench.add("A", [0] * 6, 20)
    bench.land(bench.plan(), 4)
    assert numbers(request) == (10, 9, 0, 0) and len(request.sequences[0].block_ids) == 3


def test_trimmed_blocks_are_free_again_and_can_be_grown_into() -> None:
    bench = Bench(num_blocks=5, size=2, k=8)
    request = bench.add("A", [0, 1], 8, k=8)
    step = bench.plan()
    assert step.plan.num_sampled.tolist() == [4] and bench.cache.pool.num_available == 2
    bench.land(step, 1)
    assert bench.cache.pool.num_available == 4 and request.sequences[0].room == 2
    step = bench.plan()
    assert step.plan.table_writes and step.plan.starts.tolist() == [2]
    bench.land(step, 1)
    assert numbers(request)[:2] == (4, 3)


def test_a_swapped_request_is_trimmed_on_the_host() -> None:
    bench = Bench(num_blocks=8, size=2, host=8, k=8, policy=Policy(mode=PreemptionMode.SWAP))
    request = bench.add("A", [1, 2], 12, k=8)
    bench.land(bench.plan(), 1)
    step, last = bench.plan(), bench.plan()
    preempt(bench.scheduler, request)
    held = bench.cache.swap_space.num_used
    assert request.status is Status.SWAPPED and held >= 4 and bench.cache.pool.num_used == 0
    bench.land(step, 1)
    assert bench.cache.swap_space.num_used == bench.cache.blocks_for(request.sequences[0].num_computed) < held
    assert not bench.plan()  # nothing swaps in while tokens are pending
    bench.land(last, 1)
    assert bench.plan().swapped_requests == [request] and numbers(request)[3] >= 0


def test_a_late_result_of_a_recomputed_request_trims_nothing() -> None:
    bench = Bench(num_blocks=8, size=2, k=8, policy=Policy(mode=PreemptionMode.RECOMPUTE))
    request = bench.add("A", [1, 2], 12, k=8)
    step = bench.plan()
    preempt(bench.scheduler, request)
    bench.land(step, 2)
    assert request.status is Status.WAITING and numbers(request) == (4, 0, 0, 0)


def test_nothing_is_sealed_beyond_what_is_known() -> None:
    bench = Bench()
    request = bench.add("A", [0] * 7, 20)
    step = bench.plan()
    bench.plan()
    assert len(request.sequences[0].seal_ids) == 1
    bench.land(step, 4)
    assert len(request.sequences[0].token_ids) == 11 and len(request.sequences[0].seal_ids) == 2


def test_a_part_with_drafts_seals_nothing() -> None:
    """A part may bring every token of a slice, and its last token's position is not computed yet."""
    bench = Bench(num_blocks=60, size=1, decode_window=2)
    request = bench.add("A", [1, 2, 3], 30)
    for _ in range(2):
        bench.land(bench.plan(), 1)
    step = bench.plan()
    assert step.plan.drafts == {0: Drafts(2, 3)} and step.plan.num_sampled.tolist() == [8]
    (seq,) = request.sequences
    num_sealed = len(seq.seal_ids)
    bench.part(step, 2)
    assert len(seq.seal_ids) == num_sealed and seq.num_unverified == 6
    bench.land(step, 1)
    assert seq.num_computed == len(seq.token_ids) - 1 == len(seq.seal_ids)


def test_a_last_part_without_tokens_rejects_the_other_drafts() -> None:
    bench = Bench(decode_window=2)
    request = bench.add("A", [1, 2, 3], 30)
    bench.land(bench.plan(), 1)
    step = bench.plan()
    bench.part(step, 5)
    bench.land(step, 0)
    assert numbers(request) == (9, 8, 0, 0)


def test_the_attention_window_drops_blocks_by_the_lower_bound() -> None:
    bench = Bench(num_blocks=40, size=1, k=8, attention_window=2)
    request = bench.add("A", [1, 2, 3, 4], 30, k=8)
    first, second = bench.plan(), bench.plan()
    (seq,) = request.sequences
    assert seq.num_computed == 4 + 8 + 9 and seq.num_dropped <= 4 + 1 - 2
    bench.land(first, 1)
    bench.land(second, 1)
    assert numbers(request) == (6, 5, 0, 0)


def test_window_groups_drop_blocks_by_the_lower_bound() -> None:
    bench = Bench(num_blocks=90, size=1, k=8, windows=(2,))
    request = bench.add("A", [1, 2, 3, 4], 30, k=8)
    first, second = bench.plan(), bench.plan()
    (seq,) = request.sequences
    assert seq.num_computed == 4 + 8 + 9 and seq.windows[0].num_dropped == 4 + 1 - 2
    bench.land(first, 1)
    bench.land(second, 1)
    assert numbers(request) == (6, 5, 0, 0) and [len(ids) for ids, _ in seq.tables] == [5, 5]


def test_drafts_take_at_most_max_chunk_positions_with_what_they_follow() -> None:
    bench = Bench(num_blocks=60, size=2, k=8, windows=(3,), max_chunk=5)
    bench.add("A", [0] * 7, 30, k=8)
    assert bench.plan().plan.counts.tolist() == [5]  # a chunk of the prompt
    step = bench.plan()
    assert (step.plan.counts.tolist(), step.plan.num_sampled.tolist()) == ([5], [4])


@pytest.mark.parametrize(
    ("num_blocks", "count", "num_left"), [(12, 4, 0), (13, 4, 1), (14, 6, 0), (15, 6, 1), (17, 7, 1)]
)
def test_drafts_take_the_blocks_that_are_left_in_all_groups(num_blocks: int, count: int, num_left: int) -> None:
    """B takes 2 x 4 blocks of 2 and A's prompt 2 x 2. A block more takes another one of the window group."""
    bench = Bench(num_blocks=num_blocks, size=2, k=8, windows=(3,), max_chunk=9)
    bench.add("B", [1] * 7, 1, k=0)
    bench.add("A", [0] * 3, 9, k=8)
    assert bench.plan().plan.counts.tolist() == [7, count] and bench.cache.pool.num_available == num_left


def test_drafts_of_one_request_leave_others_none_of_their_blocks() -> None:
    """Of 12 blocks of 2, the prompts take 2 x 4 and A's drafts the rest. B has a slot for one."""
    bench = Bench(num_blocks=12, size=2, k=8, windows=(3,), max_chunk=9)
    bench.add("A", [0] * 3, 9, k=8)
    bench.add("B", [1] * 3, 9, k=8)
    assert bench.plan().plan.counts.tolist() == [3 + 4, 3 + 1] and bench.cache.pool.num_available == 0


def test_blocks_of_all_groups_that_drafts_may_return_are_awaited_without_a_preemption() -> None:
    bench = Bench(num_blocks=13, size=2, k=8, windows=(1,), max_chunk=6)
    a, b = bench.add("A", [1, 2], 12, k=8), bench.add("B", [3, 4], 4, k=0)
    first, second = bench.plan(), bench.plan()
    assert second.plan.counts.tolist() == [4, 1] and bench.cache.pool.num_available == 1
    assert not bench.plan() and not bench.scheduler.num_preemptions
    bench.land(first, 1, 1)
    assert bench.plan().sequences == a.sequences + b.sequences and not bench.scheduler.num_preemptions


@pytest.mark.parametrize(("num_blocks", "prompts", "budget"), [(14, (3, 9), 256), (17, (2, 20), 16)])
def test_blocks_that_leave_a_window_with_the_drafts_are_awaited_without_a_preemption(
    num_blocks: int, prompts: tuple[int, int], budget: int
) -> None:
    """A's drafts in flight free what B needs: rejected, their own blocks in both groups; accepted, those that the
    window leaves. In the second case B needs the most that both can be."""
    bench = Bench(num_blocks=num_blocks, size=2, k=8, windows=(1,), max_chunk=9, max_num_batched_tokens=budget)
    bench.add("A", [0] * prompts[0], 12, k=8)
    b = bench.add("B", [1] * prompts[1], 4, k=0)
    for _ in range(5):
        bench.plan()
    assert b.status is Status.RUNNING and not bench.scheduler.num_preemptions


def test_drafts_take_only_the_budget_that_is_left() -> None:
    bench = Bench(num_blocks=3, size=2, k=4, max_num_batched_tokens=4)
    a, b = bench.add("A", [1], 5, k=4), bench.add("B", [2], 3, k=0)
    step = bench.plan()
    assert step.sequences == a.sequences + b.sequences and step.plan.num_sampled.tolist() == [3, 1]
    bench.land(step, 1, 1)
    assert bench.plan().plan.num_sampled[1] == 1 and not bench.scheduler.num_preemptions


def test_blocks_that_drafts_may_return_are_awaited_without_a_preemption() -> None:
    bench = Bench(num_blocks=4, size=2, k=8)
    a, b = bench.add("A", [1, 2], 7, k=8), bench.add("B", [3, 4], 4, k=0)
    step = bench.plan()
    assert step.plan.num_sampled.tolist() == [4, 1] and bench.cache.pool.num_available == 0
    bench.plan()
    assert b.status is Status.RUNNING and not bench.scheduler.num_preemptions
    bench.land(step, 1, 1)
    assert bench.plan().sequences == a.sequences + b.sequences and not bench.scheduler.num_preemptions


def test_drafts_take_no_new_blocks_while_a_request_waits_for_blocks() -> None:
    bench = Bench(num_blocks=8, size=2, k=4)
    bench.add("A", [1, 2], 14, k=4)
    bench.land(bench.plan(), 1)
    step = bench.plan()
    b = bench.add("B", [3] * 9, 2, k=0)
    assert bench.plan() and b.status is Status.WAITING and b.wait_reason == "blocks"
    bench.land(step, 1)
    bench.plan()
    assert b.status is Status.RUNNING


def test_drafts_take_no_new_blocks_in_a_step_that_preempts() -> None:
    bench = Bench(num_blocks=6, size=2, k=4, policy=Policy(mode=PreemptionMode.RECOMPUTE))
    a, b = bench.add("A", [1, 2, 3], 10, k=4), bench.add("B", [4] * 7, 4, k=0)
    while not bench.scheduler.num_preemptions:
        step = bench.plan()
        if not bench.scheduler.num_preemptions:
            bench.land(step, *[1] * len(step.sequences))
    assert b.status is Status.WAITING and bench.cache.pool.num_available == 3
    assert step.plan.counts.tolist() == [2] and len(a.sequences[0].block_ids) == 3  # a draft in the block it has


def test_drafts_leave_half_of_the_length_to_the_next_step() -> None:
    bench = Bench(k=8)
    request = bench.add("A", [0] * 3, 9, k=8)
    for _ in range(3):  # three in flight without a result
        assert bench.plan().sequences == request.sequences


def test_a_result_with_drafts_is_cut_at_the_first_stop_token() -> None:
    bench = Bench(k=8)
    request = bench.add("A", [0] * 3, 5, k=8, stop_ids=(9,))
    step = bench.plan()
    assert step.plan.num_sampled.tolist() == [3] and step.plan.counts.tolist() == [5]
    assert bench.scheduler.update(step, StepResult([[TOKEN, 9, TOKEN]])) == [request]
    assert request.finished_sequences[0].token_ids.tolist()[3:] == [TOKEN, 9] and bench.cache.pool.num_used == 0


@pytest.mark.parametrize("options", [{"width": 2}, {"beam": 2}, {"k": 0}], ids=str)
def test_no_drafts_where_the_host_chooses_or_declines(options: dict[str, Any]) -> None:
    bench = Bench()
    bench.add("A", [0] * 3, 9, **options)
    assert not bench.plan().plan.drafts


def test_a_request_with_a_grammar_speculates_and_each_pass_waits_for_bitmasks() -> None:
    bench = Bench(k=8, decode_window=3)
    bench.add("A", [0] * 3, 40, k=8, use_structured_output=True)
    bench.land(bench.plan(), 1)
    plan = bench.plan().plan
    assert plan.drafts[0].num_passes == plan.num_bitmask_columns == 3 < plan.num_sampled[0]


def test_all_samples_speculate_after_the_fork() -> None:
    bench = Bench()
    bench.add("A", [0] * 3, 9, width=2)
    bench.land(bench.plan(), 2)
    assert set(bench.plan().plan.drafts) == {0, 1}


def test_the_scheduler_limits_what_a_request_asks_for() -> None:
    for k, num_draft_tokens, num in ((0, 5, 0), (2, 5, 2), (5, 2, 2)):
        bench = Bench(k=k)
        bench.add("A", [0] * 3, 30, k=num_draft_tokens)
        plan = bench.plan().plan
        assert plan.num_unverified(0) == num and (0 in plan.drafts) == (num > 0)


def test_a_failed_step_takes_its_drafts_back() -> None:
    bench = Bench()
    request = bench.add("A", [0] * 6, 20)
    step = bench.plan()
    bench.plan()
    assert bench.scheduler.fail(step) == [request] and numbers(request) == (6, 0, 0, 0)
    o.check(bench.scheduler)
    bench.land(bench.plan(), 4)
    assert numbers(request) == (10, 9, 0, 0)


# -- whole workloads ---------------------------------------------------------------------------------------------------


def test_random_workloads_with_drafts() -> None:
    totals: Counter[str] = Counter()
    with covering(totals):
        for seed in range(400):
            run(seed, totals, speculates=True)
    reached = (
        "accepted", "preempt drafts in flight", "starts unknown to the host", "stops inside accepted drafts",
        "trim running", "trim swapped", "trim with drafts in flight",
    )  # fmt: skip
    assert [what for what in reached if not totals[what]] == []
    assert totals["drafted"] > 5_000 and totals["slices with drafts"] > 3_000


def test_a_small_pool_with_drafts_serves_as_without() -> None:
    """Preempting and swapping workloads: the same outputs with drafts that are always right, or always wrong."""
    for drafts in ("right", "wrong"):
        totals: Counter[str] = Counter()
        for seed in range(40):
            world = World(seed, totals, kind="swap", speculates=True)
            world.habits.drafts = drafts
            world.run()
        assert totals["slices with drafts"] > 200


def test_the_oracle_notices_a_write_into_a_block_not_held() -> None:
    bench = Bench(num_blocks=8, size=2)
    oracle = o.Oracle(bench.scheduler)
    bench.add("A", [0, 1], 12)
    step = bench.plan()
    oracle.submit(step.plan)
    plan = o.Received.of(step)
    oracle._held[id(plan)] = [[[]]]
    with pytest.raises(o.Invariant, match="another's block"):
        oracle._write(plan, 0, 0, 1, {})
