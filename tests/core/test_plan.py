"""Plans as bytes: nothing is lost, another process computes the same tokens, damaged bytes are refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import (
    BlockCopy,
    Drafts,
    RowSetup,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TableWrite,
    TokenLogprobs,
    _Reader,
)
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.scheduler import Scheduler
from octavo.errors import PlanError
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import make
from tests.core.plan_worker import receive, send
from tests.proof import oracle as o
from tests.proof.workloads import World

ROOT = Path(__file__).parents[2]
COPIES = 3
"""Seed of a workload that copies blocks."""
ALL = SamplingParams(
    n=2,
    best_of=5,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={7: -100.0, 3: 0.1},
    allowed_token_ids=[9, 2, 5],
    bad_words_token_ids=[[1, 2, 3], [4]],
    min_tokens=3,
    max_tokens=99,
    logprobs=-1,
    prompt_logprobs=0,
    stop=["end"],
)


def whole_plan() -> StepPlan:
    """A plan with something in every field."""
    plan = StepPlan(1 << 40)
    plan.set_slices([3, 0, 7], [1 << 30, 0, 9], [1, 4, 2], [1, 0, 2])
    plan.num_samples, plan.bitmask_slices = {0: 4, 2: 3}, [2, 0]
    plan.drafts = {2: Drafts(1, 1), 0: Drafts(3, 8)}
    plan.host_tokens = {1: array("i", [5, 6, 7, 8]), 2: array("i")}
    plan.table_writes = [TableWrite(3, 0, (1, 2, 3)), TableWrite(0, 5, ())]
    plan.swap_outs, plan.swap_ins = [SwapOut(1, 2), SwapOut(3, 4)], [SwapIn(5, 6)]
    plan.copies = [BlockCopy(8, 9)]
    plan.row_setups = [
        RowSetup(3, ALL, -(1 << 63), 4, frozenset({11, 2}), 6, array("i", range(9)), True, b"sa\0lt"),
        RowSetup(0, SamplingParams(temperature=0), (1 << 63) - 1, 0, frozenset()),
    ]
    return plan


def test_a_plan_survives_its_bytes() -> None:
    plan = whole_plan()
    got = o.Received.of(InFlightStep(plan))  # compares every field
    assert got.num_tokens == 7 and got.num_bitmask_columns == 3 and list(got.slices()) == list(plan.slices())
    assert got.row_setups[0].sampling_params.needs_history and got.row_setups[0].token_ids == array("i", range(9))
    assert got.row_setups[0].sampling_params.selects_best_of and got.row_setups[1].sampling_params.greedy
    assert isinstance(got.table_writes[0].block_ids, tuple) and isinstance(got.swap_ins[0], SwapIn)
    assert o.Received.of(InFlightStep(StepPlan(4))).step == 4


def test_a_decode_step_encodes_its_columns_alone() -> None:
    plan = StepPlan()
    plan.set_slices(list(range(256)), [1000] * 256, [1] * 256, [1] * 256)
    assert len(plan.encode()) == len(StepPlan().encode()) + 4 * 4 * 256


def test_bytes_of_another_version_or_length_are_refused() -> None:
    data = whole_plan().encode()
    for damaged, text in (
        (b"", "field at byte 0 has 56 bytes of 0"),
        (b"what" + data[4:], "b'what' are no plan"),
        (data[:4] + b"\x63" + data[5:], "format version 99 and this process reads 6; run the same version"),
        (data + b"\0", f"ends after {len(data)} of {len(data) + 1} bytes"),
        (data[:-1], "damaged"),
    ):
        with pytest.raises(PlanError, match=text):
            StepPlan.decode(damaged)
    for size in range(len(data)):
        with pytest.raises(PlanError):
            StepPlan.decode(data[:size])


def test_a_plan_names_only_slices_that_it_has() -> None:
    for name, value in (
        ("num_samples", {3: 2}),
        ("drafts", {3: Drafts(1, 1)}),
        ("bitmask_slices", [3]),
        ("host_tokens", {3: array("i", [1])}),
    ):
        plan = whole_plan()
        setattr(plan, name, value)
        with pytest.raises(PlanError, match="slice 3 and has 3"):
            StepPlan.decode(plan.encode())


def test_negative_numbers_and_impossible_parameters_are_refused() -> None:
    plan = whole_plan()
    plan.host_tokens[1][2] = -7
    with pytest.raises(PlanError, match="negative number"):
        StepPlan.decode(plan.encode())
    with pytest.raises(PlanError, match="has -4 bytes"):
        _Reader(b"").ints(-1)
    plan = whole_plan()
    params = SamplingParams()
    object.__setattr__(params, "temperature", float("nan"))
    plan.row_setups = [RowSetup(0, params, 0, 0, frozenset())]
    with pytest.raises(PlanError, match="no request can have: temperature"):
        StepPlan.decode(plan.encode())


def test_damaged_bytes_raise_nothing_but_the_stated_error() -> None:
    rng, data, refused = random.Random(0), whole_plan().encode(), 0
    for _ in range(20_000):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at, size = rng.randrange(len(damaged)), rng.randrange(5)
            damaged[at : at + size] = rng.randbytes(rng.choice([size, size, rng.randrange(9)]))
        try:
            StepPlan.decode(bytes(damaged))
        except PlanError:
            refused += 1
    assert 10_000 < refused < 20_000  # the others changed a number


def whole_result() -> StepResult:
    entries = [TokenLogprobs(-0.5, 3, [4, 5], [-0.1, -0.2]), TokenLogprobs(-1e-300, 1, [], [])]
    return StepResult(
        [[1, 2], [], [(-0.25, 7), (-1.5, 0)]],
        {1: "numbers that are not finite \u6f22", 2: ""},
        {0: entries, 2: []},
        {1: (4, entries[:1])},
        {0: [(3, 1), (2, 2)], 2: [(1, 0)]},
        [9, 3],
    )


def test_a_result_survives_its_bytes() -> None:
    for result in (whole_result(), StepResult([]), StepResult([[]]), StepResult([[0]] * 3, corrupt=[1])):
        assert StepResult.decode(result.encode()) == result
    assert StepResult.decode(StepResult([[]], {0: "a \ud800"}).encode()).errors == {0: "a \\ud800"}
    result.logprobs = {0: [TokenLogprobs(float("nan"), 0, [1], [float("-inf")])]}
    [entry] = StepResult.decode(result.encode()).logprobs[0]
    assert entry.logprob != entry.logprob and entry.top == [float("-inf")]


def test_every_field_of_a_result_is_in_its_bytes() -> None:
    whole = whole_result()
    for name, empty in (("errors", {}), ("logprobs", {}), ("prompt_logprobs", {}), ("drafts", {}), ("corrupt", [])):
        assert replace(whole, **{name: empty}).encode() != whole.encode()


def test_damaged_results_raise_nothing_but_the_stated_error() -> None:
    rng, data, refused = random.Random(0), whole_result().encode(), 0
    for size in range(len(data)):
        with pytest.raises(PlanError):
            StepResult.decode(data[:size])
    for damaged, text in (
        (b"octp" + data[4:], "b'octp' are no plan or result"),
        (data + b"\0", f"ends after {len(data)} of {len(data) + 1} bytes"),
        (StepResult([[]], {1: ""}).encode(), "slice 1 and has 1"),
        (data[:-1] + b"\xff", "is no text"),
        (data[:32] + b"\1" + data[33:], "more numbers"),
        (data[:32] + b"\7" + data[33:], "fewer numbers"),
    ):
        with pytest.raises(PlanError, match=text):
            StepResult.decode(damaged)
    for _ in range(20_000):
        changed = bytearray(data)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            StepResult.decode(bytes(changed))
        except PlanError:
            refused += 1
    assert 2_000 < refused < 18_000  # the others changed a number or a letter


@pytest.mark.parametrize("seed", range(4))
def test_an_executor_in_another_process_computes_the_same_tokens(seed: int) -> None:
    """It gets bytes and nothing else: row setups, tables, swaps, copies, forks and windows are all in them."""
    rng = random.Random(seed)
    cache = KVCacheManager(24, 2, 24, num_rows=6)
    policy = Policy(mode=rng.choice([None, *PreemptionMode]))
    scheduler = Scheduler(cache, max_num_batched_tokens=16, decode_window=rng.choice([1, 3]), policy=policy)
    requests = [
        make(f"r{i}", [rng.randrange(o.VOCAB) for _ in range(9 + i)], 12, **options)
        for i, options in enumerate(({"width": 3}, {"stop_ids": [0]}, {}, {"width": 2}, {}, {}))
    ]
    for request in requests:
        scheduler.add(request)
    worker = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/core/plan_worker.py"), "24", "2", "24", "6"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert worker.stdin is not None and worker.stdout is not None
    with worker:
        while scheduler.has_work:
            step = scheduler.schedule()
            assert step
            send(worker.stdin, step.plan.encode())  # type: ignore[arg-type]
            scheduler.update(step, StepResult.decode(receive(worker.stdout) or b""))  # type: ignore[arg-type]
        worker.stdin.close()
    assert worker.returncode == 0
    assert all(o.outputs(request) == o.reference(request) for request in requests)
    assert cache.num_copied > 0 and scheduler.num_preemptions > 0


def test_the_oracle_notices_a_plan_that_its_bytes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = StepPlan.encode

    def without_copies(plan: StepPlan) -> bytes:
        plan.copies, copies = [], plan.copies
        data = encode(plan)
        plan.copies = copies
        return data

    monkeypatch.setattr(StepPlan, "encode", without_copies)
    with pytest.raises(o.Invariant, match="bytes change"):
        World(COPIES, Counter()).run()


def test_the_samples_of_a_fork_count_as_one_outstanding_token() -> None:
    plan = StepPlan()
    plan.set_slices([0, 1], [0, 0], [5, 9], [1, 4])
    plan.num_samples = {0: 3}
    step = InFlightStep(plan)
    step.count_partial(StepResult([[1, 2, 3], [7]]))
    assert step.outstanding == [0, 3]
    step.count_partial(StepResult([[], [8]]))
    assert step.outstanding == [0, 2]
