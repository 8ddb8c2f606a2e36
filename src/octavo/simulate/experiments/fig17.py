"""Figure 17: a chatbot whose prompts are the last 1,024 tokens of the conversation."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.paper import (
    KNEE_S,
    MAX,
    OPT_13B,
    ORACLE,
    OURS,
    POW2,
    Curve,
    Figure,
    Paper,
    config_for,
    curve,
    era_cost,
    latency_at,
)
from octavo.simulate.plot import Chart

SECONDS = 900.0
NEW_CHANCES = (0.5, 0.1, 0.03)
"""Probability of a new conversation, for all systems: the artifact's for vLLM, the artifact's for the Orcas, and one
with which nearly all prompts have 1,024 tokens."""
CACHED = f"{OURS}, prefix caching"
PAPER_GAIN = 2.0
SYSTEMS = {
    OURS: (1.31, 0.87, 0.82),
    CACHED: (1.36, 0.95, 0.88),
    ORACLE: (0.81, 0.61, 0.58),
    POW2: (0.73, 0.59, 0.57),
    MAX: (0.6, 0.56, 0.56),
}
"""Initial guesses of the rates."""


def run(paper: Paper) -> Figure:
    figure = Figure(
        "fig17",
        "A chatbot",
        paper.about(OPT_13B, era_cost(OPT_13B), knee=f"the rate at {KNEE_S} s a token of output"),
        notes=[
            "one chance of a new conversation for all systems is the headline. The artifact has 50 % for vLLM and "
            "10 % for the Orcas: shorter histories for vLLM. The last row does as it did",
            "the paper keeps nothing between rounds. Prefix caching does, but of a prompt that was cut at its head to "
            "1,024 tokens nothing is found again: positions have moved",
        ],
    )
    curves = iter(paper.each(_curve, [(system, chance) for chance in NEW_CHANCES for system in SYSTEMS]))
    found: dict[float, dict[str, float]] = {}
    for chance in NEW_CHANCES:
        lines = []
        knees = found[chance] = {}
        for system in SYSTEMS:
            each = next(curves)
            knees[system] = each.knee
            figure.add(system, f"{chance:.0%} new: requests/s", each.knee)
            lines.append(each.line(system))
        for system in (ORACLE, POW2, MAX):
            figure.add(OURS, f"{chance:.0%} new: over {system}", knees[OURS] / knees[system], PAPER_GAIN)
        figure.add(CACHED, f"{chance:.0%} new: over {ORACLE}", knees[CACHED] / knees[ORACLE])
        title = f"{chance:.0%} of the requests begin a conversation"
        figure.charts.append(Chart(title, "requests/s", "s/token", lines=lines, top=1.0))
    often, seldom = NEW_CHANCES[:2]
    gain = found[often][OURS] / found[seldom][ORACLE]
    figure.add(OURS, f"{often:.0%} new, over {ORACLE} at {seldom:.0%} new", gain, PAPER_GAIN)
    return figure


def _curve(paper: Paper, system: str, chance: float) -> Curve:
    return curve(partial(_latency, paper, system, chance), SYSTEMS[system][NEW_CHANCES.index(chance)])


def _latency(paper: Paper, system: str, chance: float, rate: float) -> float:
    times = traces.poisson(rate, paper.seed)
    lengths = paper.sharegpt(20_000)
    rounds = traces.chat(lengths, times, new_chance=chance, seed=paper.seed)
    config = config_for(OURS if system == CACHED else system, OPT_13B, era_cost(OPT_13B), prefixes=system == CACHED)
    return latency_at(config, traces.first_seconds(rounds, SECONDS * paper.time))
