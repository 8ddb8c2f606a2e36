"""Figure 14: sustained rate for requests with several samples or beams."""

from __future__ import annotations

from functools import partial

from octavo.simulate import traces
from octavo.simulate.experiments.beams import SyntheticBeams
from octavo.simulate.experiments.paper import (
    KNEE_S,
    OPT_13B,
    ORACLE,
    OURS,
    Entry,
    Figure,
    Paper,
    config_for,
    era_cost,
    knee,
    poisson_trace,
)
from octavo.simulate.plot import Bars, Chart
from octavo.simulate.report import normalized_latency
from octavo.simulate.simulation import simulate
from octavo.simulate.traces import Lengths

SECONDS = {False: 240.0, True: 60.0}
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
            "traces of beams last a minute, of samples four: rates by themselves are too high, ratios are fair",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    lengths = traces.alpaca_like(40_000, paper.seed)
    gains = []
    for width, beams, ours, theirs in CASES:
        name = f"{'beam search' if beams else 'parallel sampling'} of {width}"
        rates = []
        for system, guess in ((OURS, ours), (ORACLE, theirs)):
            paper.progress(f"{system}, {name}")
            ask = partial(_latency, paper, system, lengths, width, beams)
            rates.append(knee(ask, guess / 1.4, guess * 1.4, steps=3 if beams else 4))
            figure.rows.append(Entry(system, f"{name}: requests/s", None, rates[-1]))
        gains.append(rates[0] / rates[1])
        figure.rows.append(Entry(OURS, f"{name}: over {ORACLE}", PAPER.get((width, beams)), gains[-1]))
    labels = [f"{'beam' if beams else 'n'} {width}" for width, beams, _, _ in CASES]
    bars = [Bars("gain over Oracle", gains)]
    figure.charts.append(Chart(figure.title, "", "times", bars=bars, labels=labels))
    return figure


def _latency(paper: Paper, system: str, lengths: Lengths, width: int, beams: bool, rate: float) -> float:
    """Normalised by the length of a sample; a request has several."""
    seconds = SECONDS[beams] * paper.time
    arrivals = poisson_trace(lengths, rate, seconds, seed=paper.seed, n=width, beams=beams)
    tokens = SyntheticBeams(seed=paper.seed) if beams else None
    config = config_for(system, OPT_13B, era_cost(OPT_13B), swap=width > 1)
    records = simulate(config, arrivals, token_source=tokens, interval_s=1e9)
    return normalized_latency(records) * width
