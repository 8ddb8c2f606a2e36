"""What a step takes on a machine that is here: an engine works through small workloads, and a `LinearCost` is fitted.

The engine must not overlap steps, so that the time from a plan's submission to its result is the step's own. What lies
between two steps is the host's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import StepPlan, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor, Masks, Running
from octavo.simulate.cost import LinearCost, Work, work_of

TERMS = ("pass_s", "few_s", "chunk_s", "new_s", "decode_s", "pair_s", "kv_s")
"""Of a `LinearCost`, those that are fitted; the others are measured apart."""
HOST_TERMS = ("host_s", "host_slice_s", "host_chunk_s")
REFITS = 4
MOST_BATCH = 64
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
    (MOST_BATCH, 0.01, 0.03),
    (MOST_BATCH, 0.06, 0.03),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A step: what it was asked for, how long it took, and how long the host had been busy since the one before."""

    work: Work
    step_s: float
    host_s: float


class TimedExecutor:
    """Stands before an executor and notes the time of each step."""

    def __init__(self, inner: Executor, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner = inner
        self.steps: list[Measured] = []
        self._clock = clock
        self._ended_s: float | None = None

    def submit(self, plan: StepPlan) -> TimedRunning:
        now = self._clock()
        host_s = 0.0 if self._ended_s is None else now - self._ended_s
        return TimedRunning(self, self.inner.submit(plan), work_of(plan), now, host_s)

    def ended(self, running: TimedRunning) -> None:
        self._ended_s = self._clock()
        self.steps.append(Measured(running.work, self._ended_s - running.begin_s, running.host_s))

    def rest(self) -> None:
        """What passes until the next step is nobody's time."""
        self._ended_s = None

    def close(self) -> None:
        self.inner.close()


class TimedRunning:
    """A step under way, as its executor's, with the time."""

    def __init__(self, executor: TimedExecutor, inner: Running, work: Work, begin_s: float, host_s: float) -> None:
        self.work, self.begin_s, self.host_s = work, begin_s, host_s
        self._executor, self._inner = executor, inner

    @property
    def done(self) -> bool:
        return self._inner.done

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        return self._inner.poll(timeout_s)

    def put(self, masks: Masks) -> None:
        self._inner.put(masks)

    def result(self) -> StepResult:
        result = self._inner.result()
        self._executor.ended(self)
        return result


def measure(
    engine: Engine,
    *,
    repeats: int = 2,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """Work through `ROUNDS`, so many times after one that does not count. The engine is idle, and is left so.

    An engine with a window is measured with it. Prompts are random, so that no prefix is found.
    """
    timed = TimedExecutor(engine.executor, clock)
    engine.executor = timed
    rnd = random.Random(0)
    try:
        for repeat in range(repeats + 1):
            for number, (batch, prompt, output) in enumerate(ROUNDS):
                progress(f"round {repeat * len(ROUNDS) + number + 1} of {(repeats + 1) * len(ROUNDS)}")
                with engine.garbage:  # as whoever serves has it
                    _round(engine, rnd, batch, prompt, output)
                timed.rest()
            if not repeat:
                timed.steps.clear()
    finally:
        engine.executor = timed.inner
    return timed.steps


def _round(engine: Engine, rnd: random.Random, batch: int, prompt: float, output: float) -> None:
    longest = min(engine.max_model_len, engine.scheduler.cache.longest_output(1))
    batch = min(batch, engine.scheduler.max_num_seqs)
    num_prompt = max(2, min(int(longest * prompt), 1024))
    num_output = max(4, min(int(longest * output), 64))
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, temperature=0.0)
    # Of many lengths, so that terms can be told apart; and made here, where it is nobody's time.
    lengths = [max(1, int(num_prompt * rnd.uniform(0.5, 1.0))) for _ in range(batch)]
    prompts = [[rnd.randrange(engine.vocab_size) for _ in range(length)] for length in lengths]
    for i, prompt_token_ids in enumerate(prompts):
        if i > batch // 2:  # the others come while these decode: steps of both kinds of work
            engine.step()
        engine.add(f"calibrate-{i}", prompt_token_ids, params)
    while engine.has_work:
        engine.step()


def fit(steps: Sequence[Measured], *, move_s: float = 0.0) -> LinearCost:
    """The terms, none below 0, that lie closest to the steps, and those that lie closest to what the host needs between
    them. All steps with prompts count as much as all without, of which there are many more."""
    works = [s.work for s in steps]
    columns = [
        (w.num_passes, w.num_few, w.num_new > 0, w.num_new, w.num_decoding, w.chunk_pairs, w.kv_tokens) for w in works
    ]
    rows, times = np.array(columns, dtype=float), np.array([s.step_s for s in steps])
    terms = dict(zip(TERMS, relative(rows, times, _even(rows)).tolist(), strict=True))
    between = [(1, w.num_slices, w.num_chunks, s.host_s) for s, w in zip(steps, works, strict=True) if s.host_s > 0]
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


def error(cost: LinearCost, steps: Sequence[Measured]) -> float:
    """Median of how far off the fitted times are, as a share of the steps' own."""
    return statistics.median([abs(cost.work_s(s.work) / s.step_s - 1) for s in steps])
