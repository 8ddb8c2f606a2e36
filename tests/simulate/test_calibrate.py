"""Calibration: the fit recovers the terms of a cost model from steps timed by it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.core.plan import StepPlan
from octavo.errors import UsageError
from octavo.integers import cdiv
from octavo.simulate.calibrate import (
    HOST_TERMS,
    ROUNDS,
    TERMS,
    MeasuredStep,
    TimedExecutor,
    calibration_rounds,
    fit,
    fit_nonnegative,
    measure,
    median_error,
)
from octavo.simulate.clock import VirtualClock
from octavo.simulate.cost import LinearCost, StepWork
from octavo.simulate.devices import DEVICES
from octavo.simulate.executor import SimulatedExecutor
from octavo.simulate.models import MODELS
from octavo.simulate.simulation import Records, Replica, SimConfig

TRUE = LinearCost(
    2e-3,
    3e-5,
    5e-5,
    few_s=6e-5,
    chunk_s=4e-4,
    pair_s=2e-8,
    kv_s=4e-7,
    host_s=1e-4,
    host_slice_s=2e-6,
    host_chunk_s=9e-5,
)


def submitting_s(work: StepWork) -> float:
    return TRUE.host_s + TRUE.host_slice_s * work.num_slices + TRUE.host_chunk_s * work.num_chunks


def steps(noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    rnd, found = random.Random(seed), []
    for i in range(300):
        n, context = rnd.choice([1, 4, 16, 64]), rnd.randint(10, 500)
        new, num_chunks = rnd.choice([(8, 1), (64, 1), (512, 1), (512, 4)]) if i % 10 == 0 else (0, 0)
        pairs = new * (new + 1) // 2
        work = StepWork(n + num_chunks, new, n, 1, pairs, n * context + new, 0, 0, num_chunks)
        step_s = TRUE.work_s(work) * (1 + rnd.uniform(-noise, noise))
        found.append(MeasuredStep(work, step_s, submitting_s(work) * (1 + noise * rnd.random())))
    return found


def test_fit_recovers_the_terms() -> None:
    found = fit(steps())
    for name in (*TERMS, *HOST_TERMS):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert median_error(found, steps()) < 1e-9


def test_fit_averages_noise() -> None:
    found = fit(steps(noise=0.2), move_s=7e-4)
    assert found.pass_s == pytest.approx(TRUE.pass_s, rel=0.1) and found.move_s == 7e-4
    assert median_error(found, steps()) < 0.05 < median_error(LinearCost(4e-3, 0, 0), steps())


def test_delayed_steps_count() -> None:
    """A third of the steps takes twice as long: the expected total equals the measured total."""
    rnd = random.Random(1)
    late = [MeasuredStep(s.work, s.step_s * rnd.choice([1, 1, 2]), s.host_s) for s in steps()]
    cost = fit(late)
    assert sum(cost.work_s(s.work) for s in late) == pytest.approx(sum(s.step_s for s in late), rel=0.04)


def test_terms_are_nonnegative() -> None:
    """The unconstrained fit would be 3 and -1."""
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = fit_nonnegative(rows, np.array([2.0, 1.0, 0.0]))
    assert (found >= 0).all() and found[1] == 0 and found[0] == pytest.approx(1.0)
    assert fit_nonnegative(rows, np.array([2.0, 3.0, 4.0])) == pytest.approx([1.0, 1.0])
    assert (fit_nonnegative(rows, np.array([-1.0, -1.0, -1.0])) == 0).all()


def test_measured_times_match_the_cost_model() -> None:
    """A simulated engine is measured in place of a real one."""
    args = EngineArgs(model="x", num_gpu_blocks_override=400, async_scheduling=False, decode_window=1,
                      enable_prefix_caching=False)  # fmt: skip
    config = SimConfig(MODELS["opt-13b"], DEVICES["h100"], args, cost=TRUE)
    replica = Replica(config, Records(), interval_s=1e9)
    replica.engine.limits.vocab_size = 1000
    executor, clock = replica.engine.executor, replica.clock
    progress_lines: list[str] = []
    found = measure(replica.engine, repeats=1, progress=progress_lines.append, clock=clock)
    assert replica.engine.executor is executor and not replica.engine.has_work
    assert len(progress_lines) == 2 * len(ROUNDS) and len(found) > 100
    found = [MeasuredStep(s.work, s.step_s - submitting_s(s.work), s.host_s) for s in found]  # part of a step here
    cost = fit(found)
    assert median_error(cost, found) < 0.01
    assert cost.new_s == pytest.approx(TRUE.new_s, rel=0.02) and cost.kv_s == pytest.approx(TRUE.kv_s, rel=0.02)


def on_a_gpu(num_blocks: int, max_num_seqs: int, cost: LinearCost = TRUE) -> Replica:
    args = EngineArgs(model="x", num_gpu_blocks_override=num_blocks, async_scheduling=False, max_num_seqs=max_num_seqs,
                      decode_window=4, enable_prefix_caching=False)  # fmt: skip
    replica = Replica(SimConfig(MODELS["opt-13b"], DEVICES["h100"], args, cost=cost), Records(), interval_s=1e9)
    replica.engine.limits.vocab_size = 1000
    return replica


def test_overlapping_steps_are_timed_separately() -> None:
    """Host time overlaps the steps and is not part of them, for decode windows and for full prefill chunks."""
    replica = on_a_gpu(9000, 96)
    found = measure(replica.engine, device="cuda", repeats=1, warm_up=False, clock=replica.clock)
    assert not replica.engine.overlap and not replica.engine.has_work
    assert len(found) > 100 and sum(s.step_s > 0 for s in found) > 0.9 * len(found)
    assert max(s.work.num_new for s in found) > 8000 and max(s.work.num_decoding for s in found) == 4 * 96
    assert max(s.work.num_passes for s in found) == 4 and max(s.work.kv_tokens for s in found) > 9000 * 16
    cost = fit(found)
    for name in (*TERMS, *HOST_TERMS):
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name


def test_ready_result_gives_no_step_time() -> None:
    """The host takes ten times as long as the steps: no step can be timed, but host times can."""
    slow = LinearCost(1e-4, 0, 0, host_s=1e-2)
    replica = on_a_gpu(9000, 8, slow)
    found = measure(replica.engine, device="cuda", repeats=1, warm_up=False, clock=replica.clock)
    assert not any(s.step_s for s in found)
    with pytest.raises(UsageError, match=f"all of {len(found)} steps"):
        fit(found)
    assert fit([*found, MeasuredStep(found[0].work, 1e-4, 0.0)]).host_s == pytest.approx(1e-2)


def test_after_a_late_host_two_results_must_be_awaited() -> None:
    clock = VirtualClock()
    timed = TimedExecutor(SimulatedExecutor(LinearCost(1.0, 0, 0), clock, num_blocks=1), clock, overlap=True)
    flight = [timed.submit(StepPlan(0)), timed.submit(StepPlan(1))]
    for number in range(2, 7):
        flight.pop(0).result()
        if number == 4:
            clock.advance_to(clock.now + 1.5)  # the third step ends meanwhile, and the fourth starts late
        flight.append(timed.submit(StepPlan(number)))
    assert [s.step_s for s in timed.steps] == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert [s.host_s for s in timed.steps[2:]] == [0.0, 0.0, 1.5]


def test_gpu_rounds_fit_into_the_pool() -> None:
    for num_blocks, max_num_seqs in ((1, 256), (40, 256), (3000, 256), (60_000, 512)):
        replica = on_a_gpu(num_blocks, max_num_seqs)
        for batch, prompt, output in calibration_rounds(replica.engine, "cuda"):
            assert 1 <= batch <= max_num_seqs and prompt >= 1 and output >= 1
            assert prompt + output <= replica.engine.limits.max_model_len
            assert batch * cdiv(prompt + output, 16) <= num_blocks


def test_time_before_a_round_is_not_measured() -> None:
    clock = VirtualClock()
    timed = TimedExecutor(SimulatedExecutor(LinearCost(1.0, 0, 0), clock, num_blocks=1), clock)
    timed.submit(StepPlan()).result()
    clock.advance_to(5.0)
    timed.submit(StepPlan(1)).result()
    timed.reset()
    clock.advance_to(50.0)
    timed.submit(StepPlan(2)).result()
    assert [s.host_s for s in timed.steps] == [0.0, 4.0, 0.0]
    assert [s.step_s for s in timed.steps] == [1.0, 1.0, 1.0]
