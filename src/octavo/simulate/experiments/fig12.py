"""Figure 12: latency against request rate for five systems, three models and two traces, and its sensitivity to the
length of a step."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    FT,
    KNEE_S,
    MAX,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    OURS,
    PASS_SHARE,
    POW2,
    Curve,
    Figure,
    Paper,
    Server,
    config_for,
    curve,
    era_cost,
    latency_at,
    poisson_trace,
)
from octavo.simulate.plot import Chart

SYSTEMS = (OURS, ORACLE, POW2, MAX, FT)
SHAREGPT, ALPACA = "ShareGPT", "Alpaca-like"
SECONDS = {SHAREGPT: 900.0, ALPACA: 150.0}
SHARES = (0.35, PASS_SHARE, 0.8)
"""Shares of the peak that weights reach: the middle one is the headline, the others the band."""
RANGES = {ORACLE: (1.7, 2.7), MAX: (2.7, 8.0), FT: (1.0, 22.0)}
"""Section 6.2: Octavo's rate over these, of ShareGPT, from the least to the most."""
PLOTS: tuple[tuple[Server, str, tuple[float, ...], tuple[float | None, ...]], ...] = (
    (OPT_13B, SHAREGPT, (2.0, 1.0, 0.8, 0.6, 0.19), (2.0, 1.5, 0.9, 0.75, 0.35)),
    (OPT_13B, ALPACA, (43.0, 24.0, 16.0, 3.6, 1.3), (31.5, 24.0, 18.0, 5.0, 3.0)),
    (OPT_66B, SHAREGPT, (1.0, 0.5, 0.4, 0.3, 0.07), (1.0, 0.5, 0.35, 0.3, None)),
    (OPT_66B, ALPACA, (21.0, 12.0, 8.0, 1.7, 0.6), (20.0, 12.0, 7.0, None, 2.5)),
    (OPT_175B, SHAREGPT, (4.5, 2.8, 2.2, 1.8, 0.6), (3.0, 1.8, 1.5, 1.25, None)),
    (OPT_175B, ALPACA, (65.0, 48.0, 42.0, 11.0, 4.0), (22.0, 22.0, 19.0, 7.0, 5.0)),
)
"""Server, trace, initial guesses of the systems' rates, and the highest rates that the paper's artifact sweeps."""


def run(paper: Paper) -> Figure:
    figure = Figure(
        "fig12",
        "Latency against the rate of requests",
        paper.about(OPT_13B, era_cost(OPT_13B), knee=f"the rate at {KNEE_S} s a token of output"),
        notes=[
            "the length of a step is an assumption; the last rows show the ratios for others",
            "the paper's rates are the highest that its artifact sweeps, near the knee; its ratios are the ranges that "
            "it gives for ShareGPT over its models",
            "FasterTransformer's answers leave when they are done, not with the batch: its latency is flattered",
            "OPT-175B with Alpaca has memory to spare, so that computing is the limit: the paper's exception",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    cases = [
        (server, name, system, share, guess)
        for share in (PASS_SHARE, *(share for share in SHARES if share != PASS_SHARE))
        for server, name, guesses, _ in (PLOTS if share == PASS_SHARE else PLOTS[:1])
        for system, guess in zip(SYSTEMS, guesses, strict=True)
    ]
    found = dict(zip((case[:4] for case in cases), paper.each(_curve, cases), strict=True))
    for server, name, _, theirs in PLOTS:
        curves = [found[server, name, system, PASS_SHARE] for system in SYSTEMS]
        _compare(figure, server, name, PASS_SHARE, curves, theirs)
        lines = [each.line(system) for system, each in zip(SYSTEMS, curves, strict=True)]
        title = f"{server.model.name.upper()}, {name}"
        figure.charts.append(Chart(title, "requests/s", "s/token, normalised latency", lines=lines, top=1.0))
    for share in SHARES:
        if share != PASS_SHARE:
            curves = [found[OPT_13B, SHAREGPT, system, share] for system in SYSTEMS]
            _compare(figure, OPT_13B, SHAREGPT, share, curves, (None,) * len(SYSTEMS))
    return figure


def _compare(
    figure: Figure, server: Server, name: str, share: float, curves: list[Curve], theirs: tuple[float | None, ...]
) -> None:
    """The sustained rates of all systems, and Octavo's relative to the others."""
    about = f"{server.model.name.upper()}, {name}, step {era_cost(server, share=share).pass_s * 1e3:.0f} ms"
    for system, each, rate in zip(SYSTEMS, curves, theirs, strict=True):
        figure.add(system, f"{about}: requests/s", each.knee, rate)
    for system, each in zip(SYSTEMS[1:], curves[1:], strict=True):
        ratio = curves[0].knee / each.knee
        figure.add(OURS, f"{about}: over {system}", ratio, RANGES.get(system) if name == SHAREGPT else None)


def _curve(paper: Paper, server: Server, name: str, system: str, share: float, guess: float) -> Curve:
    return curve(partial(_latency, paper, server, name, system, share), guess * (share / PASS_SHARE) ** 0.65)


def _latency(paper: Paper, server: Server, name: str, system: str, share: float, rate: float) -> float:
    lengths = paper.sharegpt(20_000) if name == SHAREGPT else traces.alpaca_like(60_000, paper.seed)
    config = config_for(system, server, era_cost(server, share=share), alpaca=name == ALPACA)
    return latency_at(config, poisson_trace(lengths, rate, SECONDS[name] * paper.time, seed=paper.seed))
