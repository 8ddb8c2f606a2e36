"""`octavo doctor --quality`: perplexity is that of Transformers' logits, and is printed for each choice of bits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from octavo import LLM
from octavo.bench import quality
from octavo.cli.main import run
from tests.models.tiny import make_tiny_checkpoint, random_prompts, transformers_logits


def test_perplexity_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "WINDOW", 20)
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    (token_ids,) = random_prompts(50)
    windows = [token_ids[i : i + 20] for i in (0, 20, 40)]
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none")
        for window, logits in zip(windows, transformers_logits(directory, windows), strict=True)
    ]
    with LLM(str(directory), dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
        value = quality.perplexity(llm, token_ids)
    assert math.isclose(value, float(torch.cat(losses).mean().exp()), rel_tol=1e-4)


def test_doctor_compares_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", max_position_embeddings=600)
    text = tmp_path / "text.txt"
    text.write_text("b" * 30)
    monkeypatch.setattr(LLM, "get_tokenizer", lambda self: Letters())
    arguments = ["doctor", str(directory), "--device", "cpu", "--dtype", "bfloat16", "--quality", str(text)]
    monkeypatch.setattr("octavo.frontend.build.Tokenizer.from_checkpoint", lambda *args, **options: None)
    assert run([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    options = ["as given", "--dtype float32", "--quantization int8", "--quantization int4", "--kv-cache-dtype int8"]
    assert [row["options"] for row in rows] == options
    assert [row["bits"] for row in rows[:2]] == [16, 32] and rows[3]["bits"] < rows[2]["bits"] < 16
    assert all(row["num_tokens"] == 30 and row["perplexity"] > 1 for row in rows)
    assert run(arguments) == 0
    assert capsys.readouterr().out.count("--quantization int") == 2
    text.write_text("b")
    assert run(arguments) == 2 and "no two tokens" in capsys.readouterr().err


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str) -> list[int]:
        return [3 + 7 * i % 80 for i, _ in enumerate(text)]


def test_a_file_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00\x01\xff")
    for name in ("image", "missing"):
        assert run(["doctor", "--quality", str(tmp_path / name)]) == 2
        assert f"{name} cannot be read as text" in capsys.readouterr().err
