"""Figure 14: sustained rate for requests with several samples or beams."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.beams import SyntheticBeams
from octavo.simulate.experiments.paper import (
    BRACKET,
    KNEE_S,
    OPT_13B,
    ORACLE,
    OURS,
    SEQUENCE_S,
    SLOW_SEQUENCE_S,
    Figure,
    Paper,
    config_for,
    era_cost,
    knee,
    latency_at,
    poisson_trace,
)
from octavo.simulate.plot import Bars, Chart

SECONDS = {False: 180.0, True: 60.0}
CASES = (  # width, beam search, and initial guesses of the rates: ours, theirs
    (1, False, 36.0, 20.0),
    (2, False, 22.0, 13.0),
    (4, False, 12.0, 7.0),
    (6, False, 8.0, 4.5),
    (2, True, 20.0, 10.0),
    (4, True, 12.0, 5.0),
    (6, True, 9.0, 3.0),
)
PAPER = {(1, False): 1.3, (6, True): 2.3}
"""Section 6.3: the gain over Orca (Oracle) grows from basic sampling to beam search of width 6."""


def run(paper: Paper) -> Figure:
    figure = Figure(
        "fig14",
        "Rate sustained, ours over Orca (Oracle)'s",
        paper.about(
            OPT_13B, era_cost(OPT_13B), knee=f"the rate at {KNEE_S} s a token of a sample", trace="Alpaca-like"
        ),
        notes=[
            "Orca's samples have a piece each, copied for nothing when they part: its copies are not charged",
            "beams by made-up candidates, as in figure 15",
            "traces of beams last a minute, of samples three: rates by themselves are too high, ratios are fair",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    cases = [
        (system, *case[:2], guess) for case in CASES for system, guess in zip((OURS, ORACLE), case[2:], strict=True)
    ]
    found = iter(paper.each(_knee, cases))
    gains = []
    for width, beams, *_ in CASES:
        name = f"{'beam search' if beams else 'parallel sampling'} of {width}"
        ours, theirs = next(found), next(found)
        figure.add(OURS, f"{name}: requests/s", ours)
        figure.add(ORACLE, f"{name}: requests/s", theirs)
        gains.append(ours / theirs)
        figure.add(OURS, f"{name}: over {ORACLE}", gains[-1], PAPER.get((width, beams)))
    slow = f"{SLOW_SEQUENCE_S * 1e3:.1f} ms a sequence"
    for width, beams in PAPER:
        rates = paper.each(
            _knee, [(*case[:3], case[3] * 0.8, SLOW_SEQUENCE_S) for case in cases if case[1:3] == (width, beams)]
        )
        name = f"{'beam search' if beams else 'parallel sampling'} of {width}"
        figure.add(OURS, f"{name}, {slow}: over {ORACLE}", rates[0] / rates[1], PAPER[width, beams])
    labels = [f"{'beam' if beams else 'n'} {width}" for width, beams, _, _ in CASES]
    bars = [Bars("gain over Oracle", gains)]
    figure.charts.append(Chart(figure.title, "", "times", bars=bars, labels=labels))
    return figure


def _knee(paper: Paper, system: str, width: int, beams: bool, guess: float, sequence_s: float = SEQUENCE_S) -> float:
    ask = partial(_latency, paper, system, width, beams, sequence_s)
    return knee(ask, guess / BRACKET, guess * BRACKET, steps=3)


def _latency(paper: Paper, system: str, width: int, beams: bool, sequence_s: float, rate: float) -> float:
    """Normalised by the length of a sample; a request has several."""
    seconds = SECONDS[beams] * paper.time
    lengths = traces.alpaca_like(40_000, paper.seed)
    arrivals = poisson_trace(lengths, rate, seconds, seed=paper.seed, n=width, beams=beams)
    tokens = SyntheticBeams(seed=paper.seed) if beams else None
    config = config_for(system, OPT_13B, era_cost(OPT_13B, sequence_s=sequence_s), swap=width > 1)
    return latency_at(config, arrivals, tokens)
