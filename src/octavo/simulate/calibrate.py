"""What a step takes on a machine that is here: an engine works through small workloads, and a `LinearCost` is fitted.

A CPU's engine is measured a step at a time: the time from a plan's submission to its result is the step's own, and what
lies between two steps is the host's. A GPU's is measured with two steps in flight: there, launching a step and reading
what came of the one before pass beside the device's work, and the time between two results is the device's alone.
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
from octavo.engine.executor import Executor, GrammarBitmask, StepHandle
from octavo.errors import UsageError
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.cost import LinearCost, StepWork, step_work

TERMS = ("pass_s", "few_s", "chunk_s", "new_s", "decode_s", "pair_s", "kv_s")
"""Of a `LinearCost`, those that are fitted; the others are measured apart."""
HOST_TERMS = ("host_s", "host_slice_s", "host_chunk_s")
REFITS = 4
MAX_BATCH = 64
ROUNDS = (  # requests at a time, tokens of each prompt, tokens to generate, as shares of what the engine can take
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
ALL = 1 << 20
GPU_ROUNDS = (  # in tokens: a GPU is far from full where a CPU's minute is over
    (1, 128, 64),
    (1, 2048, 64),
    (1, 16384, 64),
    (4, 512, 64),
    (8, 4096, 64),
    (16, 128, 64),
    (32, 1024, 64),
    (64, 256, 64),
    (128, 1024, 64),
    (ALL, 64, 64),
    (ALL, 512, 64),
    (ALL, 2048, 64),
)


class Round(NamedTuple):
    """`batch` requests, with prompts of half of `prompt` tokens to all of them, and `output` tokens to generate."""

    batch: int
    prompt: int
    output: int


def rounds_of(engine: Engine, device: str) -> list[Round]:
    """What it works through; on a GPU all requests fit into the pool together."""
    cache, most = engine.scheduler.cache, engine.scheduler.max_num_seqs
    longest = min(engine.max_model_len, cache.max_output_tokens(1))
    if device == "cpu":
        return [
            Round(min(batch, most), max(2, min(int(longest * prompt), 1024)), max(4, min(int(longest * output), 64)))
            for batch, prompt, output in ROUNDS
        ]
    num_slots = cache.pool.num_blocks * cache.block_size
    rounds = []
    for batch, prompt, output in GPU_ROUNDS:
        batch = min(batch, most, max(1, num_slots // (output + cache.block_size + 1)))
        room = min(longest, num_slots // batch - cache.block_size)
        output = max(1, min(output, room // 2))
        rounds.append(Round(batch, max(1, min(prompt, room - output)), output))
    return rounds


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step: what it was asked for, how long it took, and how long the host had been busy since the one before. A time
    of 0 is one that could not be told."""

    work: StepWork
    step_s: float
    host_s: float


class TimedExecutor:
    """Stands before an executor and notes the time of each step, from when it was submitted and the one before had
    ended.

    overlap   two steps are in flight. Then a step counts if the host waited for its result, and for the one before:
              a result that lay ready tells when the host came, not when the device was done. What the host does is
              all that it does between two results, submitting included
    """

    def __init__(
        self, inner: Executor, clock: Callable[[], float] = time.perf_counter, *, overlap: bool = False
    ) -> None:
        self.inner = inner
        self.overlap = overlap
        self.steps: list[MeasuredStep] = []
        self._clock = clock
        self.rest()

    def rest(self) -> None:
        """What passes until the next step is nobody's time."""
        self._ended_s: float | None = None
        self._waited = False  # for the last result
        self._flight: list[TimedRunning] = []

    def submit(self, plan: StepPlan) -> TimedRunning:
        now = self._clock()
        running = TimedRunning(self, self.inner.submit(plan), step_work(plan), now)
        if self._ended_s is not None and not self.overlap:
            running.host_s = now - self._ended_s
        running.is_behind = bool(self._flight)
        self._flight.append(running)
        return running

    def waits(self) -> None:
        """The host has done what it had to do."""
        if self.overlap and self._ended_s is not None and len(self._flight) > 1:
            self._flight[-1].host_s = self._clock() - self._ended_s

    def ended(self, running: TimedRunning, waited: bool) -> None:
        now = self._clock()
        counts = not self.overlap or (running.is_behind and waited and self._waited)
        step_s = now - max(running.begin_s, self._ended_s or 0.0) if counts else 0.0
        self.steps.append(MeasuredStep(running.work, step_s, running.host_s))
        self._ended_s, self._waited = now, waited
        self._flight = [other for other in self._flight if other is not running]

    def close(self) -> None:
        self.inner.close()


class TimedRunning:
    """A step under way, as its executor's, with the time. `is_behind` another that was in flight before it."""

    def __init__(self, executor: TimedExecutor, inner: StepHandle, work: StepWork, begin_s: float) -> None:
        self.work, self.begin_s, self.host_s, self.is_behind = work, begin_s, 0.0, False
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
        self._executor.waits()
        result = self._inner.result()
        self._executor.ended(self, waited)
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

    An engine with a window is measured with it. Prompts are random, so that no prefix is found.
    """
    overlap, engine.overlap = engine.overlap, device != "cpu"  # a CPU that plans beside a step takes from it
    timed = engine.executor = TimedExecutor(engine.executor, clock, overlap=engine.overlap)
    rounds = rounds_of(engine, device)
    rnd = random.Random(0)
    try:
        for repeat in range(-warm_up, repeats):
            for number, each in enumerate(rounds, 1 + (repeat + warm_up) * len(rounds)):
                progress(f"round {number} of {(repeats + warm_up) * len(rounds)}")
                with engine.gc_pause:  # as whoever serves has it
                    _work_through(engine, rnd, each)
                timed.rest()
            if repeat < 0:
                timed.steps.clear()
    finally:
        engine.executor, engine.overlap = timed.inner, overlap
    return timed.steps


def _work_through(engine: Engine, rnd: random.Random, each: Round) -> None:
    batch, num_prompt, num_output = each
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, temperature=0.0)
    # Of many lengths, so that terms can be told apart; and made here, where it is nobody's time.
    lengths = [max(1, int(num_prompt * rnd.uniform(0.5, 1.0))) for _ in range(batch)]
    prompts = [[rnd.randrange(engine.vocab_size) for _ in range(length)] for length in lengths]
    first = batch // 2 + 1
    each_step = max(1, 2 * (batch - first) // num_output)
    for i, prompt_token_ids in enumerate(prompts):
        # The others come while these decode, soon enough to be with them for a while: steps of both kinds of work.
        if i >= first and (i - first) % each_step == 0:
            engine.step()
        engine.add_request(f"calibrate-{i}", prompt_token_ids, params)
    while engine.has_work:
        engine.step()


def fit(steps: Sequence[MeasuredStep], *, move_s: float = 0.0) -> LinearCost:
    """The terms, none below 0, that lie closest to the steps, and those that lie closest to what the host needs between
    them. All steps with prompts count as much as all without, of which there are many more.

    Raises `UsageError` where no step's time could be told.
    """
    told = [s for s in steps if s.step_s > 0]
    if not told:
        raise UsageError(
            f"the host was later than the device in all of {len(steps)} steps, so none could be timed; leave out "
            "enforce_eager, or take a larger model"
        )
    columns = [
        (w.num_passes, w.num_few, w.num_new > 0, w.num_new, w.num_decoding, w.chunk_pairs, w.kv_tokens)
        for w in (s.work for s in told)
    ]
    rows, times = np.array(columns, dtype=float), np.array([s.step_s for s in told])
    terms = dict(zip(TERMS, relative(rows, times, _even(rows)).tolist(), strict=True))
    between = [(1, s.work.num_slices, s.work.num_chunks, s.host_s) for s in steps if s.host_s > 0]
    table = np.array(between or [(1, 0, 0, 1e-9)], dtype=float)
    rows, times = table[:, :-1], table[:, -1]
    host = dict(zip(HOST_TERMS, relative(rows, times, np.ones(len(rows))).tolist(), strict=True))
    return LinearCost(**terms, **host, move_s=move_s)


def _even(rows: np.ndarray) -> np.ndarray:
    chunks = rows[:, TERMS.index("chunk_s")] > 0
    weights: np.ndarray = np.where(chunks, 1 / max(1, chunks.sum()), 1 / max(1, (~chunks).sum())) ** 0.5
    return weights


def relative(rows: np.ndarray, times: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Nonnegative terms for which `rows @ terms` lies closest to `times`, where what is 10 % off counts the same for a
    short time as for a long one.

    Per cent of what is expected, not of what was measured: in those, a step held up by others would hardly count, and
    the sum over many steps would come out too low. So the fit is done again with what it gave.
    """
    expected = times
    for _ in range(REFITS):
        found = nonnegative(rows * (weights / expected)[:, None], weights * times / expected)
        expected = np.maximum(rows @ found, times.min())
    return found


def nonnegative(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Least squares of `rows @ x = times` for x >= 0, by leaving out, one at a time, the term that is most below it."""
    terms = list(range(rows.shape[1]))
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    found = np.zeros(rows.shape[1])
    while terms:
        part, *_ = np.linalg.lstsq(rows[:, terms] / scale[terms], times, rcond=None)
        if part.min() >= 0:
            found[terms] = part / scale[terms]
            break
        terms.pop(int(np.argmin(part)))
    return found


def median_error(cost: LinearCost, steps: Sequence[MeasuredStep]) -> float:
    """Median of how far off the fitted times are, as a share of the steps' own; 0 of none."""
    return statistics.median([abs(cost.work_s(s.work) / s.step_s - 1) for s in steps if s.step_s > 0] or [0.0])
