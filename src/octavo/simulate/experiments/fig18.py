"""Figure 18b: latency against block size."""

from __future__ import annotations

import math

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    OPT_13B,
    OURS,
    Figure,
    Paper,
    config_for,
    era_cost,
    poisson_trace,
    within,
)
from octavo.simulate.plot import Chart, Line
from octavo.simulate.report import normalized_latency
from octavo.simulate.simulation import Records, simulate

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORKLOADS = {"ShareGPT": (1.75, 1800.0), "Alpaca-like": (30.1, 600.0)}


def run(paper: Paper) -> Figure:
    figure = Figure(
        "fig18",
        "Latency against the size of a block",
        paper.about(
            OPT_13B, era_cost(OPT_13B), load=", ".join(f"{name} {rate:g}/s" for name, (rate, _) in WORKLOADS.items())
        ),
        notes=[
            "only the right arm of the curve is simulated, what large blocks waste in their tails: that small ones "
            "slow a kernel down depends on the kernel, which is not simulated. So the best size here is the smallest",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    lines = []
    found = iter(paper.each(_run, [(name, size) for name in WORKLOADS for size in SIZES]))
    for name in WORKLOADS:
        latencies = []
        for size in SIZES:
            seconds, unfilled = next(found)
            latencies.append(seconds)
            figure.add(OURS, f"{name}, blocks of {size}: s/token", seconds)
            figure.add(OURS, f"{name}, blocks of {size}: unfilled %", 100 * unfilled)
        lines.append(Line(name, SIZES, latencies))
    figure.charts.append(Chart(figure.title, "tokens a block", "s/token", lines=lines, log_x=True, log_y=True))
    return figure


def _run(paper: Paper, name: str, size: int) -> tuple[float, float]:
    """The normalised latency, and the unfilled share of the used slots."""
    rate, end_s = WORKLOADS[name][0], WORKLOADS[name][1] * paper.time
    num = int(rate * end_s * 1.2) + 100
    lengths = paper.sharegpt(num) if name == "ShareGPT" else traces.alpaca_like(num, paper.seed)
    config = config_for(OURS, OPT_13B, era_cost(OPT_13B), block_size=size)
    records = simulate(config, poisson_trace(lengths, rate, end_s, seed=paper.seed), interval_s=end_s / 500)
    return normalized_latency(records), unfilled(records)


def unfilled(records: Records) -> float:
    """Mean over time of the unfilled share of the slots in used blocks."""
    ratios = [s.split.internal / (s.split.tokens + s.split.internal) for s in within(records, 0.0, math.inf)]
    return sum(ratios) / len(ratios)
