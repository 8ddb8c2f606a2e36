"""Snapshots and the command tee: a restored scheduler goes on exactly like the one that was saved."""

from __future__ import annotations

import copy
import json
from array import array
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core import commands as cmd
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import Fields, Roster
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import Lab, make
from tests.proof import oracle as o
from tests.proof.workloads import RandomPolicy, World

MEMORY_WORK = {"row_setups", "table_writes", "swap_ins", "swap_outs", "copies"}
IGNORED = {
    "events",
    "tee",
    "select_beams",
    "sampling_params",
    "error",  # output of a finished request
    "resume",  # input, used once
    *MEMORY_WORK,  # done when the plan was submitted
}


def attributes(item: object) -> list[str]:
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*slots, *getattr(item, "__dict__", {})]


def plain(item: Any, numbers: dict[int, int] | None = None) -> Any:
    """An object and all that it refers to as nested lists. Equal results mean equal states, dict orders included."""
    numbers = {} if numbers is None else numbers
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, list | tuple | array | deque):
        return [plain(each, numbers) for each in item]
    if isinstance(item, dict):
        return [[plain(key, numbers), plain(value, numbers)] for key, value in item.items()]
    if isinstance(item, set | frozenset):
        return sorted(repr(each) for each in item)
    if item is None or isinstance(item, int | float | str | bytes):
        return item
    if id(item) in numbers:
        return "object", numbers[id(item)]
    numbers[id(item)] = len(numbers)
    found = {name: getattr(item, name) for name in sorted(set(attributes(item)) - IGNORED)}
    if "_shards" in found:  # their number is a constant of the pool's size, except in tests
        found["_shards"] = sorted((key, block) for shard in found["_shards"] for key, block in shard.items())
    if isinstance(item, StepPlan):
        found["host_tokens"] = list(item.host_tokens)
    return [plain(value, numbers) for value in found.items()]


def first_difference(a: Any, b: Any) -> Any:
    """The innermost part where two states differ."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return next((first_difference(x, y) for x, y in zip(a, b, strict=True) if x != y), None)
    return a, b


class Twin:
    """A scheduler restored from another one. `follow` gives it the commands of the other. It has the same state before
    each of them, and the same events."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.original = scheduler
        state, roster = scheduler.snapshot()
        self.answers: dict[str, deque[list[tuple[int, int]]]] = {}
        requests = [self.new(request) for request in roster.requests]
        self.scheduler = Scheduler.from_settings(scheduler.settings())
        self.scheduler.restore(copy.deepcopy(state), requests, [seq.token_ids[:] for seq in roster.sequences])
        self.waiting: Callable[[], Any] | None = None  # the last command, whose answers are not all known yet
        self.events: list[Any] = []
        self.own_events: list[Any] = []
        self.num_compared = 0
        self.compare()
        self.unsubscribe = scheduler.events.subscribe(self.events.append, blocks=True)
        self.scheduler.events.subscribe(self.own_events.append, blocks=True)

    def new(self, request: Request) -> Request:
        """A request like this one, that has not begun."""
        answers = self.answers.setdefault(request.request_id, deque())

        def select(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
            return [(parents[index][0], token) for index, token in answers.popleft()]

        return Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_ids=request.stop_ids,
            priority=request.priority,
            salt=request.salt,
            tenant=request.tenant,
            index_in_call=request.index_in_call,
            width=request.width,
            num_samples=request.num_samples,
            select_beams=select if request.select_beams else None,
            use_structured_output=request.use_structured_output,
            num_draft_tokens=request.num_draft_tokens,
            pin=request.pin,
            marks=request.marks,
            resume=request.resume,
        )

    def catch_up(self) -> None:
        if self.waiting is not None:
            self.waiting()
            self.waiting = None
        self.compare()

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        if step:
            original = self.original.in_flight[-1].plan
            for name in (*MEMORY_WORK, "host_tokens"):
                assert getattr(step.plan, name) == getattr(original, name), name

    def compare(self) -> None:
        assert self.events == self.own_events
        ours, theirs = plain(self.scheduler), plain(self.original)
        assert ours == theirs, first_difference(ours, theirs)
        self.num_compared += 1

    def follow(self, command: Any) -> None:
        if isinstance(command, cmd.BeamsSelected):
            chosen = [(command.parents.index(parent), token) for parent, token in command.selected]
            self.answers[command.request.request_id].append(chosen)
            return
        self.catch_up()
        self.waiting = self.same(command)

    def same(self, command: Any) -> Callable[[], Any]:
        """The same call to this scheduler."""
        own, original = self.scheduler, self.original
        match command:
            case cmd.Add(request, _):
                again = self.new(request)
                return lambda: own.add(again)
            case cmd.Abort(request, reason):
                return lambda: own.abort(request.request_id, reason)
            case cmd.Stop(sequence, reason):
                name, at = sequence.request.request_id, sequence.request.sequences.index(sequence)
                return lambda: own.stop(own.requests[name].sequences[at], reason)
            case cmd.Unpin(sequence):
                return lambda: own.unpin(sequence.request.request_id)
            case cmd.Schedule():
                return self.schedule
            case cmd.Update(step, result, last):
                at = list(original.in_flight).index(step)
                kept: StepResult = copy.deepcopy(result)
                return lambda: own.update(own.in_flight[at], kept, last=last)
            case cmd.Fail(step, limit):
                at = list(original.in_flight).index(step)
                return lambda: own.fail(own.in_flight[at], limit)
            case cmd.Confine(requests):
                names = [request.request_id for request in requests if request.request_id in original.requests]
                return lambda: own.confine([own.requests[name] for name in names])
            case cmd.LimitSteps(limit):
                return lambda: own.limit_steps(limit)
            case cmd.ResetPrefixCache():
                return own.cache.reset_prefix_cache
        raise AssertionError(command)


def run_with_twins(seed: int, every: int, kinds: Counter[str]) -> int:
    """Run one of the oracle's workloads, with a new twin each `every` commands. Returns the number of comparisons."""
    kind = "swap" if seed % 3 == 0 else None
    states = seed % 5 == 0
    drafts, groups = seed % 2 == 0 and not states, seed % 4 >= 2
    world = World(seed, Counter(), listen=True, kind=kind, speculates=drafts, groups=groups, states=states)
    scheduler, num_commands, num_compared = world.scheduler, 0, 0
    if isinstance(scheduler.policy, RandomPolicy):
        return 0
    twin: Twin | None = None

    def count(command: Any) -> None:
        nonlocal num_commands, num_compared, twin
        kinds[type(command).__name__] += 1
        num_commands += 1
        if num_commands % every == 0 and not isinstance(command, cmd.BeamsSelected):
            if twin is not None:
                twin.catch_up()
                twin.unsubscribe()
                num_compared += twin.num_compared
            for queue in ("swapped", "in_flight", "confined_to"):
                kinds[f"restored with {queue}"] += bool(getattr(scheduler, queue))
            kinds["restored with pins"] += bool(scheduler.cache.pins)
            kinds["restored with windows"] += any(s.windows for s in scheduler.cache.holders)
            kinds["restored with states"] += any(s.state for s in scheduler.cache.holders)
            kinds["restored with several tenants"] += scheduler.tenants.several
            kinds["restored with drafts"] += any(step.plan.drafts for step in scheduler.in_flight)
            kinds["restored with void slices"] += any(step.void_slices for step in scheduler.in_flight)
            kinds["restored with part of a result"] += any(p.num_outstanding is not None for p in scheduler.in_flight)
            twin = Twin(scheduler)
        if twin is not None:
            twin.follow(command)

    scheduler.tee.attach(count)
    world.run()
    if twin is not None:
        twin.catch_up()
        num_compared += twin.num_compared
    return num_compared


COMMANDS = [cls.__name__ for cls in cmd.Command.__args__]


def test_a_restored_scheduler_goes_on_identically() -> None:
    assert sum(run_with_twins(seed, 7 + seed % 30, Counter()) for seed in range(12)) > 200


@pytest.mark.proof
def test_schedulers_restored_in_any_state_go_on_identically() -> None:
    kinds: Counter[str] = Counter()
    num_compared = sum(run_with_twins(seed, 7 + seed % 30, kinds) for seed in range(75))
    assert num_compared > 2_000
    restored = (
        "swapped",
        "in_flight",
        "confined_to",
        "pins",
        "windows",
        "states",
        "several tenants",
        "void slices",
        "part of a result",
        "drafts",
    )
    assert [what for what in [*COMMANDS, *(f"restored with {w}" for w in restored)] if not kinds[what]] == []


@pytest.mark.slow
def test_a_thousand_workloads_go_on_identically() -> None:
    kinds: Counter[str] = Counter()
    assert sum(run_with_twins(seed, 2 + seed % 40, kinds) for seed in range(1_000)) > 50_000


def names(fields: str) -> set[str]:
    return set(fields.split())


def test_every_attribute_of_the_core_is_saved_or_listed_here() -> None:
    """A new attribute belongs to `SAVED`, to `snapshot`, or, if no decision depends on it, to this list."""
    scheduler = Lab(4, host=2).scheduler
    cache, costs = scheduler.cache, scheduler.policy.costs
    others = [
        (scheduler, "cache max_num_seqs policy events tee",
         "max_num_batched_tokens decode_window num_speculative_tokens num_watermark_blocks",
         "requests running swapped waiting in_flight confined_to _counted tenants"),
        (cache, "events tee pool swap_space rows prefixes swapping checkpoints",
         "block_size enable_prefix_caching attention_window windows num_groups has_windows max_chunk state_blocks "
         "checkpoint_interval", "pins holders _unsettled reads"),  # the last two are empty between commands
        (cache.prefixes, "pool checkpoints", "block_size enabled windows", "pins"),
        (cache.swapping, "pool space prefixes", "", "holders"),
        (cache.pool, "events", "num_blocks num_windows state_blocks _num_below", "_packed_of _shards"),
        (cache.swap_space, "", "num_blocks", ""),
        (costs, "", "", ""),
    ]  # fmt: skip
    for item, parts, settings, saved_otherwise in others:
        rest = set(attributes(item)) - set(item.SAVED.attributes.values())
        assert rest == names(parts) | names(settings) | names(saved_otherwise), type(item)
    assert set(attributes(cache.rows)) == names("events num_rows num_lines _free")
    assert set(attributes(scheduler.tenants)) == names("present several")
    kept = {
        Sequence: "request token_ids stop_token windows",
        Request: "request_id prompt_token_ids sampling_params select_beams sequences finished_sequences only_sequence "
        "stop_ids salt seed error resume",
    }
    for cls, fields in kept.items():
        rest = set(cls.__slots__) - set(cls.SAVED.attributes.values()) - MEMORY_WORK
        rest -= set(Request.INPUTS.attributes.values()) if cls is Request else set()
        assert rest == names(fields), cls
    in_flight = (
        "plan sequences swapped_requests num_outstanding swap_in_requests void_slices seal_mark num_lost num_accepted"
    )
    assert set(InFlightStep.__slots__) == names(in_flight)
    plan = "step rows starts counts num_sampled num_samples drafts bitmask_slices host_tokens"
    assert set(StepPlan.__slots__) - MEMORY_WORK == names(plan)


# -- single commands ---------------------------------------------------------------------------------------------------


def commands_of(lab: Lab) -> list[Any]:
    seen: list[Any] = []
    lab.scheduler.tee.attach(seen.append)
    return seen


def test_commands_without_effect_are_not_reported() -> None:
    lab = Lab(4)
    seen = commands_of(lab)
    lab.scheduler.abort("unknown")
    assert lab.scheduler.unpin("unknown") is None
    lab.scheduler.limit_steps(lab.scheduler.max_num_scheduled_tokens)
    with pytest.raises(Exception, match="blocks"):
        lab.add("A", range(1000), 1)
    assert not seen and lab.cache.num_pinned == 0
    lab.scheduler.limit_steps(3)
    assert seen == [cmd.LimitSteps(3)] and lab.scheduler.max_num_scheduled_tokens == 3


def test_a_refused_pin_is_not_reported() -> None:
    lab = Lab(4)
    seen = commands_of(lab)
    with pytest.raises(Exception, match="at most half"):
        lab.scheduler.add(Request("p", range(6), SamplingParams(max_tokens=1), max_tokens=1, pin=True))
    assert not seen and lab.cache.num_pinned == 0


def test_commands_are_reported_before_they_act() -> None:
    lab = Lab(4)
    states: list[tuple[str, int, int]] = []
    scheduler = lab.scheduler
    scheduler.tee.attach(lambda c: states.append((type(c).__name__, len(scheduler.requests), len(scheduler.in_flight))))
    scheduler.add(Request("A", [1, 2, 3], SamplingParams(max_tokens=None)))
    step = scheduler.schedule()
    scheduler.fail(step)
    scheduler.confine(iter([scheduler.requests["A"]]))
    step = scheduler.schedule()
    scheduler.update(step, StepResult([[7]]))
    scheduler.abort("A")
    assert states == [
        ("Add", 0, 0),
        ("Schedule", 1, 0),
        ("Fail", 1, 1),
        ("Confine", 1, 0),
        ("Schedule", 1, 0),
        ("Update", 1, 1),
        ("Abort", 1, 0),
    ]


def test_add_reports_the_resolved_max_tokens() -> None:
    lab = Lab(4)
    seen = commands_of(lab)
    request = Request("A", [1, 2, 3], SamplingParams(max_tokens=None))
    lab.scheduler.add(request)
    assert seen == [cmd.Add(request, lab.cache.max_output_tokens(3))] and request.max_tokens == seen[0].max_tokens


def test_listeners_detach_one_by_one() -> None:
    lab = Lab(4)
    first, second = list[Any](), list[Any]()
    detach_first, detach_second = lab.scheduler.tee.attach(first.append), lab.scheduler.tee.attach(second.append)
    lab.cache.reset_prefix_cache()
    detach_first()
    detach_first()
    lab.cache.reset_prefix_cache()
    assert first == [cmd.ResetPrefixCache()] and second == 2 * first and lab.scheduler.tee.active
    detach_second()
    lab.cache.reset_prefix_cache()
    assert len(second) == 2 and not lab.scheduler.tee.active


@pytest.mark.parametrize("mode", [None, PreemptionMode.SWAP])
def test_settings_make_an_equal_scheduler(mode: PreemptionMode | None) -> None:
    policy = Policy(True, mode, ageing=3, long_prefill_token_threshold=5, max_long_partial_prefills=2)
    cache = KVCacheManager(
        9, 3, 4, num_rows=5, enable_prefix_caching=False, attention_window=2, windows=(3, 5), max_chunk=7
    )
    scheduler = Scheduler(cache, max_num_batched_tokens=33, decode_window=4, num_watermark_blocks=1, policy=policy)
    settings = json.loads(json.dumps(scheduler.settings()))
    again = Scheduler.from_settings(settings)
    assert plain(again) == plain(scheduler) and again.settings() == settings
    del settings["windows"], settings["max_chunk"]  # of an older recording
    older = Scheduler.from_settings(settings).cache
    assert (older.windows, older.num_groups, older.max_chunk) == ((), 1, KVCacheManager(9, 3).max_chunk)


def test_settings_make_an_equal_scheduler_with_states() -> None:
    cache = KVCacheManager(9, 3, num_rows=5, state_blocks=2, checkpoint_interval=6)
    scheduler = Scheduler(cache, max_num_batched_tokens=33)
    settings = json.loads(json.dumps(scheduler.settings()))
    again = Scheduler.from_settings(settings)
    assert plain(again) == plain(scheduler) and again.settings() == settings
    del settings["state_blocks"], settings["checkpoint_interval"]  # of an older recording
    older = Scheduler.from_settings(settings).cache
    assert (older.state_blocks, older.checkpoint_interval, older.rows.num_lines) == (0, 0, 1)


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    """Neither by the scheduler that it was taken of nor by one that it was restored to."""
    lab = Lab(16)
    lab.add("A", [1, 2, 3, 4, 5], 9, width=2, num_samples=2)
    lab.step()
    scheduler = lab.scheduler
    scheduler.schedule()
    state, roster = scheduler.snapshot()
    before = copy.deepcopy(state)
    assert state["in_flight"] and len(roster.sequences) == 2

    def restored() -> Scheduler:
        again = Scheduler.from_settings(scheduler.settings())
        requests = [make(r.request_id, r.prompt_token_ids, 9, width=2, num_samples=2) for r in roster.requests]
        again.restore(state, requests, [seq.token_ids[:] for seq in roster.sequences])
        return again

    for other in (restored(), scheduler):
        part = StepResult([[1]] * len(other.in_flight[0].plan.rows))
        other.update(other.in_flight[0], part, last=False)
        other.abort("A")
        other.cache.reset_prefix_cache()
        assert state == before


def test_a_pruned_beam_of_a_plan_in_flight_is_saved() -> None:
    """The plan's other slices have not all returned."""
    lab = Lab(60, window=4, rows=8, habits=o.Habits(splits=True))
    lab.add("A", [1, 2, 3], 9, beam=3)
    lab.add("B", [4, 5, 6], 30)
    num_pruned = 0
    while "A" in lab.scheduler.requests:
        plan = lab.plan()
        if max(plan.num_sampled) > 1:
            lab.part()
            num_pruned += any(seq.finish_reason == "pruned" for seq in lab.scheduler.in_flight[0].sequences)
            Twin(lab.scheduler)
        lab.land()
    assert num_pruned
    lab.run()


def test_a_roster_numbers_requests_and_sequences_apart() -> None:
    lab = Lab(8)
    lab.add("A", [1], 2)
    request = lab.scheduler.requests["A"]
    roster = Roster([request], request.sequences)
    assert roster.indices([request, *request.sequences]) == [0, 0]
    assert roster.requests_at([0]) == [request] and roster.sequences_at([0]) == request.sequences


def test_attributes_that_older_snapshots_lack_stay_as_they_are() -> None:
    owner = SimpleNamespace(kept=1, changed=2)
    Fields("kept changed").load(owner, {"changed": 5})
    assert owner == SimpleNamespace(kept=1, changed=5)
