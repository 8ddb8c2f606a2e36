"""Figure 15: blocks saved by sharing, for requests with several samples or beams."""

from __future__ import annotations

from octavo.simulate import traces
from octavo.simulate.experiments.beams import OPEN_SHARE, SyntheticBeams
from octavo.simulate.experiments.paper import (
    OPT_13B,
    OURS,
    Figure,
    Paper,
    config_for,
    era_cost,
    poisson_trace,
    within,
)
from octavo.simulate.plot import Bars, Chart
from octavo.simulate.simulation import simulate
from octavo.simulate.traces import Lengths

WIDTHS = (2, 4, 6)
PAPER: dict[tuple[str, bool], tuple[float | None, ...]] = {
    ("Alpaca-like", False): (6.09, 8.53, 9.79),
    ("Alpaca-like", True): (37.56, 53.13, 55.16),
    ("ShareGPT", False): (16.2, None, 30.5),
    ("ShareGPT", True): (44.3, None, 66.3),
}
RATES = {"Alpaca-like": 20.0, "ShareGPT": 2.0}
SECONDS = {"Alpaca-like": (60.0, 180.0), "ShareGPT": (300.0, 600.0)}


def run(paper: Paper) -> Figure:
    cost = era_cost(OPT_13B)
    figure = Figure(
        "fig15",
        "Blocks that sharing saves, % of those without",
        paper.about(
            OPT_13B,
            cost,
            load=", ".join(f"{name} {rate:g}/s" for name, rate in RATES.items()),
            beams=f"the next token is open at {OPEN_SHARE:.0%} of the positions",
        ),
        notes=[
            "beams: no model is there to rank candidates. How often the next token is open is one number, chosen so "
            "that six beams save what the paper's did, on both traces; fewer beams follow from it",
            "of ShareGPT the paper gives the ends of the range; they stand at 2 and 6",
            "Alpaca's lengths are synthetic: lognormal, with the means that the paper gives",
        ],
    )
    found = iter(paper.each(saving, [(name, width, beams) for name, beams in PAPER for width in WIDTHS]))
    for (name, beams), theirs in PAPER.items():
        kind = "beam search" if beams else "parallel sampling"
        ours = [100 * next(found) for _ in WIDTHS]
        for width, value, percent in zip(WIDTHS, theirs, ours, strict=True):
            figure.add(OURS, f"{name}, {kind} of {width} %", percent, value)
        labels = [f"{kind} {width}" for width in WIDTHS]
        bars = [Bars("paper", [value or 0.0 for value in theirs]), Bars("Octavo's simulator", ours)]
        figure.charts.append(Chart(f"{name}, {kind}", "", "% of blocks", bars=bars, labels=labels))
    return figure


def saving(paper: Paper, name: str, width: int, beams: bool) -> float:
    """1 - 1 / mean(block table entries / blocks in use), as in the artifact."""
    begin_s, end_s = (seconds * paper.time for seconds in SECONDS[name])
    rate = RATES[name]
    num = int(rate * end_s * 1.5) + 100
    lengths: Lengths = paper.sharegpt(num) if name == "ShareGPT" else traces.alpaca_like(num, paper.seed)
    arrivals = poisson_trace(lengths, rate, end_s, seed=paper.seed, n=width, beams=beams)
    tokens = SyntheticBeams(seed=paper.seed) if beams else None
    config = config_for(OURS, OPT_13B, era_cost(OPT_13B), swap=True)
    records = simulate(config, arrivals, until_s=end_s, token_source=tokens)
    ratios = [(s.num_used + s.num_saved) / s.num_used for s in within(records, begin_s, end_s)]
    return 1 - len(ratios) / sum(ratios)
