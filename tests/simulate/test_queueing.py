"""The simulator against queueing theory."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.simulate.cost import LinearCost
from octavo.simulate.devices import DEVICES
from octavo.simulate.models import MODELS
from octavo.simulate.report import ttft
from octavo.simulate.simulation import SimConfig, simulate
from octavo.simulate.traces import FIRST_TOKEN, Arrival, poisson

SERVICE_S = 0.1
NUM_SIMULATED, NUM_QUEUED = 5_000, 4_000_000


def simulated_waits(times: list[float]) -> np.ndarray:
    """Waits in the simulator of requests of one step of `SERVICE_S` each, one at a time."""
    args = EngineArgs(
        model="opt-13b", num_gpu_blocks_override=64, max_num_seqs=1, decode_window=1, async_scheduling=False
    )
    cost = LinearCost(pass_s=SERVICE_S, new_s=0.0, decode_s=0.0)
    arrivals = (Arrival(time_s, ((FIRST_TOKEN + i, 8),), 1) for i, time_s in enumerate(times))
    records = simulate(SimConfig(MODELS["opt-13b"], DEVICES["a100-40"], args, cost=cost), arrivals, interval_s=1e9)
    assert len(records) == len(times)
    return ttft(records) - SERVICE_S


def queue_waits(times: np.ndarray) -> np.ndarray:
    """Waits in a first-come, first-served queue, by the work that arrived less the work done."""
    backlog = np.concatenate([[0.0], np.cumsum(SERVICE_S - np.diff(times))])
    waits: np.ndarray = backlog - np.minimum.accumulate(backlog)
    return waits


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
def test_mean_wait_is_that_of_an_m_d_1_queue(load: float) -> None:
    """Each simulated wait is that of a queue, whose mean wait is load x service / (2 (1 - load)) within 3 %.

    At a load of 0.9 waits are so correlated that this takes millions of requests: the queue has them, and the
    simulator the first.
    """
    times = np.fromiter(islice(poisson(load / SERVICE_S), NUM_QUEUED), float)
    waits = queue_waits(times)
    assert simulated_waits(times[:NUM_SIMULATED].tolist()) == pytest.approx(waits[:NUM_SIMULATED], abs=1e-6)
    assert waits.mean() == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.03)
