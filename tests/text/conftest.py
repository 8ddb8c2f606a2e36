"""Fixtures of the tests of tokenizers; tests/checkpoint uses them too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tokenizers

from tests.text.samples import CHATML, CONFIG, make_sentencepiece, train_byte_level, write_gguf_file

hypothesis.settings.register_profile("untimed", deadline=None)  # a slow machine is not a bug
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    return str(train_byte_level().to_str())


@pytest.fixture
def byte_level(byte_level_json: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_level_json)


@pytest.fixture
def sentencepiece() -> tokenizers.Tokenizer:
    return make_sentencepiece()


@pytest.fixture
def model_dir(tmp_path: Path, byte_level_json: str) -> Path:
    """A model directory, complete but for the content of its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "model.safetensors").write_bytes(b"not read here")
    (folder / "tokenizer.json").write_text(byte_level_json)
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny GGUF file, by default tiny.gguf; see `write_gguf_file`."""

    def write(name: str = "tiny.gguf", **content: Any) -> Path:
        return write_gguf_file(tmp_path / name, **content)

    return write
