"""A model that cannot be loaded is rejected before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_tiny_checkpoint

PROGRAM = """
import sys
from octavo.cli.main import run
code = run(sys.argv[1:])
print(code, *sorted({"torch", "transformers", "triton"} & set(sys.modules)))
"""
COMMANDS = {
    "generate": ["generate", "-p", "x", "--model"],
    "chat": ["chat", "--model"],
    "demo": ["demo", "--model"],
    "serve": ["serve", "--port", "0"],
    "calibrate": ["calibrate", "--model"],
}


def change(folder: Path, file: str = "config.json", **fields: Any) -> None:
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | fields))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def other_architecture(folder: Path) -> None:
    change(folder, architectures=["LlamaForCausalLMM"])


def other_model_type(folder: Path) -> None:
    change(folder, model_type="lama")


def custom_code(folder: Path) -> None:
    change(folder, auto_map={"AutoModel": "m.M"}, architectures=["M"], model_type="m")


def bad_value(folder: Path) -> None:
    change(folder, hidden_size=-1)


def duplicate_key(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"hidden_size": 32, ' + text.lstrip()[1:])


def duplicate_key_in_rope_scaling(folder: Path) -> None:
    change(folder, rope_scaling="HERE")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"HERE"', '{"factor": 1, "factor": 2}'))


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def strange_defaults(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 9}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_config, "a directory without config.json"),
        (no_weights, "holds no weights"),
        (other_architecture, "did you mean LlamaForCausalLM?"),
        (other_model_type, "model_type 'lama' is not supported; did you mean llama? supported: llama, mistral"),
        (custom_code, "custom code"),
        (bad_value, "hidden_size is -1"),
        (duplicate_key, "the key 'hidden_size' occurs twice"),
        (duplicate_key_in_rope_scaling, "the key 'factor' occurs twice"),
        (cut_short, "model.safetensors is cut short or damaged"),
        (strange_defaults, "temperature is 9"),
    ],
)
def test_invalid_model_directory_is_rejected_without_torch(tmp_path: Path, damage: Any, message: str) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "model")
    damage(folder)
    check(["generate", "-p", "x", "--model", str(folder)], message)


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_model_is_rejected_without_torch(command: str) -> None:
    check([*COMMANDS[command], "/nonexistent"], "no model '/nonexistent'")


def check(args: list[str], message: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "1", done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    command = [sys.executable, "-m", "octavo", "generate", "-p", "x", "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
