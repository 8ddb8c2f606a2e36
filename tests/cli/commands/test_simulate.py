"""`octavo simulate`, `octavo reproduce` and `octavo plan`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.bench.args import BenchArgs
from octavo.bench.samples import local_counter, sharegpt
from octavo.cli.commands.simulate import arrivals_of
from octavo.cli.main import run
from tests.engine.models import make_talking_checkpoint

Output = pytest.CaptureFixture[str]


def test_simulate_a_workload(capsys: Output, tmp_path: Path) -> None:
    report, plot = tmp_path / "r.json", tmp_path / "p.svg"
    line = ["simulate", "--requests", "50", "--rate", "5", "--slo", "ttft=1s", "--output", str(report)]
    assert run([*line, "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    first, *rest = text.splitlines()
    assert first.startswith("llama-3.1-8b on 1 x h200, ") and first.endswith(", trace sharegpt at 5 requests/s")
    assert rest[0] == "assumed        h200: 86% of 4,800 GB/s, 73% of 989 TFLOP/s, fitted to measurements"
    assert " requests/s meet ttft=1s\n" in text
    assert rest[1].startswith("50 requests in ") and "first token" in text and "memory" in text
    result = json.loads(report.read_text())
    assert result["num_requests"] == 50 and result["model"] == "llama-3.1-8b" and 0 < result["slo_kept"] <= 1
    ElementTree.parse(plot)


@pytest.mark.parametrize("workload", ["sharegpt", "alpaca", "prefix", "chat"])
def test_json_report_of_each_workload(capsys: Output, workload: str) -> None:
    assert run(["simulate", workload, "--requests", "40", "--rate", "20", "--gpu", "a100-80", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_requests"] == 40
    assert (result["hit_rate"] > 0.2) == (workload in ("prefix", "chat"))


def test_simulate_a_file_with_engine_options(capsys: Output, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i / 100},100,50\n" for i in range(1, 60))
    )
    line = ["simulate", str(trace), "--num-gpu-blocks-override", "40", "--preemption-mode", "swap", "--json"]
    assert run(line) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_blocks"] == 40 and result["num_requests"] == 59 and result["num_preempted"].get("swap", 0) > 0
    assert run([*line, "--replicas", "8", "--n", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 59


def test_report_names_the_router_and_the_hits_of_each_replica(capsys: Output) -> None:
    line = ["simulate", "prefix", "--requests", "40", "--replicas", "2"]
    for option, policy in ([], "affinity"), (["--dp-router", "round-robin"], "round-robin"):
        assert run([*line, *option, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["router"] == policy
        assert sum(replica["num_requests"] for replica in result["replicas"]) == 40
    assert [replica["num_requests"] for replica in result["replicas"]] == [20, 20]
    assert run([*line, "--dp-router", "least-loaded"]) == 0
    text = capsys.readouterr().out
    assert "\nrouter         least-loaded\n" in text and " a replica\n" in text
    assert run(["simulate", "prefix", "--requests", "40", "--json"]) == 0
    assert not {"router", "replicas"} & set(json.loads(capsys.readouterr().out))


USAGE_ERRORS = {
    "trace": (["simulate", "nowhere"], "no file or workload 'nowhere'; known: sharegpt"),
    "gpu": (["simulate", "--gpu", "h20"], "did you mean h200"),
    "slo": (["simulate", "--slo", "fast"], "pass times with units, s or ms, such as ttft=500ms"),
    "slo without units": (["simulate", "--slo", "ttft=500,tpot=50"], "ttft needs a unit: ttft=500ms or ttft=500s"),
    "slo of a plan": (["plan", "--trace", "chat", "--slo", "tpot=50"], "tpot needs a unit: tpot=50ms or tpot=50s"),
    "time unit of a workload": (
        ["simulate", "--time-unit", "ms"],
        "time_unit has no effect with the workload sharegpt",
    ),
    "rate": (["simulate", "--rate", "0"], "rate is 0.0, it must be above 0"),
    "requests": (["simulate", "--requests", "0"], "requests are 0"),
    "replicas": (["simulate", "--replicas", "0"], "replicas are 0"),
    "router": (["simulate", "--dp-router", "random"], "'random' is not one of"),
    "heads": (["simulate", "--tensor-parallel-size", "3"], "3 does not divide the model's 32 attention heads"),
    "block size": (["simulate", "--block-size", "3"], "power of two"),
    "seed": (["simulate", "--seed", "-1"], "invalid value for '--seed'"),
    "seed of figures": (["reproduce", "fig2", "--seed", "-1"], "invalid value for '--seed'"),
    "seed of a plan": (["plan", "--trace", "chat", "--slo", "ttft=1s", "--seed", "-1"], "invalid value for '--seed'"),
    "scale": (
        ["simulate", "prefix", "--scale", "0.5"],
        "scale is 0.5; it has no effect with the workload prefix",
    ),
    "scale 0": (["simulate", "--scale", "0"], "scale is 0.0; it has no effect with the workload sharegpt"),
    "scale of a plan": (["plan", "--trace", "chat", "--slo", "ttft=1s", "--scale", "2"], "scale is 2.0"),
    "burstiness": (
        ["simulate", __file__, "--burstiness", "0.5"],
        "burstiness is 0.5; it has no effect with a file",
    ),
    "burstiness 0": (["simulate", "--burstiness", "0"], "burstiness is 0.0, it must be above 0"),
    "no figure": (["reproduce"], "no figures; pass some of fig2, fig12, "),
    "figure": (["reproduce", "fig1"], "no experiment 'fig1'; known: fig2"),
    "time": (["reproduce", "fig2", "--time", "0"], "time is 0.0"),
    "lengths": (["reproduce", "fig2", "--lengths", "nowhere.npz"], "no file 'nowhere.npz'"),
    "share": (["plan", "--trace", "chat", "--slo", "ttft=1s", "--share", "2"], "share is 2.0"),
    "prices": (
        ["plan", "--trace", "chat", "--slo", "ttft=1s", "--prices", "nowhere"],
        "cannot read nowhere: No such file",
    ),
    "no prices": (["plan", "--trace", "chat", "--slo", "ttft=1s", "--prices", "/dev/null"], "/dev/null has no prices"),
    "cost": (["simulate", "--cost", "nowhere"], "cannot read nowhere: No such file or directory; run `octavo"),
}


@pytest.mark.parametrize("case", USAGE_ERRORS)
def test_usage_error_is_one_line(capsys: Output, case: str) -> None:
    line, message = USAGE_ERRORS[case]
    assert run(line) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.startswith("error: ")
        and message in captured.err
        and captured.err.count("\n") == 1
    )


def test_model_that_does_not_fit_is_a_failure(capsys: Output) -> None:
    assert run(["simulate", "--model", "opt-175b", "--gpu", "l4"]) == 1
    error = capsys.readouterr().err
    assert "weights take 325.23 GiB" in error and "run `octavo doctor opt-175b` for flags" in error


def test_reproduce_does_not_write_to_docs(capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "paper").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", "fig2", "--time", "0.05"]) == 0
    assert not list((tmp_path / "docs" / "paper").iterdir())
    assert (tmp_path / "octavo-paper" / "fig2.json").exists()
    assert "written: octavo-paper/fig2.json" in capsys.readouterr().err


def test_output_is_checked_before_the_simulation(capsys: Output, tmp_path: Path) -> None:
    for option, name in (("--output", "no/x.json"), ("--plot", "no/x.svg"), ("--output", ".")):
        assert run(["simulate", "alpaca", "--requests", "5", option, str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and f"{option[2:]} is '{tmp_path / name}', " in captured.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_with_the_name_of_the_file(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "fig2.json").symlink_to("/dev/full")
    for args, name in (
        (["simulate", "alpaca", "--requests", "5", "--output", "/dev/full"], "/dev/full"),
        (["reproduce", "fig2", "--time", "0.05", "--output", str(tmp_path)], str(tmp_path / "fig2.json")),
    ):
        assert run(args) == 1
        assert capsys.readouterr().err == f"error: No space left on device: {name}\n"


def test_reproduce_checks_the_output_directory_first(capsys: Output) -> None:
    assert run(["reproduce", "fig2", "--output", "/dev/null/x"]) == 2
    assert capsys.readouterr().err.startswith("error: output is '/dev/null/x', which cannot be a directory")


def test_reproduce(capsys: Output, tmp_path: Path) -> None:
    assert run(["reproduce", "fig2", "--time", "0.05", "--output", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err.startswith(f"written: {tmp_path / 'fig2.json'} {tmp_path / 'fig2.svg'} (")
    assert result["figure"] == "fig2" and len(result["rows"]) == 14
    assert json.loads((tmp_path / "fig2.json").read_text()) == result


@pytest.mark.parametrize("figure", ["fig2", "fig13", "fig15", "fig18"])
def test_a_trace_too_short_to_measure_is_an_error(figure: str, capsys: Output, tmp_path: Path) -> None:
    assert run(["reproduce", figure, "--time", "0.0001", "--output", str(tmp_path)]) == 2
    assert "pass a larger --time" in capsys.readouterr().err


def test_reproduced_figures_are_the_same_bytes(capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs, on one process and on two."""
    monkeypatch.setattr("octavo.simulate.experiments.ALL", ("fig2", "fig15", "fig19"))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, jobs in zip(folders, ("1", "2"), strict=True):
        assert run(["reproduce", "--all", "--time", "0.02", "--jobs", jobs, "--out", str(folder)]) == 0
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == [f"{name}.{kind}" for name in ("fig15", "fig19", "fig2") for kind in ("json", "svg")]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_plan(capsys: Output, tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"h100": 2.5, "A100-80": 1.5}')
    line = ["plan", "--trace", "sharegpt", "--rate", "4", "--requests", "60", "--slo", "ttft=2s,tpot=100ms"]
    assert run([*line, "--prices", str(prices)]) == 0
    text = capsys.readouterr().out
    model, load, best, *_ = text.splitlines()
    assert model == "model     llama-3.1-8b" and "  a100-80: 86% of 2,039 GB/s, " in text
    assert load == "load      60 requests of sharegpt, 4 requests/s; ttft=2s,tpot=100ms for 95% of them"
    assert best.startswith("1 x a100-80: 1 replica of llama-3.1-8b") and "times this load" in text
    assert run([*line, "--gpu", "h100", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["best"]["gpu"] == "h100" and result["margin"] >= 1 and result["tried"][0]["slo_kept"] >= 0.95
    assert {tried["tensor_parallel_size"] for tried in result["tried"]} == {1}
    assert (result["model"], result["rate"], result["slo"]) == ("llama-3.1-8b", 4, "ttft=2s,tpot=100ms")
    assert result["assumptions"][0].startswith("h100: 86% of 3,350 GB/s")
    assert run(["plan", "--trace", "alpaca", "--requests", "5", "--slo", "ttft=2s", "--gpu", "l4"]) == 0
    assert "load      5 requests of alpaca, 1 requests/s; " in capsys.readouterr().out


def test_plan_that_nothing_meets_ends_with_status_1(capsys: Output) -> None:
    line = ["plan", "--trace", "sharegpt", "--rate", "4", "--requests", "20", "--gpu", "l4"]
    assert run([*line, "--slo", "ttft=0.1ms", "--max-gpus", "1"]) == 1
    text = capsys.readouterr().out
    assert "nothing of up to 1 GPUs meets it; the nearest:" in text
    assert run([*line, "--slo", "ttft=2s", "--model", "opt-175b"]) == 1
    assert "opt-175b fits on none of these GPUs, up to 8 for each copy" in capsys.readouterr().out
    assert run([*line, "--slo", "ttft=2s", "--model", "smollm2-135m-instruct"]) == 0


def test_sharegpt_file_gives_the_requests_of_bench_serve(capsys: Output, tmp_path: Path) -> None:
    model = make_talking_checkpoint(tmp_path / "model")
    turns = [("hello there", "general answer"), ("hi", "too short a prompt"), ("hello there", "x" * 2041)]
    rows = [{"conversations": [{"value": prompt}, {"value": answer}]} for prompt, answer in turns]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    talk = str(tmp_path / "talk.json")
    args = BenchArgs(dataset_name="sharegpt", dataset_path=talk, num_prompts=4, seed=3)
    samples = asyncio.run(sharegpt(args, local_counter(str(model))))
    arrivals = list(arrivals_of(talk, 2.0, 4, seed=3, tokenizer=str(model)))
    assert [(a.num_prompt, a.num_output) for a in arrivals] == [(s.num_prompt, s.num_output) for s in samples]
    assert len(arrivals) == 4 and len({a.runs for a in arrivals}) == 1, "an equal prompt is in the cache"
    assert run(["simulate", talk, "--requests", "4", "--tokenizer", str(model), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_requests"] == 4 and result["rate"] == 1.0
    assert run(["simulate", talk]) == 2
    assert "has text; pass --tokenizer, a local model that counts its tokens" in capsys.readouterr().err


def test_plan_says_what_is_hypothetical(capsys: Output) -> None:
    line = ["plan", "--trace", "alpaca", "--rate", "1", "--requests", "10", "--slo", "ttft=2s"]
    note = "this is hypothetical: this engine runs on NVIDIA GPUs"
    assert run([*line, "--gpu", "mi300x"]) == 0
    assert note in capsys.readouterr().out
    assert run([*line, "--gpu", "h200"]) == 0
    assert note not in capsys.readouterr().out


def test_plan_shares_a_model_that_one_gpu_does_not_hold(capsys: Output) -> None:
    line = ["plan", "--trace", "alpaca", "--rate", "1", "--requests", "10", "--slo", "ttft=2s"]
    assert run([*line, "--model", "llama-3.1-70b", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    assert "2 x h100: 1 replica of llama-3.1-70b on 2 each\nsettings  --tensor-parallel-size 2" in text
    assert run([*line, "--model", "llama-3.1-70b", "--gpu", "h100", "--max-tensor-parallel-size", "1"]) == 1
    assert "llama-3.1-70b fits on none of these GPUs, up to 1 for each copy" in capsys.readouterr().out


def test_calibration_names_its_model_and_device(capsys: Output, tmp_path: Path) -> None:
    model, cost = str(make_talking_checkpoint(tmp_path / "model")), str(tmp_path / "c.json")
    assert run(["calibrate", "--model", model, "--output", cost, "--repeats", "1", "--device", "cpu"]) == 0
    line = ["simulate", "alpaca", "--requests", "3", "--gpu", "cpu", "--cost", cost]
    assert run([*line, "--model", model]) == 0
    assert "model on 1 x cpu, " in capsys.readouterr().out
    assert run([*line, "--model", "smollm2"]) == 2
    assert f"was measured with {model} on cpu, not with smollm2-135m on cpu" in capsys.readouterr().err
