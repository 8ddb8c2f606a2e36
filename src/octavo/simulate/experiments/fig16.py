"""Figure 16: translation with a shared prefix of one example or five."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    KNEE_S,
    LLAMA_13B,
    ORACLE,
    OURS,
    SEQUENCE_S,
    SLOW_SEQUENCE_S,
    Curve,
    Figure,
    Paper,
    config_for,
    curve,
    era_cost,
    latency_at,
    poisson_trace,
)
from octavo.simulate.plot import Chart

SECONDS = 150.0
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
    systems = (OURS, ORACLE)
    cases = [(system, case[0], case[2 + i]) for case in CASES.values() for i, system in enumerate(systems)]
    found = iter(paper.each(_curve, cases))
    for name, (prefix, theirs, *_) in CASES.items():
        curves = [next(found) for _ in systems]
        for system, each in zip(systems, curves, strict=True):
            figure.add(system, f"{name}, {prefix} tokens: requests/s", each.knee)
        figure.add(OURS, f"{name}: over {ORACLE}", curves[0].knee / curves[1].knee, theirs)
        lines = [each.line(system) for system, each in zip(systems, curves, strict=True)]
        figure.charts.append(Chart(f"{name}, {prefix} tokens", "requests/s", "s/token", lines=lines, top=1.0))
    slow = paper.each(_curve, [(*case[:2], case[2] * 0.75, SLOW_SEQUENCE_S) for case in cases])
    for i, (name, (_, theirs, *_)) in enumerate(CASES.items()):
        gain = slow[2 * i].knee / slow[2 * i + 1].knee
        figure.add(OURS, f"{name}, {SLOW_SEQUENCE_S * 1e3:.1f} ms a sequence: over {ORACLE}", gain, theirs)
    return figure


def _curve(paper: Paper, system: str, prefix: int, guess: float, sequence_s: float = SEQUENCE_S) -> Curve:
    return curve(partial(_latency, paper, system, prefix, sequence_s), guess)


def _latency(paper: Paper, system: str, prefix: int, sequence_s: float, rate: float) -> float:
    lengths = traces.lognormal("wmt-like", 40_000, (3.5, 0.5), (3.5, 0.5), paper.seed)
    arrivals = poisson_trace(lengths, rate, SECONDS * paper.time, seed=paper.seed, prefix=prefix)
    return latency_at(
        config_for(system, LLAMA_13B, era_cost(LLAMA_13B, sequence_s=sequence_s), prefixes=True), arrivals
    )
