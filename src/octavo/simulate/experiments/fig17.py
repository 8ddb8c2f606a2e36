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
    Entry,
    Figure,
    Paper,
    config_for,
    era_cost,
    knee,
    latency_at,
)
from octavo.simulate.plot import Chart, Line
from octavo.simulate.traces import Lengths

SECONDS = 1800.0
NEW_CHANCES = (0.5, 0.1, 0.03)
"""Probability of a new conversation, for all systems: the artifact's for vLLM, the artifact's for the Orcas, and one
with which nearly all prompts have 1,024 tokens."""
CACHED = f"{OURS}, prefix caching"
PAPER_GAIN = 2.0
SYSTEMS = {OURS: 0.85, CACHED: 0.9, ORACLE: 0.55, POW2: 0.55, MAX: 0.55}


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
    lengths = paper.sharegpt(20_000)
    found: dict[float, dict[str, float]] = {}
    for chance in NEW_CHANCES:
        knees = found[chance] = {}
        lines = []
        for system, guess in SYSTEMS.items():
            paper.progress(f"{system}, {chance:.0%} new")
            ask = partial(_latency, paper, system, lengths, chance)
            knees[system] = knee(ask, guess / 1.4, guess * 1.2, steps=5)
            figure.rows.append(Entry(system, f"{chance:.0%} new: requests/s", None, knees[system]))
            xs = [knees[system] * share for share in (0.5, 0.75, 0.9, 1.1)]
            lines.append(Line(system, xs, [ask(x) for x in xs]))
        for system in (ORACLE, POW2, MAX):
            figure.rows.append(Entry(OURS, f"{chance:.0%} new: over {system}", PAPER_GAIN, knees[OURS] / knees[system]))
        figure.rows.append(Entry(CACHED, f"{chance:.0%} new: over {ORACLE}", None, knees[CACHED] / knees[ORACLE]))
        title = f"{chance:.0%} of the requests begin a conversation"
        figure.charts.append(Chart(title, "requests/s", "s/token", lines=lines, top=1.0))
    often, seldom = NEW_CHANCES[:2]
    gain = found[often][OURS] / found[seldom][ORACLE]
    figure.rows.append(Entry(OURS, f"{often:.0%} new, over {ORACLE} at {seldom:.0%} new", PAPER_GAIN, gain))
    return figure


def _latency(paper: Paper, system: str, lengths: Lengths, chance: float, rate: float) -> float:
    times = traces.poisson(rate, paper.seed)
    rounds = traces.chat(lengths, times, new_chance=chance, seed=paper.seed)
    config = config_for(OURS if system == CACHED else system, OPT_13B, era_cost(OPT_13B), prefixes=system == CACHED)
    return latency_at(config, traces.first_seconds(rounds, SECONDS * paper.time))
