"""Preemption by cost on a virtual clock: `auto` is about as fast as the better of recompute and swap, without
preempting a request repeatedly."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from statistics import median

import pytest

from octavo.config import EngineArgs
from octavo.core import events as ev
from octavo.simulate import traces
from octavo.simulate.devices import find_device
from octavo.simulate.models import find_model
from octavo.simulate.simulation import Records, Replica, SimConfig

NUM_TOKENS = 12_000
"""Slots of the pool: about two thirds of what the requests that run together would like."""


def finish(mode: str, block_size: int, device: str, num: int, **options: str) -> tuple[float, list[int]]:
    """Seconds until a ShareGPT-like load is served, and the number of preemptions per request."""
    args = EngineArgs(
        model="llama-3.1-8b",
        num_gpu_blocks_override=NUM_TOKENS // block_size,
        block_size=block_size,
        preemption_mode=mode,  # type: ignore[arg-type]
        swap_space=64,
        max_model_len=2048,
        max_num_seqs=256,
        **options,  # type: ignore[arg-type]
    )
    replica = Replica(SimConfig(find_model("llama-3.1-8b"), find_device(device), args), Records(), interval_s=1e9)
    preempted: Counter[str] = Counter()

    def listen(event: ev.Event) -> None:
        if isinstance(event, ev.Preempted):
            preempted[event.request_id] += 1

    replica.scheduler.events.subscribe(listen)
    arrivals = traces.from_lengths(traces.sharegpt_like(num, seed=1), traces.poisson(60.0, seed=2))
    for index, arrival in enumerate(islice(arrivals, num)):
        replica.run_until(arrival.time_s)
        replica.submit(index, arrival)
    replica.run_until(float("inf"))
    return replica.clock.now, [preempted[str(i)] for i in range(num)]


@pytest.mark.parametrize(
    ("device", "block_size", "num"),
    [
        ("h100", 16, 200),
        *(
            pytest.param(device, size, 1500, marks=pytest.mark.slow)
            for device in ("h100", "h200", "a100-40")
            for size in (8, 16, 64, 256)
        ),
    ],
)
def test_auto_is_as_fast_as_the_better_mode(device: str, block_size: int, num: int) -> None:
    seconds = {mode: finish(mode, block_size, device, num)[0] for mode in ("auto", "recompute", "swap")}
    assert seconds["auto"] <= 1.05 * min(seconds.values()), seconds


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("victim", ["latest", "least_lost"])
def test_no_request_is_preempted_repeatedly(mode: str, victim: str) -> None:
    _, preempted = finish(mode, 16, "h100", 300, preemption_victim=victim)
    assert sum(preempted) > 50
    assert max(preempted) <= 8 and median(preempted) <= 1, Counter(preempted)
