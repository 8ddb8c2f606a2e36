"""Figure 13: concurrent requests at a rate that overloads most systems."""

from __future__ import annotations

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    MAX,
    OPT_13B,
    ORACLE,
    OURS,
    POW2,
    SEQUENCE_S,
    SLOW_SEQUENCE_S,
    Figure,
    Paper,
    config_for,
    era_cost,
    poisson_trace,
    within,
)
from octavo.simulate.plot import Bars, Chart
from octavo.simulate.simulation import simulate

BEGIN_S, END_S = 300.0, 900.0
RATES = {"ShareGPT, 2/s": 2.0, "Alpaca-like, 30/s": 30.0}
PAPER = {  # ShareGPT at 2 requests/s, Alpaca at 30
    MAX: (7.00, 7.00),
    POW2: (9.81, 43.24),
    ORACLE: (13.62, 72.75),
    OURS: (30.42, 132.44),
}


def run(paper: Paper) -> Figure:
    cost = era_cost(OPT_13B)
    begin_s, end_s = BEGIN_S * paper.time, END_S * paper.time
    figure = Figure(
        "fig13",
        "Requests that run at a time",
        paper.about(OPT_13B, cost, load=f"mean of seconds {begin_s:.0f} to {end_s:.0f}"),
        notes=["Alpaca's lengths are synthetic: lognormal, with the means that the paper gives"],
    )
    found = paper.each(_running, [(system, name) for name in RATES for system in PAPER])
    for column, name in enumerate(RATES):
        ours = found[column * len(PAPER) : (column + 1) * len(PAPER)]
        for (system, theirs), value in zip(PAPER.items(), ours, strict=True):
            figure.add(system, name, value, theirs[column])
        bars = [Bars("paper", [theirs[column] for theirs in PAPER.values()]), Bars("Octavo's simulator", ours)]
        figure.charts.append(Chart(name, "", "requests", bars=bars, labels=list(PAPER)))
    slow = f", {SLOW_SEQUENCE_S * 1e3:.1f} ms a sequence"
    found = paper.each(_running, [(system, name, SLOW_SEQUENCE_S) for name in RATES for system in (ORACLE, OURS)])
    for i, (name, system) in enumerate((name, system) for name in RATES for system in (ORACLE, OURS)):
        figure.add(system, name + slow, found[i], PAPER[system][i // 2])
    return figure


def _running(paper: Paper, system: str, workload: str, sequence_s: float = SEQUENCE_S) -> float:
    """Mean number of running requests."""
    begin_s, end_s, rate = BEGIN_S * paper.time, END_S * paper.time, RATES[workload]
    num = int((rate + 3) * end_s) + 100
    lengths = paper.sharegpt(num) if "ShareGPT" in workload else traces.alpaca_like(num, paper.seed)
    arrivals = poisson_trace(lengths, rate, end_s, seed=paper.seed)
    records = simulate(config_for(system, OPT_13B, era_cost(OPT_13B, sequence_s=sequence_s)), arrivals, until_s=end_s)
    samples = within(records, begin_s, end_s)
    return sum(s.num_running for s in samples) / len(samples)
