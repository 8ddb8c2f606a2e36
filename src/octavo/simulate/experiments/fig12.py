"""Figure 12: latency against request rate for five systems, and its sensitivity to constants."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    FT,
    KNEE_S,
    MAX,
    OPT_13B,
    OPT_175B,
    ORACLE,
    OURS,
    POW2,
    Entry,
    Figure,
    Paper,
    Server,
    config_for,
    era_cost,
    knee,
    latency_at,
    poisson_trace,
)
from octavo.simulate.plot import Chart, Line
from octavo.simulate.traces import Lengths

SYSTEMS = (OURS, ORACLE, POW2, MAX, FT)
RATES = {  # the paper's, of OPT-13B: ShareGPT, and Alpaca
    OURS: ((1.0, 1.25, 1.5, 1.75, 1.9, 2.0, 2.25), (20, 22.5, 25, 27.5, 29, 31.5, 36, 42)),
    ORACLE: ((0.5, 0.75, 0.9, 1.0, 1.25), (15, 17.5, 20, 22.5, 24)),
    POW2: ((0.25, 0.5, 0.7, 0.8, 0.9), (7.5, 10, 12, 14)),
    MAX: ((0.2, 0.4, 0.5, 0.6, 0.75), (2, 3, 4, 5)),
    FT: ((0.05, 0.1, 0.15, 0.2, 0.25, 0.3), (0.5, 1, 2, 3)),
}
SHARES = (0.35, 0.5, 0.8)
"""Shares of the peak that weights and prefill reach: the middle one is the headline, the others the band."""
RANGES = {ORACLE: "1.7 to 2.7", MAX: "2.7 to 8", FT: "up to 22"}


def run(paper: Paper) -> Figure:
    cost = era_cost(OPT_13B)
    figure = Figure(
        "fig12",
        "Latency against the rate of requests",
        paper.about(OPT_13B, cost, knee=f"the rate at {KNEE_S} s a token of output"),
        notes=[
            "the length of a step is an assumption; the band below shows the ratios for others",
            "the paper gives ranges over its models and traces, Octavo's rate over: "
            + ", ".join(f"{system} {text}" for system, text in RANGES.items()),
            "FasterTransformer's answers leave when they are done, not with the batch: its latency is flattered",
            "OPT-175B with Alpaca has memory to spare, so that computing is the limit: the paper's exception",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    for column, (name, duration_s) in enumerate((("ShareGPT", 3600.0), ("Alpaca-like", 600.0))):
        lengths = _lengths(paper, name, OPT_13B)
        lines = []
        for system in SYSTEMS:
            paper.progress(f"{system}, {name}")
            ask = partial(_latency, paper, system, OPT_13B, lengths, duration_s, 0.5, column == 1)
            rates = RATES[system][column]
            lines.append(Line(system, rates, [ask(rate) for rate in rates]))
        figure.charts.append(
            Chart(f"OPT-13B, {name}", "requests/s", "s/token, normalised latency", lines=lines, top=1.0)
        )
        for share in SHARES if column == 0 else (0.5,):
            _compare(paper, figure, name, OPT_13B, lengths, duration_s / 2, share, SYSTEMS)
    plenty = _lengths(paper, "Alpaca-like", OPT_175B)
    _compare(paper, figure, "Alpaca-like, OPT-175B", OPT_175B, plenty, 150.0, 0.5, (OURS, ORACLE, POW2))
    return figure


def _lengths(paper: Paper, name: str, server: Server) -> Lengths:
    if name == "ShareGPT":
        return paper.sharegpt(40_000)
    return traces.alpaca_like(120_000, paper.seed)


def _latency(
    paper: Paper,
    system: str,
    server: Server,
    lengths: Lengths,
    duration_s: float,
    share: float,
    alpaca: bool,
    rate: float,
) -> float:
    config = config_for(system, server, era_cost(server, share=share), alpaca=alpaca)
    return latency_at(config, poisson_trace(lengths, rate, duration_s * paper.time, seed=paper.seed))


def _compare(
    paper: Paper,
    figure: Figure,
    name: str,
    server: Server,
    lengths: Lengths,
    duration_s: float,
    share: float,
    systems: tuple[str, ...],
) -> None:
    """The sustained rates of all systems, and Octavo's relative to the others."""
    alpaca = name.startswith("Alpaca")
    step_ms = era_cost(server, share=share).pass_s * 1e3
    about = f"{name}, step {step_ms:.0f} ms"
    knees: dict[str, float] = {}
    for system in systems:
        paper.progress(f"{system}, {about}: the knee")
        guess = RATES[system][alpaca][-2] * (server.num_slots / OPT_13B.num_slots if server is not OPT_13B else 1.0)
        ask = partial(_latency, paper, system, server, lengths, duration_s, share, alpaca)
        knees[system] = knee(ask, guess / 2, guess * 1.5, steps=5)
        figure.rows.append(Entry(system, f"{about}: requests/s", None, knees[system]))
    for system in systems[1:]:
        figure.rows.append(Entry(OURS, f"{about}: over {system}", None, knees[OURS] / knees[system]))
