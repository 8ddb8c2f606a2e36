"""Calibration: an engine runs small workloads on this machine, and a `LinearCost` is fitted to its steps.

On a CPU one step runs at a time: its time is from submission to result, and the time between two steps is the host's.
On a GPU two steps are in flight: launching a step and reading the previous result overlap the device's work, so the
time between two results is the device's alone.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.executor import Capacity, Executor, GrammarBitmask, StepHandle
from octavo.errors import UsageError
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.cost import LinearCost, StepWork, step_work

TERMS = ("pass_s", "few_s", "chunk_s", "new_s", "decode_s", "pair_s", "kv_s")
"""Terms of a `LinearCost` that are fitted to steps; the others are measured separately."""
HOST_TERMS = ("host_s", "host_slice_s", "host_chunk_s")
REFITS = 4
MAX_BATCH = 64
ROUNDS = (  # batch size, prompt tokens and output tokens, as shares of the longest sequence
    (1, 0.01, 0.01),
    (1, 0.05, 0.05),
    (1, 0.5, 0.05),
    (2, 0.02, 0.01),
    (4, 0.02, 0.10),
    (4, 0.25, 0.10),
    (8, 0.005, 0.02),
    (8, 0.03, 0.02),
    (16, 0.02, 0.05),
    (16, 0.15, 0.05),
    (MAX_BATCH, 0.01, 0.03),
    (MAX_BATCH, 0.06, 0.03),
)
UNLIMITED_BATCH = 1 << 20
GPU_ROUNDS = (  # in tokens: the CPU's rounds are too small to fill a GPU
    (1, 128, 64),
    (1, 2048, 64),
    (1, 16384, 64),
    (4, 512, 64),
    (8, 4096, 64),
    (16, 128, 64),
    (32, 1024, 64),
    (64, 256, 64),
    (128, 1024, 64),
    (UNLIMITED_BATCH, 64, 64),
    (UNLIMITED_BATCH, 512, 64),
    (UNLIMITED_BATCH, 2048, 64),
)


class Round(NamedTuple):
    """`batch` concurrent requests with prompts of `prompt` / 2 to `prompt` tokens and outputs of `output` tokens."""

    batch: int
    prompt: int
    output: int


def calibration_rounds(engine: Engine, device: str) -> list[Round]:
    """The rounds for an engine. On a GPU all requests of a round fit into the pool together."""
    cache, limit = engine.scheduler.cache, engine.scheduler.max_num_seqs
    max_len = min(engine.limits.max_model_len, cache.max_output_tokens(1))
    if device == "cpu":
        return [
            Round(min(batch, limit), max(2, min(int(max_len * prompt), 1024)), max(4, min(int(max_len * output), 64)))
            for batch, prompt, output in ROUNDS
        ]
    num_slots = cache.pool.num_blocks * cache.block_size
    rounds = []
    for batch, prompt, output in GPU_ROUNDS:
        batch = min(batch, limit, max(1, num_slots // (output + cache.block_size + 1)))
        room = min(max_len, num_slots // batch - cache.block_size)
        output = max(1, min(output, room // 2))
        rounds.append(Round(batch, max(1, min(prompt, room - output)), output))
    return rounds


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step: its work, its duration, and the host time since the previous step. A time of 0 is unknown."""

    work: StepWork
    step_s: float
    host_s: float


class TimedExecutor:
    """Wraps an executor and times each step, from its submission or from the end of the previous step if that is later.

    With `overlap` two steps are in flight. A step is then timed only if the host had to wait for its result and for the
    previous one: a result that is ready already shows when the host arrived, not when the device was done. Host time is
    all time between two results, submitting included.
    """

    def __init__(
        self, inner: Executor, clock: Callable[[], float] = time.perf_counter, *, overlap: bool = False
    ) -> None:
        self.inner = inner
        self.overlap = overlap
        self.steps: list[MeasuredStep] = []
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Do not count the time until the next step."""
        self._last_end_s: float | None = None
        self._waited_for_last = False
        self._in_flight: list[TimedStep] = []

    def start(self) -> Capacity:
        return self.inner.start()

    def submit(self, plan: StepPlan) -> TimedStep:
        now = self._clock()
        running = TimedStep(self, self.inner.submit(plan), step_work(plan), now)
        if self._last_end_s is not None and not self.overlap:
            running.host_s = now - self._last_end_s
        running.has_predecessor = bool(self._in_flight)
        self._in_flight.append(running)
        return running

    def record_host_time(self) -> None:
        """The host is done with its work before waiting for a result."""
        if self.overlap and self._last_end_s is not None and len(self._in_flight) > 1:
            self._in_flight[-1].host_s = self._clock() - self._last_end_s

    def record_end(self, running: TimedStep, waited: bool) -> None:
        now = self._clock()
        counts = not self.overlap or (running.has_predecessor and waited and self._waited_for_last)
        step_s = now - max(running.begin_s, self._last_end_s or 0.0) if counts else 0.0
        self.steps.append(MeasuredStep(running.work, step_s, running.host_s))
        self._last_end_s, self._waited_for_last = now, waited
        self._in_flight = [other for other in self._in_flight if other is not running]

    def close(self) -> None:
        self.inner.close()


class TimedStep:
    """A submitted step with its times. `has_predecessor`: another step was in flight when it was submitted."""

    def __init__(self, executor: TimedExecutor, inner: StepHandle, work: StepWork, begin_s: float) -> None:
        self.work, self.begin_s, self.host_s, self.has_predecessor = work, begin_s, 0.0, False
        self._executor, self._inner = executor, inner

    @property
    def done(self) -> bool:
        return self._inner.done

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        return self._inner.poll(timeout_s)

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        self._inner.put_bitmask(masks)

    def result(self) -> StepResult:
        waited = not self._inner.done
        self._executor.record_host_time()
        result = self._inner.result()
        self._executor.record_end(self, waited)
        return result


def measure(
    engine: Engine,
    *,
    device: str = "cpu",
    repeats: int = 2,
    warm_up: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MeasuredStep]:
    """Run the device's rounds `repeats` times, after one discarded repetition with `warm_up`. The engine must be idle.

    The decode window is the engine's. Prompts are random, so that no prefix is cached.
    """
    overlap, engine.overlap = engine.overlap, device != "cpu"  # on a CPU, planning competes with the step
    timed = engine.executor = TimedExecutor(engine.executor, clock, overlap=engine.overlap)
    rounds = calibration_rounds(engine, device)
    rnd = random.Random(0)
    try:
        for repeat in range(-warm_up, repeats):
            for number, each in enumerate(rounds, 1 + (repeat + warm_up) * len(rounds)):
                progress(f"round {number} of {(repeats + warm_up) * len(rounds)}")
                with engine.gc_pause:  # as when serving
                    _run_round(engine, rnd, each)
                timed.reset()
            if repeat < 0:
                timed.steps.clear()
    finally:
        engine.executor, engine.overlap = timed.inner, overlap
    return timed.steps


def _run_round(engine: Engine, rnd: random.Random, each: Round) -> None:
    batch, num_prompt, num_output = each
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, temperature=0.0)
    # Varied lengths separate the terms of the fit. Prompts are made before any step is timed.
    lengths = [max(1, int(num_prompt * rnd.uniform(0.5, 1.0))) for _ in range(batch)]
    prompts = [[rnd.randrange(engine.limits.vocab_size) for _ in range(length)] for length in lengths]
    first = batch // 2 + 1
    each_step = max(1, 2 * (batch - first) // num_output)
    for i, prompt_token_ids in enumerate(prompts):
        # The other requests arrive while these decode, so that some steps have both prefill and decode work.
        if i >= first and (i - first) % each_step == 0:
            engine.step()
        engine.add_request(EngineRequest(f"calibrate-{i}", prompt_token_ids, params))
    while engine.has_work:
        engine.step()


def fit(steps: Sequence[MeasuredStep], *, move_s: float = 0.0) -> LinearCost:
    """Fit the nonnegative terms of the device and of the host by least squares. Steps with prefill, which are far
    fewer, count as much in total as steps without.

    Raises `UsageError` if no step could be timed.
    """
    timed_steps = [s for s in steps if s.step_s > 0]
    if not timed_steps:
        raise UsageError(
            f"the host was slower than the device in all of {len(steps)} steps, so none could be timed; remove "
            "enforce_eager, or choose a larger model"
        )
    columns = [
        (w.num_passes, w.num_first_tokens, w.num_new > 0, w.num_new, w.num_decoding, w.chunk_pairs, w.kv_tokens)
        for w in (s.work for s in timed_steps)
    ]
    rows, times = np.array(columns, dtype=float), np.array([s.step_s for s in timed_steps])
    terms = dict(zip(TERMS, fit_relative(rows, times, _balance_weights(rows)).tolist(), strict=True))
    between = [(1, s.work.num_slices, s.work.num_chunks, s.host_s) for s in steps if s.host_s > 0]
    table = np.array(between or [(1, 0, 0, 1e-9)], dtype=float)
    rows, times = table[:, :-1], table[:, -1]
    host = dict(zip(HOST_TERMS, fit_relative(rows, times, np.ones(len(rows))).tolist(), strict=True))
    return LinearCost(**terms, **host, move_s=move_s)


def _balance_weights(rows: np.ndarray) -> np.ndarray:
    chunks = rows[:, TERMS.index("chunk_s")] > 0
    weights: np.ndarray = np.where(chunks, 1 / max(1, chunks.sum()), 1 / max(1, (~chunks).sum())) ** 0.5
    return weights


def fit_relative(rows: np.ndarray, times: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Nonnegative terms that minimise the relative error of `rows @ terms` to `times`: 10 % off counts the same for a
    short time as for a long one.

    Errors are relative to the expected time, not the measured one: else a delayed step would hardly count, and the sum
    over many steps would be too low. So the fit is repeated with its own result.
    """
    expected = times
    for _ in range(REFITS):
        solution = fit_nonnegative(rows * (weights / expected)[:, None], weights * times / expected)
        expected = np.maximum(rows @ solution, times.min())
    return solution


def fit_nonnegative(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Least squares of `rows @ x = times` with x >= 0; drops the most negative term until none is left."""
    terms = list(range(rows.shape[1]))
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    solution = np.zeros(rows.shape[1])
    while terms:
        candidate, *_ = np.linalg.lstsq(rows[:, terms] / scale[terms], times, rcond=None)
        if candidate.min() >= 0:
            solution[terms] = candidate / scale[terms]
            break
        terms.pop(int(np.argmin(candidate)))
    return solution


def median_error(cost: LinearCost, steps: Sequence[MeasuredStep]) -> float:
    """Median relative error of the fitted times; 0 without steps."""
    return statistics.median([abs(cost.work_s(s.work) / s.step_s - 1) for s in steps if s.step_s > 0] or [0.0])
