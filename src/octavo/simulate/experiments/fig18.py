"""Figure 18b: latency against block size, with two kernels: one that reads small blocks as fast as large ones, as
Octavo's on a GPU does (docs/paged-attention.md), and one that does not."""

from __future__ import annotations

import math
from dataclasses import replace

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
SLOWDOWN = {1: 4.6, 2: 2.4, 4: 1.4, 8: 1.1}
"""Time of the slow kernel over blocks of some sizes, relative to blocks of 16: Octavo's CPU kernel as measured in
docs/view.md."""
KERNELS = ("", ", slow kernel")
WORKLOADS = {"ShareGPT": (1.75, 1800.0), "Alpaca-like": (30.1, 600.0)}


def run(paper: Paper) -> Figure:
    figure = Figure(
        "fig18",
        "Latency against the size of a block",
        paper.about(
            OPT_13B, era_cost(OPT_13B), load=", ".join(f"{name} {rate:g}/s" for name, (rate, _) in WORKLOADS.items())
        ),
        notes=[
            "a kernel that is as fast over small blocks has no left arm, and its best size is the smallest",
            "the slow kernel reads K and V as Octavo's CPU kernel does: 4.6 times as long with blocks of 1 as of 16",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    lines = []
    found = iter(paper.each(_run, [(name, size, kernel) for name in WORKLOADS for kernel in KERNELS for size in SIZES]))
    for name, kernel in ((name, kernel) for name in WORKLOADS for kernel in KERNELS):
        latencies = []
        for size in SIZES:
            seconds, unfilled = next(found)
            latencies.append(seconds)
            figure.add(OURS, f"{name}{kernel}, blocks of {size}: s/token", seconds)
            if not kernel:
                figure.add(OURS, f"{name}, blocks of {size}: unfilled %", 100 * unfilled)
        lines.append(Line(name + kernel, SIZES, latencies))
    figure.charts.append(Chart(figure.title, "tokens a block", "s/token", lines=lines, log_x=True, log_y=True))
    return figure


def _run(paper: Paper, name: str, size: int, kernel: str) -> tuple[float, float]:
    """The normalised latency, and the unfilled share of the used slots."""
    rate, end_s = WORKLOADS[name][0], WORKLOADS[name][1] * paper.time
    num = int(rate * end_s * 1.2) + 100
    lengths = paper.sharegpt(num) if name == "ShareGPT" else traces.alpaca_like(num, paper.seed)
    cost = era_cost(OPT_13B)
    if kernel:
        cost = replace(cost, kv_s=cost.kv_s * SLOWDOWN.get(size, 1.0))
    config = config_for(OURS, OPT_13B, cost, block_size=size)
    records = simulate(config, poisson_trace(lengths, rate, end_s, seed=paper.seed), interval_s=end_s / 500)
    return normalized_latency(records), unfilled(records)


def unfilled(records: Records) -> float:
    """Mean over time of the unfilled share of the slots in used blocks."""
    ratios = [s.split.internal / (s.split.tokens + s.split.internal) for s in within(records, 0.0, math.inf)]
    return sum(ratios) / len(ratios)
