"""A model that cannot be loaded is rejected before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_tiny_checkpoint

PROGRAM = """
import json, sys
from octavo.cli.main import run
codes = [run(args) for args in json.loads(sys.argv[1])]
print(*codes, *sorted({"torch", "transformers", "triton"} & set(sys.modules)))
"""
COMMANDS = [
    ["generate", "-p", "x", "--model"],
    ["chat", "--model"],
    ["demo", "--model"],
    ["serve", "--port", "0"],
    ["calibrate", "--model"],
]


def change(**fields: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return edit


def replace(old: str, new: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        text = (folder / "config.json").read_text()
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new, 1))

    return edit


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "a directory without config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    (change(architectures=["LlamaForCausalLMM"]), "did you mean LlamaForCausalLM?"),
    (change(model_type="lama"), "model_type 'lama' is not supported; did you mean llama? supported: llama, mistral"),
    (change(auto_map={"AutoModel": "m.M"}, architectures=["M"], model_type="m"), "custom code"),
    (change(hidden_size=-1), "hidden_size is -1"),
    (replace("{", '{"hidden_size": 32, '), "the key 'hidden_size' occurs twice"),
    (replace("{", '{"rope_scaling": {"factor": 1, "factor": 2}, '), "the key 'factor' occurs twice"),
    (cut_short, "model.safetensors is cut short or damaged"),
    (lambda folder: (folder / "generation_config.json").write_text('{"temperature": -9}'), "temperature is -9"),
]


def test_invalid_model_directories_are_rejected_without_torch(tmp_path: Path) -> None:
    lines = []
    for i, (damage, _) in enumerate(DAMAGES):
        damage(folder := make_tiny_checkpoint("llama", tmp_path / f"model{i}"))
        lines.append(["generate", "-p", "x", "--model", str(folder)])
    check(lines, [message for _, message in DAMAGES])


def test_missing_model_is_rejected_without_torch() -> None:
    check([[*command, "/nonexistent"] for command in COMMANDS], ["no model '/nonexistent'"] * len(COMMANDS))


def check(lines: list[list[str]], messages: list[str]) -> None:
    command, environment = [sys.executable, "-c", PROGRAM, json.dumps(lines)], os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines()[-1].split() == ["1"] * len(lines), done.stdout + done.stderr
    for error, message in zip(done.stderr.splitlines(), messages, strict=True):
        assert error.startswith("error: ") and message in error


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    command = [sys.executable, "-m", "octavo", "generate", "-p", "x", "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
