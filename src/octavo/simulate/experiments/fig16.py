"""Figure 16: translation with a shared prefix of one example or five."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    KNEE_S,
    LLAMA_13B,
    ORACLE,
    OURS,
    Entry,
    Figure,
    Paper,
    config_for,
    era_cost,
    knee,
    latency_at,
    poisson_trace,
)
from octavo.simulate.plot import Chart, Line
from octavo.simulate.traces import Lengths

SECONDS = 300.0
CASES = {"one example": (80, 1.67, 44.0, 28.0), "five examples": (341, 3.58, 44.0, 10.0)}
"""Prefix tokens, the paper's gain over Orca (Oracle), and initial guesses of the rates."""


def run(paper: Paper) -> Figure:
    figure = Figure(
        "fig16",
        "Translation with a shared prefix",
        paper.about(LLAMA_13B, era_cost(LLAMA_13B), knee=f"the rate at {KNEE_S} s a token of output")
        | {"lengths": "synthetic: sentences and their translations of 38 tokens on average, lognormal"},
        notes=[
            "the paper translates WMT16's English to German; here are only lengths like those of its sentences",
            "the prefix is found by automatic prefix caching, computed once, by the first request",
        ],
    )
    lengths = traces.lognormal("wmt-like", 40_000, (3.5, 0.5), (3.5, 0.5), paper.seed)
    for name, (prefix, theirs, ours_about, oracle_about) in CASES.items():
        rates, lines = [], []
        for system, guess in ((OURS, ours_about), (ORACLE, oracle_about)):
            paper.progress(f"{system}, {name}")
            ask = partial(_latency, paper, system, lengths, prefix)
            rates.append(knee(ask, guess / 1.5, guess * 1.5, steps=5))
            figure.rows.append(Entry(system, f"{name}, {prefix} tokens: requests/s", None, rates[-1]))
            xs = [rates[-1] * share for share in (0.5, 0.75, 0.9, 0.97, 1.03, 1.1)]
            lines.append(Line(system, xs, [ask(x) for x in xs]))
        figure.rows.append(Entry(OURS, f"{name}: over {ORACLE}", theirs, rates[0] / rates[1]))
        figure.charts.append(Chart(f"{name}, {prefix} tokens", "requests/s", "s/token", lines=lines, top=1.0))
    return figure


def _latency(paper: Paper, system: str, lengths: Lengths, prefix: int, rate: float) -> float:
    arrivals = poisson_trace(lengths, rate, SECONDS * paper.time, seed=paper.seed, prefix=prefix)
    return latency_at(config_for(system, LLAMA_13B, era_cost(LLAMA_13B), prefixes=True), arrivals)
