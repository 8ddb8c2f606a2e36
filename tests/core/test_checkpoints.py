"""States of recurrent layers: where checkpoints are left, what they cost, and which go first.

The tests of `Lab` also read every state back; see `tests.proof.oracle`.
"""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import pytest

from octavo.core import events as ev
from octavo.core.block_pool import BlockPool
from octavo.core.cache.checkpoints import Checkpoints
from octavo.core.cache.prefix_index import Prefix
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.policy import Policy
from octavo.core.request import Sequence
from octavo.core.types import NEVER
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, Lab, Worlds, answer, fork, sequence, settle
from tests.proof import oracle as o


def cache_of(num_blocks: int = 30, *, state_blocks: int = 2, interval: int = 4, **options: Any) -> KVCacheManager:
    return KVCacheManager(num_blocks, 2, state_blocks=state_blocks, checkpoint_interval=interval, **options)


def prompt(num: int, first: int = 0) -> list[int]:
    return [(first + i) % o.VOCAB for i in range(num)]


def ends(lab: Lab) -> dict[int, int]:
    """The position of each checkpoint, by its head."""
    keys = {ids[-1]: lab.pool.key_of(ids[-1]) for ids in o.chains(lab.cache)}
    return {head: lab.oracle._ends[key[0]] for head, key in keys.items() if key}  # type: ignore[index]


def heads(cache: KVCacheManager) -> list[int]:
    """The heads of cached checkpoints in order of eviction."""
    found = {ids[-1] for ids in o.chains(cache)}
    return [block for block in cache.pool.cached() if block in found]


# -- capacity and room -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(), (3,)])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_longest_output_leaves_room_for_each_state(windows: tuple[int, ...], width: int) -> None:
    cache = cache_of(state_blocks=3, windows=windows, max_chunk=4 if windows else 0)
    plain = KVCacheManager(30, 2, windows=windows, max_chunk=4 if windows else 0)
    drops = width == 1
    for num in range(1, 12):
        most = cache.max_output_tokens(num, width, drops=drops)
        needs = [cache.blocks_at_max_length(num, most + more, width, drops=drops) for more in (0, 1)]
        assert needs[0] <= 30 < needs[1]
        assert needs[0] == plain.blocks_at_max_length(num, most, width, drops=drops) + 3 * (width + width // 2)


def test_running_prompts_are_left_the_blocks_that_they_lack() -> None:
    cache = cache_of()
    seq = sequence(prompt(7))
    cache.attach(seq, cache.prefixes.lookup(seq))
    assert cache.blocks_due([seq.request]) == 4 + 2
    begun = settle(cache, prompt(7, 1), 2)
    assert cache.blocks_due([begun.request]) == 3


def test_the_need_of_states() -> None:
    """Each that shares a state takes a new one, for the others read the old one. Who is alone takes none."""
    cache, plan = cache_of(), StepPlan()
    new = sequence(prompt(3))
    cache.attach(new, cache.prefixes.lookup(new))
    assert cache.blocks_needed([(new, 3)]) == 2 + 2
    first = settle(cache, prompt(5), 4)
    group = [first, fork(cache, first), fork(cache, first)]
    assert cache.blocks_needed((seq, 1) for seq in group) == 3 * 1 + 3 * 2
    cache.grow(group[0], 1, plan)
    assert cache.blocks_needed((seq, 1) for seq in group[1:]) == 2 * 1 + 2 * 2
    cache.grow(group[1], 1, plan)
    assert cache.blocks_needed([(group[2], 1)]) == 1 + 2
    cache.grow(group[2], 1, plan)
    cache.settle(plan)
    assert len(set(chain.from_iterable(seq.state for seq in group))) == 3 * 2
    assert not plan.copies and len(heads(cache)) == 1, "the checkpoint stays"
    for seq in group[:2]:
        cache.free(seq)
    group[2].num_computed += 1
    assert cache.blocks_needed([(group[2], 1)]) == 0


def test_admission_takes_a_state() -> None:
    """A new one, also beside one in use, or one that leaves the line of cached blocks."""
    cache, again = cache_of(state_blocks=3), sequence(prompt(7))
    assert cache.blocks_to_admit(again, cache.prefixes.lookup(again)) == 4 + 3
    first = settle(cache, prompt(7))
    found = cache.prefixes.lookup(again)
    assert found.num_positions == 6 and cache.blocks_to_admit(again, found) == 1 + 3
    cache.free(first)
    assert cache.blocks_to_admit(again, found) == 3 + 1 + 3


def test_a_pin_keeps_its_state_for_prompts_with_all_of_it(world: Worlds) -> None:
    lab = world(60, 4, state_blocks=2, interval=4, caching=False)
    lab.add("P", prompt(6), 1, pin=True)
    assert lab.cache.num_pinned == 2 + 2
    lab.step()
    assert lab.cache.stats().num_pinned == 2 + 2
    for num, start in ((6, 0), (5, 0), (7, 6)):
        request = lab.add(f"first {num}", [*prompt(num), 9, 9][: max(num, 6)], 1)
        assert lab.step().starts == [start] and max(0, request.num_cached_tokens) == start
    assert lab.scheduler.unpin("P") == 2 + 2 and not lab.cache.num_pinned


def test_a_state_on_the_host_is_counted_by_the_hosts_references() -> None:
    cache, plan = cache_of(num_host_blocks=10), StepPlan()
    for _ in range(8):
        cache.pool.allocate()  # so that no block has the same number there
    first = settle(cache, prompt(5), 5)
    group = [first, fork(cache, first)]
    assert cache.swapping.count_private_blocks(first.request) == (3 + 2, 5)
    assert cache.swapping.swap_out(first.request, plan)
    assert len(plan.swap_outs) == 3 + 2 and group[0].state == group[1].state
    assert cache.blocks_needed(((seq, 1) for seq in group), swapped=True) == 1 + 2 * 2
    found = cache.swapping.find_swap_in_blocks(first.request)
    assert found is not None and found.num_needed == 3 + 2
    assert [*cache.swap_space.refs].count(2) == 3 + 2


# -- nobody writes what another reads ----------------------------------------------------------------------------------


def test_a_checkpoint_is_kept_while_there_is_room(world: Worlds) -> None:
    """A prompt of 4 blocks, its state, and the one after it: without room for that the state is written in place."""
    for num_blocks in (8, 7):
        lab = world(num_blocks, state_blocks=2, interval=8)
        lab.add("A", prompt(7), 2)
        assert lab.step().counts == [6] and not heads(lab.cache)
        assert o.chains(lab.cache) == [[4, 5]]
        assert len(lab.emitted(ev.Sealed)) == lab.cache.stats().num_sealed == 3 + 2
        plan = lab.plan()
        assert not plan.copies and not lab.cache.stats().num_copied
        moved = [write for write in plan.table_writes if write.line % 3 == 1]
        assert [write.block_ids for write in moved] == ([(7, 8)] if num_blocks == 8 else [])
        assert heads(lab.cache) == ([5] if num_blocks == 8 else [])
        assert [e.why for e in lab.emitted(ev.Evicted)] == ([] if num_blocks == 8 else ["written"] * 2)
        assert lab.cache.stats().num_evicted == (0 if num_blocks == 8 else 2)
        lab.land()
        lab.run()


def test_who_shares_a_state_reads_it_and_writes_a_new_one(world: Worlds) -> None:
    """Three samples: the first has a row, whose read line is right. The others get rows, which read where it wrote."""
    lab = world(40, state_blocks=2, interval=4, caching=False)
    request = lab.add("A", prompt(5), 3, width=3)
    lab.step()
    old = tuple(request.sequences[0].state)
    plan = lab.plan()
    of_state = [(w.line // 3, w.line % 3, w.block_ids) for w in plan.table_writes if w.line % 3]
    new = [(seq.row, 1, tuple(seq.state)) for seq in request.sequences]
    assert sorted(of_state) == sorted([*new, *((row, 2, old) for row, _, _ in new[1:])])
    assert len(plan.copies) == 2 == lab.cache.num_copied, "of the tail"
    assert not any(lab.pool.refs[block] for block in old)
    lab.land()
    plan = lab.step()
    assert not [w for w in plan.table_writes if w.line % 3], "each is alone"
    lab.run()
    assert lab.oracle.counts["states moved"] == 3


def test_a_state_that_is_read_is_not_given_to_another_in_the_same_plan() -> None:
    cache, plan = cache_of(9), StepPlan()
    first = settle(cache, prompt(3), 2)
    group = [first, fork(cache, first)]
    old = first.state
    for seq in group:
        cache.grow(seq, 1, plan)
    assert cache.pool.num_available == 9 - 1 - 2 - 3 * 2
    assert set(old).isdisjoint([*group[0].state, *group[1].state])
    cache.settle(plan)
    assert cache.pool.num_available == 9 - 1 - 2 - 2 * 2


def test_who_begins_with_a_checkpoint_that_another_was_to_write() -> None:
    """A might write its checkpoint in place. B begins with it in the same plan, so A writes a new state, too."""
    for num_blocks in (11, 10):
        cache, plan = cache_of(num_blocks + 5, interval=2), StepPlan()
        unrelated = settle(cache, prompt(7, 1))
        a = settle(cache, prompt(7))
        state = a.state
        cache.grow(a, 1, plan)
        b = sequence(prompt(7))
        found = cache.prefixes.lookup(b)
        needs = cache.blocks_to_admit(b, found)
        assert found.state == state and needs == 1 + 2 * 2 and cache.state_blocks_to_admit(found) == 2 * 2
        assert cache.state_blocks_to_admit(found._replace(state=unrelated.state)) == 2
        if num_blocks == 10:
            assert needs > cache.pool.num_available
            cache.settle(plan)
            assert a.state != state, "while there is room for one"
            continue
        assert needs == cache.pool.num_available
        cache.attach(b, found)
        cache.grow(b, 1, plan)
        assert len({*state, *a.state, *b.state}) == 3 * 2 and cache.reads == {a: state, b: state}
        cache.settle(plan)
        assert heads(cache) == [state[-1]] and not cache.reads


def test_who_waits_names_the_blocks_of_both_states(world: Worlds) -> None:
    lab = world(10, state_blocks=2, interval=8)
    lab.add("A", prompt(7), 2)
    lab.step()
    lab.add("B", prompt(7), 2)
    lab.plan()
    waits = [(e.needs, e.in_states) for e in lab.emitted(ev.Waiting)]  # type: ignore[attr-defined]
    assert waits == [(1 + 2 * 2, 2 * 2)]
    lab.land()
    lab.run()


def test_a_checkpoint_displaces_no_request(world: Worlds) -> None:
    lab = world(14, state_blocks=2, interval=8)
    lab.add("A", prompt(7), 2)
    lab.add("B", prompt(7, 1), 2)
    lab.run()
    assert not lab.emitted(ev.Preempted)


@pytest.mark.parametrize("beam", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_an_accepted_request_with_states_never_stalls(beam: bool, caching: bool) -> None:
    """In a pool of just the blocks that it may need."""
    for first, num, width, tokens in product(range(o.VOCAB), (4, 5), (1, 2, 4), (3, 4, 8)):
        num_blocks = KVCacheManager(99, 4, state_blocks=3).blocks_at_max_length(num, tokens, width)
        lab = Lab(num_blocks, 4, state_blocks=3, caching=caching, listen=False)
        lab.add("A", prompt(num, first), tokens, **({"beam": width} if beam else {"width": width}))
        lab.run()
        assert not lab.scheduler.num_preemptions


def test_a_checkpoint_that_is_evicted_while_it_is_planned_is_written_in_place() -> None:
    """B's full block, under which A's checkpoint hangs, has no user: a block that the plan takes may be that one."""
    cache, plan = cache_of(interval=2), StepPlan()
    b = settle(cache, prompt(7), marks=(2,))
    a = settle(cache, prompt(7))
    full, state = b.block_ids[-1], a.state
    cache.free(b)
    cache.grow(a, 1, plan)
    cache.pool.unseal(full, "room")
    cache.settle(plan)
    assert not plan.copies and a.state == state and not any(cache.pool.seal_id[block] for block in state)


def test_who_begins_with_a_state_knows_its_seals() -> None:
    """The full blocks are B's, and older. A state that turns out to be corrupt is recomputed with all that began with
    it; if the step fails that sealed it, so is its maker, and who began with it and has no slice in that step."""
    cache = cache_of(interval=2)
    b = settle(cache, prompt(7), marks=(2,))
    mark = cache.pool.last_seal_id
    a = settle(cache, prompt(7))
    c = sequence(prompt(8))
    cache.attach(c, cache.prefixes.lookup(c))
    assert max(cache.pool.seal_id[block] for block in c.block_ids) <= mark and c.state == a.state
    assert c.request.newest_prefix_seal == max(cache.pool.seal_id[block] for block in c.state) == mark + 2
    assert cache.unseal_after(mark) == [a, c] and not cache.pool.find_state(b.seal_ids[-1])


def test_a_sequence_that_begins_anew_has_left_no_checkpoint() -> None:
    """It computes its prompt again without a look into the cache: what it left there is not before its first one."""
    cache = cache_of(interval=2)
    seq = settle(cache, prompt(7), sampling_params=SamplingParams(max_tokens=None, skip_reading_prefix_cache=True))
    assert seq.checkpoint == (6, seq.state[-1], cache.pool.seal_id[seq.state[-1]])
    cache.free(seq)
    cache.attach(seq, cache.prefixes.lookup(seq))
    assert seq.checkpoint == (0, 0, 0)


# -- finding -----------------------------------------------------------------------------------------------------------


def test_the_same_prompt_begins_at_its_last_mark(world: Worlds) -> None:
    lab = world(30, state_blocks=2, interval=4)
    lab.add("A", prompt(7), 4)
    lab.run()
    again = lab.add("B", prompt(7), 4)
    assert lab.step().starts == [6] and again.num_cached_tokens == 6
    lab.run()


def test_a_request_begins_at_the_last_checkpoint_before_it_parts(world: Worlds) -> None:
    lab = world(40, state_blocks=2, interval=4)
    lab.add("A", prompt(11), 1, marks=(3, 9))
    plans = [lab.step(), lab.step(), lab.step()]
    assert [plan.counts for plan in plans] == [[2], [6], [3]] and len(o.chains(lab.cache)) == 2
    lab.run()
    lab.add("B", [*prompt(7), 4, 4, 4], 1)
    assert lab.step().starts == [2]
    lab.run()


def test_a_request_whose_marks_were_lost_leaves_one_where_others_parted(world: Worlds) -> None:
    """The second finds keys and values up to 8 and no state: it stops there. The third begins there."""
    lab = world(60, state_blocks=2, interval=4)
    lab.add("A", prompt(14), 1)
    lab.run()
    for name, token, starts, counts in (("B", 0, [0, 8], [8, 4]), ("C", 1, [8], [4])):
        lab.add(name, [*prompt(8), *[token] * 5], 1)
        plans = [lab.step() for _ in starts]
        assert [(p.starts, p.counts) for p in plans] == [([s], [n]) for s, n in zip(starts, counts, strict=True)]
        lab.run()


def test_a_slice_that_ends_elsewhere_leaves_none(world: Worlds) -> None:
    lab = world(40, state_blocks=2, interval=4, budget=4)
    lab.add("A", prompt(11), 1)
    assert lab.step().counts == [4] and not o.chains(lab.cache)
    lab.run()
    assert len(o.chains(lab.cache)) == 1


def test_without_a_prefix_cache_no_slice_ends_for_one(world: Worlds) -> None:
    lab = world(40, state_blocks=2, interval=4, caching=False)
    lab.add("A", prompt(11), 1, marks=(3, 9))
    assert lab.step().counts == [11] and not o.chains(lab.cache)


def test_one_that_would_spare_too_little_leaves_none(world: Worlds) -> None:
    lab = world(60, state_blocks=2, interval=32)
    lab.add("A", prompt(14), 1)
    lab.run()
    lab.add("B", [*prompt(6), 4, 4, 4, 4, 4], 1)
    assert lab.step().counts == [10]
    lab.run()


def test_a_request_waits_for_the_common_part_of_another(world: Worlds) -> None:
    """B waits until A has left a state where they part, which A would have passed."""
    policy = Policy(long_prefill_token_threshold=4, max_long_partial_prefills=2)
    lab = world(60, state_blocks=2, interval=4, policy=policy)
    a = lab.add("A", prompt(13), 1)
    b = lab.add("B", [*prompt(6), 4, 4, 4, 4], 1)
    plans = [lab.step(), lab.step(), lab.step()]
    assert [plan.starts for plan in plans] == [[0], [4], [6, 6]]
    assert a.sequences[0].marks == [6, 12] and b.num_cached_tokens == 6
    assert lab.reasons("B") == ["prefix in flight"]
    lab.run()


def test_a_request_does_not_wait_for_one_that_is_past(world: Worlds) -> None:
    lab = world(60, state_blocks=2, interval=4)
    a = lab.add("A", prompt(13), 1)
    lab.add("B", [*prompt(6), 4, 4, 4, 4], 1)
    assert lab.step().counts == [12, 6] and a.sequences[0].marks == [12]  # B leaves one where they part
    lab.run()


def test_a_freed_sequence_has_no_marks() -> None:
    cache, seq = cache_of(), sequence(prompt(13))
    cache.attach(seq, cache.prefixes.lookup(seq))
    assert seq.marks == [12]
    cache.free(seq)
    assert seq.marks == []


# -- where checkpoints are left ----------------------------------------------------------------------------------------

SIZE, INTERVAL = 4, 8


def seq_at(num_prompt: int, computed: int = 0, *, output: int = 0, **options: Any) -> Sequence:
    seq = sequence([*range(num_prompt)], **options)
    seq.token_ids.extend(range(100, 100 + output))
    seq.num_computed = computed
    return seq


@pytest.mark.parametrize(
    ("num_prompt", "wishes", "begin", "run", "marks"),
    [
        (9, (), 0, 0, [8]),
        (8, (), 0, 0, [4]),  # one token is left for its logits
        (4, (), 0, 0, []),
        (30, (5, 17), 0, 0, [4, 16]),
        (30, (5, 99), 0, 0, [4, 28]),
        (30, (17, 5, -3, 6), 8, 0, [16]),
        (30, (), 28, 7, []),
        (30, (13,), 4, 3, [12]),  # 12 - 4 is the interval
        (30, (28,), 8, 3, [28]),  # 12 - 8 is less
        (30, (28,), 0, 1, [4, 28]),  # where nothing was found, a quarter of the interval is enough
        (30, (28,), 8, 4, [16, 28]),
    ],
)
def test_marks(num_prompt: int, wishes: tuple[int, ...], begin: int, run: int, marks: list[int]) -> None:
    prefix = Prefix([], [], begin, run=[1] * run)
    assert Checkpoints(SIZE, INTERVAL).marks(seq_at(num_prompt, marks=wishes), prefix) == marks
    assert Checkpoints(SIZE, 0).marks(seq_at(num_prompt, marks=wishes), prefix) == []


@pytest.mark.parametrize(
    ("num_prompt", "output", "computed", "marks", "stop"),
    [
        (30, 0, 0, [4, 16], 4),
        (30, 0, 4, [4, 16], 16),
        (30, 0, 16, [4, 16], 40),  # 32 is close to the prompt's end
        (28, 0, 16, [4, 16], 32),
        (28, 0, 17, [], 32),
        (32, 0, 20, [], 40),
        (30, 1, 32, [], 40),
        (30, 40, 30, [], 64),  # one at most is left of an output that is computed again
        (30, 40, 63, [], 64),
        (30, 40, 64, [], 72),
    ],
)
def test_the_next_stop(num_prompt: int, output: int, computed: int, marks: list[int], stop: int) -> None:
    seq = seq_at(num_prompt, computed, output=output)
    seq.marks = marks
    points = Checkpoints(SIZE, INTERVAL)
    assert points.next_stop(seq) == stop
    seq.num_computed = stop
    assert points.is_stop(seq) and points.is_own(seq, stop) == (stop not in marks)
    several = seq_at(num_prompt, computed, output=output, width=2)
    several.marks = marks
    assert points.next_stop(several) == (stop if stop in marks else NEVER)
    several.num_computed = stop
    assert points.is_stop(several) == (stop in marks)


def test_the_last_mark_is_its_own() -> None:
    points, seq = Checkpoints(SIZE, INTERVAL), seq_at(30, marks=(5, 17))
    seq.marks = [4, 12, 16]
    assert [points.is_own(seq, position) for position in seq.marks] == [False, False, True]
    assert not points.is_stop(seq_at(30, 8)), "multiples of the interval are for outputs"


def test_windows_leave_the_last_position_before_a_stop_to_a_step_of_its_own() -> None:
    points, num = Checkpoints(SIZE, INTERVAL), {}
    for computed in range(24, 32):
        num[computed] = [points.cut(seq_at(20, computed), steps) for steps in (1, 2, 4, 8)]
    assert num[24] == [1, 1, 3, 7] and num[28] == [1, 1, 3, 3] and num[30] == [1, 1, 1, 1] and num[31] == [1, 1, 1, 1]
    assert num[25] == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("common", "found", "computed", "marks"),
    [
        (17, 0, 4, [16]),
        (17, 0, 16, [16]),  # where its slice ends
        (17, 0, 17, None),  # past
        (9, 1, 4, None),  # spares 4
        (9, 0, 4, [8]),
        (40, 0, 4, [24]),  # the end of the shorter one: a token is left
    ],
)
def test_a_request_waits_where_it_spares_enough(
    common: int, found: int, computed: int, marks: list[int] | None
) -> None:
    writer, seq = seq_at(30, computed), seq_at(28)
    for i in range(common, 28):
        seq.token_ids[i] = 99
    points = Checkpoints(SIZE, 4 * INTERVAL)  # 8 tokens are enough
    prefix = Prefix([1] * found, [1] * found, found * SIZE, run=[1] * found)
    for _ in range(2):
        assert points.meet(seq, prefix, writer) == (marks is not None)
        assert writer.marks == (marks or [])
    assert Checkpoints(SIZE, 0).meet(seq, prefix, writer)


def test_a_request_that_goes_on_after_the_whole_of_another_waits_for_its_end() -> None:
    """The other would leave no checkpoint there: its own prompt leaves one token for the logits."""
    writer, points = seq_at(8), Checkpoints(SIZE, INTERVAL)
    writer.marks = points.marks(writer, Prefix([], [], 0))
    assert points.meet(seq_at(28), Prefix([], [], 0), writer) and writer.marks == [4, 8]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_decode_windows_leave_a_checkpoint_at_each_stop(world: Worlds, steps: int, depth: int) -> None:
    """A step of its own reaches it, so its tokens are known before the next step is planned, with two in flight too."""
    lab = world(60, state_blocks=2, interval=8, window=steps)
    a, starts, stops = lab.add("A", prompt(5), 40), set[int](), set[int]()
    while lab.scheduler.has_work:
        if len(lab.flight) < depth and (plan := lab.plan()):
            starts.update(plan.starts)
            stops.update(start + count for start, count in zip(plan.starts, plan.counts, strict=True) if count > 1)
        else:
            lab.land()
    assert sorted(ends(lab).values()) == [4, 16, 24, 32, 40]
    assert starts >= {15, 16, 23, 24, 31, 32, 39, 40} and stops.isdisjoint({16, 24, 32, 40})
    assert len(a.finished_sequences[0].token_ids) == 45


@pytest.mark.parametrize("steps", [2, 4])
def test_no_checkpoint_is_left_before_its_tokens_are_known(world: Worlds, steps: int) -> None:
    """With three steps in flight a sequence is at a stop while its last full block is the one before."""
    lab = world(60, state_blocks=2, interval=8, window=steps)
    lab.add("A", prompt(5), 40)
    lab.run(depth=3)
    assert {4} <= {*ends(lab).values()} <= {4, 16, 24, 32, 40}


def test_no_window_follows_the_step_to_a_stop(world: Worlds) -> None:
    """A's prompt and output of 16 tokens are computed again, in steps of up to 7. The last one also samples, and ends
    at a stop. It could decode two tokens more."""
    lab = world(60, state_blocks=2, interval=8, window=4, budget=7, policy=RECOMPUTE)
    a = lab.add("A", prompt(5), 30)
    while len(a.sequences[0].token_ids) < 16:
        lab.step()
    lab.preempt(a)
    lab.cache.reset_prefix_cache()
    assert len(a.sequences[0].token_ids) == 16
    plans = [lab.step() for _ in range(4)]
    assert [(p.starts, p.counts) for p in plans[:3]] == [([0], [4]), ([4], [7]), ([11], [5])]
    assert plans[3].starts == [16] and 16 in ends(lab).values()


# -- which goes first --------------------------------------------------------------------------------------------------


def pool_with(*, parts: bool = False) -> tuple[BlockPool, list[int]]:
    """A pool with a cached full block, 2, a cached checkpoint of 3 blocks under it, and another cached block, the
    oldest. Returns the checkpoint."""
    pool = BlockPool(9, num_windows=1, state_blocks=3)
    other, full, *state = (pool.allocate() for _ in range(5))
    pool.seal(other, (b"", b"othr"))
    pool.seal_state(state, pool.seal(full, (b"", b"full")), parts=parts)
    for block in (other, *reversed(state), full):
        pool.release(block)
    return pool, state


def test_a_checkpoint_that_is_passed_goes_first() -> None:
    pool, state = pool_with()
    assert [*pool.cached()] == [1, 5, 4, 3, 2]
    pool.pass_state(state[-1])
    assert [*pool.cached()] == [5, 4, 3, 1, 2]


@pytest.mark.parametrize(
    ("finders", "parts", "goes"), [(0, False, True), (1, False, True), (2, False, False), (0, True, False)]
)
def test_a_checkpoint_of_several_stays(finders: int, parts: bool, goes: bool) -> None:
    pool, state = pool_with(parts=parts)
    pool.num_finders[state[-1]] += finders
    pool.pass_state(state[-1])
    assert (next(pool.cached()) == state[-1]) == goes


def test_a_second_state_after_the_same_positions_is_not_sealed() -> None:
    pool, state = pool_with(parts=True)
    more, num = [pool.allocate() for _ in range(3)], pool.num_sealed
    pool.seal_state(more, pool.seal_id[2], parts=False)
    assert pool.find_state(pool.seal_id[2]) == state and pool.num_sealed == num and pool.num_finders[state[-1]] == 2
    assert not any(pool.seal_id[block] for block in more)


def test_another_checkpoint_in_its_place_is_not_passed() -> None:
    """What A left last was evicted, and its head is that of another checkpoint by now."""
    cache, plan = cache_of(interval=2), StepPlan()
    a = settle(cache, prompt(7), 2, marks=(2, 6))
    for first in (1, 2):
        cache.free(settle(cache, prompt(7, first)))
    before = heads(cache)
    a.checkpoint = 2, before[1], a.checkpoint[2]
    cache.grow(a, 4, plan)
    cache.settle(plan)
    a.num_computed = 6
    cache.prefixes.seal(a)
    assert a.checkpoint[0] == 6 and heads(cache)[:2] == before


def test_a_checkpoint_in_use_is_not_passed() -> None:
    pool, state = pool_with()
    for block in state:
        pool.share(block)
    pool.pass_state(state[-1])
    assert [*pool.cached()] == [1, 2]


def test_mates_part_when_one_goes_or_has_another() -> None:
    pool, (_, _, head) = pool_with()
    pool.mate(head, 7)
    assert (pool.mates[head], pool.mates[7]) == (7, head)
    pool.mate(8, 7)
    assert (pool.mates[head], pool.mates[7], pool.mates[8]) == (0, 8, 7)
    pool.mate(head, 7)
    pool.unseal(2)
    assert not any(pool.mates)


def test_a_checkpoint_under_anothers_full_block_goes_with_its_maker() -> None:
    """B computed the full blocks first, and left no state. That of A hangs under B's block, which stays."""
    cache = cache_of(interval=2)
    b = settle(cache, prompt(7), marks=(2,))
    a = settle(cache, prompt(7))
    assert a.seal_ids == b.seal_ids and a.block_ids != b.block_ids and cache.pool.find_state(a.seal_ids[-1]) == a.state
    cache.prefixes.discard(a)
    assert not cache.pool.find_state(b.seal_ids[-1]) and all(cache.pool.seal_id[block] for block in b.block_ids)


def test_a_checkpoint_under_anothers_full_block_goes_with_its_maker_when_that_is_past() -> None:
    cache, plan = cache_of(interval=2), StepPlan()
    b = settle(cache, prompt(7), marks=(2,))
    a = settle(cache, prompt(7))
    left = a.state
    cache.grow(a, 1, plan)
    cache.settle(plan)
    a.num_computed = 7
    assert cache.pool.find_state(b.seal_ids[-1]) == left != a.state and not cache.pool.refs[left[-1]]
    cache.prefixes.discard(a)
    assert not cache.pool.find_state(b.seal_ids[-1]) and all(cache.pool.seal_id[block] for block in b.block_ids)


def test_a_hit_knows_how_far_the_full_blocks_go() -> None:
    cache = cache_of(interval=2)
    first = settle(cache, prompt(7), 2, marks=(2,))
    cache.grow(first, 4, plan := StepPlan())
    cache.settle(plan)
    first.num_computed = 6
    cache.prefixes.seal(first)
    found = cache.prefixes.lookup(sequence(prompt(8)))
    assert (found.num_positions, len(found.run)) == (2, 3)


def test_a_checkpoint_without_what_its_window_needs_is_passed_over() -> None:
    cache = cache_of(interval=2, windows=(3,), max_chunk=8)
    first = settle(cache, prompt(7), 2, marks=(2, 6))
    cache.grow(first, 4, plan := StepPlan())
    cache.settle(plan)
    first.num_computed = 6
    cache.prefixes.seal(first)
    again = sequence(prompt(8))
    assert cache.prefixes.lookup(again).num_positions == 6
    cache.pool.unseal(first.windows[0].block_ids[2])
    found = cache.prefixes.lookup(again)
    assert found.num_positions == 2 and found.state == cache.pool.find_state(first.seal_ids[0])


def test_a_checkpoint_goes_as_a_whole() -> None:
    for first in (2, 5):  # the full block, the head
        pool, state = pool_with()
        pool.unseal(first)
        assert not any(pool.seal_id[block] for block in state) and pool.num_free == 9 - 1 - (first == 5)
        pool, state = pool_with()
        assert pool.find_state(pool.seal_id[2]) == state and not pool.find_state(pool.seal_id[1])


def test_a_head_that_is_sealed_again_has_no_finders() -> None:
    pool, state = pool_with(parts=True)
    pool.unseal(2)
    again = [pool.allocate() for _ in range(8)]
    full = again[0]
    states = [b for b in again if b in state]
    pool.seal_state(states, pool.seal(full, (b"", b"more")), parts=False)
    assert pool.num_finders[states[-1]] == 0


def test_what_its_maker_has_gone_beyond_goes_first(world: Worlds) -> None:
    """A leaves checkpoints at a mark, 4, at its last mark, 10, and in its output at 16 and 20. Its session goes on from
    10 or from 20: when B does, both have served."""
    lab = world(60, state_blocks=2, interval=4)
    a = lab.add("A", prompt(11), 12, marks=(4, 10))
    lab.run()
    end = ends(lab)
    assert [end[head] for head in heads(lab.cache)] == [16, 4, 10, 20]
    assert [lab.pool.num_finders[head] for head in heads(lab.cache)] == [0, 2, 0, 0]
    lab.add("B", [*a.finished_sequences[0].token_ids, 0, 0, 0, 0], 1)
    lab.run()
    assert [end.get(head, 26) for head in heads(lab.cache)] == [10, 20, 16, 4, 26]


def test_who_begins_with_one_has_gone_beyond_it_with_the_next(world: Worlds) -> None:
    """B begins with A's last checkpoint, leaves one of its own, and A's goes before everything else. C finds it, too,
    and then it serves several."""
    lab = world(60, state_blocks=2, interval=4)
    lab.add("A", prompt(7), 1)
    lab.run()
    (ids,) = o.chains(lab.cache)
    lab.add("B", [*prompt(7), 0, 0, 0, 0], 1)
    lab.run()
    assert heads(lab.cache)[0] == ids[-1] == next(lab.pool.cached())
    lab.add("C", [*prompt(7), 1, 1, 1, 1], 1)
    lab.run()
    assert heads(lab.cache)[0] != ids[-1]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_rebuilt_group_shares_what_it_has_in_common(world: Worlds) -> None:
    lab = world(40, state_blocks=2, interval=4)
    request = lab.add("A", prompt(5), 8, width=3)
    for _ in range(5):
        lab.step()
    lab.preempt(request)
    plan = lab.step()
    assert plan.starts == [4], "the last mark of the prompt"
    lab.run()


def test_a_group_that_finds_nothing_computes_once_what_it_has_in_common(world: Worlds) -> None:
    lab = world(40, state_blocks=2, interval=4, caching=False)
    request = lab.add("A", prompt(5), 8, width=3)
    for _ in range(5):
        lab.step()
    lab.preempt(request)
    assert lab.step().counts == [4]
    assert [len(seq.state) for seq in request.sequences] == [2, 0, 0]
    plan = lab.step()
    assert plan.starts == [4] and len({seq.state[-1] for seq in request.sequences}) == 2
    lab.run()


def test_a_rebuilt_group_leaves_the_checkpoints_of_its_prompt(world: Worlds) -> None:
    lab = world(60, state_blocks=2, interval=4)
    request = lab.add("A", prompt(11), 8, width=3, marks=(4, 10))
    for _ in range(5):
        lab.step()
    lab.preempt(request)
    lab.cache.reset_prefix_cache()
    assert [lab.step().counts for _ in range(2)] == [[4], [6]] and sorted(ends(lab).values()) == [4, 10]


@pytest.mark.parametrize("windows", [(), (3,)])
def test_the_last_of_a_resumed_group_may_have_one_token(world: Worlds, windows: tuple[int, ...]) -> None:
    """It is due what the others sample next to: nothing is computed before, and it begins with that step."""
    lab = world(60, state_blocks=2, interval=4, windows=windows, max_chunk=8)
    request = lab.add("A", [1], 8, width=2, resume={0: answer([1], 3), 1: []})
    lab.step()
    lab.step()
    assert all(seq in lab.cache.holders and len(seq.windows) == len(windows) for seq in request.sequences)


def test_two_of_a_resumed_group_share_nothing_that_the_third_lacks(world: Worlds) -> None:
    """The first has a block of the second, but its state is of more positions."""
    token = next(i for i in range(50) if answer([i], 1, 0) == answer([i], 1, 1))
    lab = world(60, state_blocks=2, interval=4)
    request = lab.add("A", [token], 8, width=3, resume={0: answer([token], 4, 0), 1: answer([token], 4, 1), 2: []})
    assert [lab.step().counts for _ in range(2)] == [[4], [4]] and len(request.sequences) == 3
    lab.run()
    assert o.outputs(request) == o.reference(request)


def test_a_rebuilt_group_begins_with_no_checkpoint_in_use() -> None:
    """Its user may write that state in place in a step in which the group has no slice yet."""
    cache = cache_of(interval=2)
    user = settle(cache, prompt(7))
    group, alone = sequence(prompt(8)), sequence(prompt(8))
    group.request.sequences.append(sequence(prompt(8)))
    assert cache.prefixes.lookup(alone).state == user.state and not cache.prefixes.lookup(group).state
    cache.free(user)
    assert cache.prefixes.lookup(group).num_positions == 6


@pytest.mark.parametrize(
    ("tokens", "num"),
    [
        (([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), 4),
        (([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]), 2),  # the last token has to be computed
        (([1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [1, 2, 3, 4, 5]), 2),
        (([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 9, 5]), 2),
        (([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3]), 2),
        (([1, 2], [1, 2], [1, 2]), 0),
    ],
)
def test_what_a_group_has_in_common(tokens: tuple[list[int], ...], num: int) -> None:
    first, *others = map(sequence, tokens)
    first.request.sequences += others
    assert cache_of().prefixes.common_length(first.request) == num


# -- what repeated prompts compute -------------------------------------------------------------------------------------


def num_computed(lab: Lab) -> int:
    """Run all, and return the number of positions computed."""
    total = 0
    while lab.scheduler.has_work:
        total += sum(lab.step().counts)
    return total


def test_eight_arrivals_of_one_prompt_compute_it_once(world: Worlds) -> None:
    lab = world(100, state_blocks=2, interval=4)
    for i in range(8):
        lab.add(str(i), prompt(21), 1)
    assert num_computed(lab) == 20 + 8 * 1


@pytest.mark.parametrize(("num_tail", "chunk"), [(2, 0), (6, 8), (13, 8)])
def test_eight_arrivals_without_marks_compute_their_common_part_once(world: Worlds, num_tail: int, chunk: int) -> None:
    """It is where the first one leaves its last mark, or in a later chunk of it."""
    policy = Policy(long_prefill_token_threshold=chunk, max_long_partial_prefills=2)
    lab = world(200, state_blocks=2, interval=4, policy=policy)
    for i in range(8):
        lab.add(str(i), [*prompt(20), *[30 + i] * num_tail], 1)
    assert num_computed(lab) == 20 + 8 * num_tail


def test_the_second_of_several_arrivals_leaves_a_checkpoint_where_the_first_is_past(world: Worlds) -> None:
    """The first one's slice ends at its own last mark. So two compute the common part, not eight."""
    lab = world(200, state_blocks=2, interval=4)
    for i in range(8):
        lab.add(str(i), [*prompt(20), *[30 + i] * 6], 1)
    assert num_computed(lab) == 2 * 20 + 8 * 6


def test_arrivals_after_one_that_left_no_checkpoint_compute_the_common_part_once(world: Worlds) -> None:
    """They find its keys and values, and wait for the first of them, which computes these again."""
    lab = world(200, state_blocks=2, interval=4)
    lab.add("first", [*prompt(20), *[29] * 6], 1)
    lab.run()
    for i in range(7):
        lab.add(str(i), [*prompt(20), *[30 + i] * 6], 1)
    assert num_computed(lab) == 20 + 7 * 6


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("steps", "depth"), [(1, 1), (4, 1), (4, 2)])
def test_each_turn_of_a_chat_computes_what_is_after_the_last_checkpoint(
    world: Worlds, marked: bool, steps: int, depth: int
) -> None:
    """The prompt of a turn is that before, its output and more. That has a checkpoint at its end, or where
    the generation prompt of 3 tokens begins, and in its output."""
    lab = world(200, state_blocks=2, interval=8, window=steps)
    tokens, last = prompt(9), 0
    for turn in range(5):
        mark = len(tokens) - 3 if marked else len(tokens) - 1
        request = lab.add(f"turn {turn}", tokens, 7 + 5 * turn, marks=(mark,) if marked else ())
        lab.run(depth)
        assert request.num_cached_tokens == last, turn
        (done,) = request.finished_sequences
        in_output = (len(done.token_ids) - 1) // 8 * 8
        last = in_output if in_output >= len(tokens) + 4 else mark // 2 * 2
        tokens = [*done.token_ids, *prompt(5, turn)]
    assert last > 100
