"""Figure 19: preemption by recomputation or by swapping, against block size."""

from __future__ import annotations

from dataclasses import replace

from octavo.simulate.experiments.paper import (
    COPY_S,
    KV_SHARE,
    LINK,
    OPT_13B,
    OURS,
    Figure,
    Paper,
    config_for,
    era_cost,
    move_s,
    poisson_trace,
)
from octavo.simulate.plot import Chart, Line
from octavo.simulate.report import normalized_latency
from octavo.simulate.simulation import simulate

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = 256
SLOW_LINK = 18e9
CROSSING = (16, 64)
"""Blocks at which the paper's two ways take about as long."""
RATE, SECONDS = 2.01, 600.0
APART, WHOLE = "swap, K and V of each layer apart", "swap, a block in one piece"
COPIES = {APART: 2 * OPT_13B.model.num_layers, WHOLE: 1}


def run(paper: Paper) -> Figure:
    cost = era_cost(OPT_13B)
    model = OPT_13B.model
    figure = Figure(
        "fig19",
        "Recompute against swap",
        paper.about(
            OPT_13B,
            cost,
            link=f"{LINK / 1e9:.0f} GB/s, {COPY_S * 1e6:.1f} us a copy",
            load=f"ShareGPT {RATE}/s, {SECONDS:.0f} s",
        ),
        notes=[
            "copies are charged by a model of the link: time of launching one, and bytes",
            "where a block lies in one piece over all layers, as Octavo's do, it is one copy instead of "
            f"{2 * model.num_layers}: then swapping does not suffer from small blocks",
            "the artifact's plot multiplies the times of recomputing by 0.9; here nothing is",
        ],
    )
    micro: dict[str, list[float]] = {"recompute": [], APART: [], WHOLE: []}
    weights_s = model.weight_bytes / (OPT_13B.device.bandwidth * KV_SHARE)  # without host time
    for size in SIZES:
        micro["recompute"].append(max(weights_s, cost.new_s * NUM_TOKENS))
        for name, count in COPIES.items():
            micro[name].append(2 * NUM_TOKENS / size * move_s(OPT_13B, size, count))
    for link in (LINK, SLOW_LINK):
        figure.add(
            "both", f"as fast at blocks of, {link / 1e9:.0f} GB/s", _crossing(micro["recompute"][0], link), CROSSING
        )
    seconds = iter(paper.each(_latency, [(name, size) for name in micro for size in SIZES]))
    latencies = {name: [next(seconds) for _ in SIZES] for name in micro}
    for name, values in micro.items():
        for size, value in zip(SIZES, values, strict=True):
            figure.add(name, f"{NUM_TOKENS} tokens, blocks of {size}: ms", 1e3 * value)
    for name, values in latencies.items():
        for size, value in zip(SIZES, values, strict=True):
            figure.add(name, f"end to end, blocks of {size}: s/token", value)
    for title, label, found, scale in (
        (f"{NUM_TOKENS} tokens", "ms, out and in again", micro, 1e3),
        (f"ShareGPT, {RATE} requests/s", "s/token", latencies, 1.0),
    ):
        lines = [Line(name, SIZES, [value * scale for value in values]) for name, values in found.items()]
        figure.charts.append(Chart(title, "tokens a block", label, lines=lines, log_x=True))
    return figure


def _crossing(recompute_s: float, link: float) -> float:
    """Tokens a block at which copying K and V of each layer apart takes as long as recomputing."""
    moved_s = 2 * NUM_TOKENS * OPT_13B.model.kv_cache(1).bytes_per_block / link
    return 2 * NUM_TOKENS * COPIES[APART] * COPY_S / (recompute_s - moved_s)


def _latency(paper: Paper, name: str, size: int) -> float:
    end_s = SECONDS * paper.time
    moved = replace(era_cost(OPT_13B), move_s=move_s(OPT_13B, size, COPIES[name]) if name in COPIES else 0.0)
    config = config_for(OURS, OPT_13B, moved, block_size=size, swap=name in COPIES)
    arrivals = poisson_trace(paper.sharegpt(int(3 * end_s) + 100), RATE, end_s, seed=paper.seed)
    return normalized_latency(simulate(config, arrivals, interval_s=1e9))
