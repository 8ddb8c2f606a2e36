"""Figure 2: contents of the KV cache's slots under a full queue, for the baselines and for paged blocks."""

from __future__ import annotations

from octavo.simulate.experiments.paper import (
    MAX,
    OPT_13B,
    ORACLE,
    OURS,
    POW2,
    Figure,
    Paper,
    config_for,
    era_cost,
    poisson_trace,
    within,
)
from octavo.simulate.plot import Bars, Chart
from octavo.simulate.report import memory_shares
from octavo.simulate.simulation import simulate

RATE = 4.0
BEGIN_S, END_S = 300.0, 900.0
PAPER = {  # token states, reservation, internal fragmentation, external fragmentation and others
    MAX: (20.4, 13.3, 57.3, 8.9),
    POW2: (26.8, 17.9, 13.6, 41.6),
    ORACLE: (38.2, 25.2, 0.0, 36.6),
    OURS: (96.3, None, None, 3.7),
}
PARTS = ("tokens", "reserved", "internal", "external")


def run(paper: Paper) -> Figure:
    cost = era_cost(OPT_13B)
    begin_s, end_s = BEGIN_S * paper.time, END_S * paper.time
    figure = Figure(
        "fig2",
        "What KV memory holds, % of its slots",
        paper.about(OPT_13B, cost, load=f"{RATE:g} requests/s, mean of seconds {begin_s:.0f} to {end_s:.0f}"),
        notes=["external fragmentation holds what is free, too: the queue is full, and no piece of it is of use"],
    )
    ours = dict(zip(PAPER, paper.each(_shares, [(system,) for system in PAPER]), strict=True))
    for system, theirs in PAPER.items():
        for part, value, theirs_value in zip(PARTS, ours[system], theirs, strict=True):
            if theirs_value is not None:
                figure.add(system, f"{part} %", value, theirs_value)
    bars = [Bars(part, [values[i] for values in ours.values()]) for i, part in enumerate(PARTS)]
    figure.charts.append(Chart(figure.title, "", "%", bars=bars, labels=list(ours), stacked=True, top=100))
    return figure


def _shares(paper: Paper, system: str) -> list[float]:
    """Percentages of `PARTS`."""
    begin_s, end_s = BEGIN_S * paper.time, END_S * paper.time
    arrivals = poisson_trace(paper.sharegpt(int(RATE * end_s * 1.5) + 100), RATE, end_s, seed=paper.seed)
    records = simulate(config_for(system, OPT_13B, era_cost(OPT_13B)), arrivals, until_s=end_s)
    split = memory_shares(within(records, begin_s, end_s))
    internal = 0.0 if system == OURS else split["internal"]
    rest = 1 - split["tokens"] - split["reserved"] - internal
    return [100 * float(part) for part in (split["tokens"], split["reserved"], internal, rest)]
