"""`octavo bench`: the arguments that it passes to the benchmarks, which have their own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.bench import core, serve
from octavo.bench.args import BenchArgs
from tests.cli.conftest import Call


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(core, "main", lambda *args, **options: calls.append(("core", args, options)))
    return calls


def test_core(call: Call, ran: list[Any]) -> None:
    call("bench", "core")
    call("bench", "core", "--json")
    assert ran == [("core", (), {"as_json": False}), ("core", (), {"as_json": True})]


def test_bench_without_a_benchmark_prints_help(call: Call) -> None:
    done = call("bench")
    assert done.code == 0
    assert "throughput" in done.out


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[BenchArgs]:
    found: list[BenchArgs] = []
    monkeypatch.setattr(serve, "main", lambda args, progress: found.append(args))
    return found


def test_serve_accepts_vllm_command_lines(call: Call, loads: list[BenchArgs]) -> None:
    line = "--backend vllm --dataset-name prefix_repetition --request-rate inf --num_prompts 9 --ignore-eos"
    line += ' --goodput ttft:200 tpot:50 --metadata a=1 b=2 --extra-body {"seed":3} --port 8001 --save-result'
    done = call("bench", "serve", *line.split())
    assert done.code == 0, done.err
    call("bench", "serve")
    assert loads == [
        BenchArgs(
            backend="vllm",
            dataset_name="prefix_repetition",
            num_prompts=9,
            ignore_eos=True,
            goodput=["ttft:200", "tpot:50"],
            metadata=["a=1", "b=2"],
            extra_body={"seed": 3},
            port=8001,
            save_result=True,
        ),
        BenchArgs(),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--goodput", "ttft:x"), "--goodput: goodput has 'ttft:x'"),
        (("ttft:5",), "unexpected extra argument 'ttft:5'"),
        (("--dataset-name", "sonnet"), "dataset-name"),
        (("--num-prompt", "5"), "did you mean --num-prompts?"),
        (
            ("--base-url", "http://localhost:99999"),
            "--base-url: base_url is 'http://localhost:99999'; write one such as",
        ),
        (("--host", "[::1"), "--host: host is '[::1'; write one such as"),
        (("--backend", "other"), "error: invalid value for '--backend': 'other' is not one of"),
        (("--ramp-up-strategy", "linear"), "vLLM flag --ramp-up-strategy is not supported here"),
    ],
)
def test_serve_refuses_invalid_options(call: Call, loads: list[BenchArgs], args: tuple[str, ...], message: str) -> None:
    done = call("bench", "serve", *args)
    assert done.code == 2 and message in done.err
    assert not loads


def test_serve_without_a_server(call: Call) -> None:
    done = call("bench", "serve", "--port", "1", "--num-prompts", "2")
    assert done.code == 1
    assert done.err.startswith("error: the server at http://127.0.0.1:1 does not answer a first request")
    assert done.err.endswith("start it, or give it time with --ready-check-timeout-sec\n")


def test_result_file_is_checked_before_the_load(call: Call, tmp_path: Path) -> None:
    line = ["bench", "serve", "--port", "1", "--save-result", "--result-dir", str(tmp_path / "new")]
    assert "does not answer" in call(*line, "--result-filename", "sub/x.json").err and (tmp_path / "new/sub").is_dir()
    done = call(*line, "--result-filename", "sub")
    assert done.code == 2 and f"result_filename is '{tmp_path / 'new/sub'}', a directory; name another" in done.err
    assert "set --dataset-path" in call("bench", "serve", "--dataset-name", "sharegpt").err
