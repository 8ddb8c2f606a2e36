"""The paper's figures on short traces: properties that hold at any length. `octavo reproduce` runs them in full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.simulate.experiments import ALL, beams, experiment, fig15, fig17
from octavo.simulate.experiments.paper import (
    FT,
    MAX,
    OPT_13B,
    ORACLE,
    OURS,
    POW2,
    Entry,
    Figure,
    PaddedCost,
    Paper,
    config_for,
    era_cost,
    knee,
    latency_at,
    poisson_trace,
)
from octavo.simulate.report import normalized_latency
from octavo.simulate.simulation import simulate
from octavo.simulate.traces import sharegpt_like


def ours_of(figure: Figure, system: str, metric: str) -> float:
    return next(row.ours for row in figure.rows if (row.system, row.metric) == (system, metric))


@pytest.fixture(scope="module")
def waste() -> Figure:
    return experiment("fig2")(Paper(time=0.5))


def test_waste_matches_the_paper(waste: Figure) -> None:
    """Figure 2 within 6 points, from 18 percentiles of the lengths and half of the time."""
    for row in waste.rows:
        assert isinstance(row.paper, float) and abs(row.ours - row.paper) < 6, row
    for system in (OURS, ORACLE, POW2, MAX):
        shares = [row.ours for row in waste.rows if row.system == system]
        assert sum(shares) == pytest.approx(100) and min(shares) >= 0


def test_figure_is_written_and_printed(waste: Figure, tmp_path: Path) -> None:
    waste.write(tmp_path / "deep")
    written = json.loads((tmp_path / "deep" / "fig2.json").read_text())
    assert written["figure"] == "fig2" and written["setup"]["seed"] == 0
    assert set(written["rows"][0]) == {"system", "metric", "paper", "ours"}
    ElementTree.parse(tmp_path / "deep" / "fig2.svg")
    text = "\n".join(waste.lines())
    assert "Orca (Max)" in text and "tokens %" in text and "33.4 ms" in text


def test_differences_are_points_or_per_cent() -> None:
    assert Entry("a", "b %", 40.0, 38.5).difference() == "-1.5"
    assert Entry("a", "b", 40.0, 50.0).difference() == "+25%"
    assert Entry("a", "b", None, 50.0).difference() == ""
    for ours, where in ((1.6, "below"), (2.7, "within"), (2.8, "above")):
        assert Entry("a", "b", (1.7, 2.7), ours).difference() == where


def test_batch_sizes_are_in_the_order_of_the_paper() -> None:
    """Figure 13: Max runs 7 requests, Octavo far more than Oracle."""
    figure = experiment("fig13")(Paper(time=0.12))
    for workload in ("ShareGPT, 2/s", "Alpaca-like, 30/s"):
        running = [ours_of(figure, system, workload) for system in (MAX, POW2, ORACLE, OURS)]
        assert running == sorted(running) and 6.5 <= running[0] <= 7
    assert ours_of(figure, OURS, "ShareGPT, 2/s") > 1.5 * ours_of(figure, ORACLE, "ShareGPT, 2/s")


def test_rate_sustained_by_octavo_overloads_the_baselines() -> None:
    """Figure 12 at 1.5 requests/s: Octavo sustains it, and the others are in the order of the paper."""
    latencies = []
    for system in (OURS, ORACLE, POW2, MAX, FT):
        config = config_for(system, OPT_13B, era_cost(OPT_13B))
        latencies.append(normalized_latency(simulate(config, poisson_trace(sharegpt_like(1000), 1.5, 150.0))))
    assert latencies == sorted(latencies)
    assert latencies[0] < 0.12 and latencies[1] > 3 * latencies[0]


def test_sharing_saves_as_much_as_in_the_paper() -> None:
    """Figure 15: parallel sampling within 5 points, beams of 2 within 6."""
    paper = Paper(time=0.15)
    assert 100 * fig15.saving(paper, "Alpaca-like", 2, False) == pytest.approx(6.09, abs=5)
    assert 100 * fig15.saving(paper, "ShareGPT", 2, False) == pytest.approx(16.2, abs=5)
    assert 100 * fig15.saving(paper, "Alpaca-like", 2, True) == pytest.approx(37.56, abs=6)


@pytest.mark.slow
def test_more_open_positions_make_beams_share_more(monkeypatch: pytest.MonkeyPatch) -> None:
    savings = []
    for share in (0.02, 0.5):
        monkeypatch.setattr(beams, "OPEN_SHARE", share)
        savings.append(fig15.saving(Paper(time=0.1), "Alpaca-like", 2, True))
    assert 0.1 < savings[0] < savings[1] - 0.05 < 0.5, "two beams share half of all at most"


def test_swap_time_depends_on_block_size_and_recompute_time_does_not() -> None:
    figure = experiment("fig19")(Paper(time=0.02))
    metric = "256 tokens, blocks of {}: ms"
    apart, whole = ("swap, K and V of each layer apart", "swap, a block in one piece")
    assert ours_of(figure, "recompute", metric.format(1)) == ours_of(figure, "recompute", metric.format(256))
    assert ours_of(figure, apart, metric.format(1)) == pytest.approx(135, rel=0.15)  # read off the paper's plot
    assert ours_of(figure, apart, metric.format(256)) < 20
    assert ours_of(figure, whole, metric.format(1)) < 20


def test_prompt_of_1024_reserves_the_same_in_all_orcas() -> None:
    """Figure 17: prompt and any output exceed 1,024 tokens, so that Oracle's chunk equals Max's."""
    paper = Paper(time=0.1)
    oracle, most = (fig17._latency(paper, system, 0.03, 0.5) for system in (ORACLE, MAX))
    ours = fig17._latency(paper, OURS, 0.03, 0.5)
    assert ours < oracle <= most * 1.02


def test_overload_is_known_before_its_end() -> None:
    """A run ends at a mean of 1 s a token, and below that it has the latency of the whole trace."""
    config, lengths = config_for(MAX, OPT_13B, era_cost(OPT_13B)), sharegpt_like(1000)
    for rate, is_overload in ((0.3, False), (1.5, True)):
        records = simulate(config, poisson_trace(lengths, rate, 300.0), interval_s=1e9)
        found, whole = latency_at(config, poisson_trace(lengths, rate, 300.0)), normalized_latency(records)
        assert 1 < found < 1.3 < whole if is_overload else found == pytest.approx(whole)


def test_padding_has_a_cost() -> None:
    """A batch of prompts of 3 and 1,000 tokens costs two of 1,000, and its last token a row for each."""
    from array import array

    from octavo.core.plan import StepPlan

    cost, plan = era_cost(OPT_13B), StepPlan()
    plan.rows, plan.starts, plan.counts, plan.num_sampled = [0, 1], [0, 0], [3, 1000], [1, 1]
    plan.host_tokens = {0: array("i", [1] * 3), 1: array("i", [1] * 1000)}
    padded = PaddedCost(cost)
    assert padded.step_s(plan) == pytest.approx(cost.pass_s + 2000 * (cost.new_s + cost.kv_s))
    late = StepPlan()
    late.rows, late.starts, late.counts, late.num_sampled = [1], [1200], [1], [1]
    assert padded.step_s(late) == pytest.approx(cost.pass_s + 2 * (cost.decode_s + 1201 * cost.kv_s))


def test_request_level_batches_wait_for_each_other() -> None:
    config = config_for(FT, OPT_13B, era_cost(OPT_13B))
    records = simulate(config, poisson_trace(sharegpt_like(100), 0.5, 100.0), interval_s=0.5)
    assert max(s.num_running for s in records.samples) == OPT_13B.batch_sizes[0]
    assert any(1 <= s.num_running < 5 and s.num_waiting for s in records.samples), "rows stand empty while others wait"


def test_knee_is_bisected() -> None:
    asked = []

    def latency(rate: float) -> float:
        asked.append(rate)
        return rate**2 / 8

    for low, high in ((1.0, 4.0), (0.1, 0.5), (7.0, 9.0)):
        assert knee(latency, low, high, steps=8) == pytest.approx(2.0, rel=0.02)
    assert len(asked) < 40


def test_every_figure_has_a_module() -> None:
    for name in ALL:
        assert callable(experiment(name))


def test_tables_of_the_page_are_those_of_the_figures() -> None:
    """docs/paper/README.md against the JSON beside it."""
    script = Path(__file__).parents[2] / "scripts" / "paper_tables.py"
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 0, "run scripts/paper_tables.py"
