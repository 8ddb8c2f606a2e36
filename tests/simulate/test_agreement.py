"""`octavo simulate`, `plan` and `doctor` know the same models, and count the same blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.checkpoint import catalog
from octavo.cli.commands.simulate import setup_of
from octavo.cli.main import run
from octavo.config import EngineArgs
from octavo.doctor import examine
from octavo.errors import MemoryBudgetError
from octavo.simulate.devices import DEVICES
from octavo.simulate.models import MODELS
from octavo.simulate.planner import Planner
from octavo.simulate.report import SLO
from octavo.simulate.traces import from_lengths, poisson, sharegpt_like
from tests.models.tiny import make_tiny_checkpoint

OPTIONS = ({}, {"block_size": 32, "max_num_seqs": 64}, {"gpu_memory_utilization": 0.8, "max_model_len": 4096})


@pytest.mark.parametrize("gpu", ["h200", "a100-40", "l40s"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b", "smollm2-135m-instruct", "opt-13b"])
def test_blocks_agree(model: str, gpu: str) -> None:
    for options in OPTIONS:
        report = examine(EngineArgs(model=model, **options), gpu)
        assert report.budget is not None and report.fits
        setup = setup_of(model, gpu, options)
        assert setup.num_blocks() == report.budget.num_blocks
        assert setup.model.spec is not None
        assert setup.model.spec.weight_bytes(2, device="cuda") == report.need.weights
    arrivals = list(from_lengths(sharegpt_like(5), poisson(1.0)))
    answer = Planner(setup.model, arrivals, SLO(1.0), devices=[DEVICES[gpu]]).search()
    assert answer.best is not None and answer.best.num_blocks == setup_of(model, gpu, answer.best.settings).num_blocks()


def test_a_length_that_does_not_fit_is_refused_as_by_doctor() -> None:
    report = examine(EngineArgs(model="llama-3.1-8b", max_model_len=100_000), "l4")
    assert not report.fits
    with pytest.raises(MemoryBudgetError, match="the largest max_model_len that fits"):
        setup_of("llama-3.1-8b", "l4", {"max_model_len": 100_000})


@pytest.mark.parametrize("model", [*catalog.names(), *MODELS])
def test_every_name_works_without_files(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    run(["doctor", model, "--gpu", "b200", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["num_params"] == setup_of(model, "b200", {"num_gpu_blocks_override": 9}).model.num_params


def test_blocks_agree_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gib in (3, 30):
        for module in ("octavo.doctor", "octavo.simulate.simulation"):
            monkeypatch.setattr(f"{module}.free_memory", lambda gib=gib: gib << 30)
        budget = examine(EngineArgs(model="smollm2", device="cpu")).budget
        assert budget is not None and setup_of("smollm2", "cpu", {}).num_blocks() == budget.num_blocks


def test_a_local_directory_wins_over_a_built_in_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(make_tiny_checkpoint("llama", tmp_path / "qwen3-0.6b").parent)
    report = examine(EngineArgs(model="qwen3-0.6b"), "l4")
    setup = setup_of("qwen3-0.6b", "l4", {})
    assert report.budget is not None and setup.num_blocks() == report.budget.num_blocks
    assert setup.model.num_params == report.spec.num_params < 1e6
