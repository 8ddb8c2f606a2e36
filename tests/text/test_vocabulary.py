"""Tokenizers from vocab.json and merges.txt, and files that the library misreads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from octavo.errors import CheckpointError, PromptError
from octavo.text.tokenizer import Tokenizer
from tests.text.samples import CONFIG, SPECIALS, read, train_byte_level

TEXTS = [
    "",
    " ",
    "the quick brown fox, the lazy dog",
    "  the  dogs\n\n\tdef f(x):\n    return x + 12345\r\n",
    "It's DON'T we'LL 3.14 1,000",
    "naïve café 漢字 かな 한국어 🙂 👩‍👩‍👧 e\u0301 o\u0308 ﬁ",
    "the <|im_start|>user the<|im_end|> <tool> <|endoftext|>",
    "\ufeff\u200d\u00a0\u3000 x",
    "<|im_end",
]
FILES = ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")


@pytest.fixture
def folder(model_dir: Path) -> Path:
    """A model directory with its tokenizer in the files of the first GPT-2 and Qwen tokenizers."""
    paper = json.loads((model_dir / "tokenizer.json").read_text())
    for name in FILES:
        (model_dir / name).unlink(missing_ok=True)
    (model_dir / "vocab.json").write_text(json.dumps(paper["model"]["vocab"], ensure_ascii=False))
    merges = "\n".join(" ".join(pair) for pair in paper["model"]["merges"])
    (model_dir / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    vocab_size = len(paper["model"]["vocab"])
    (model_dir / "added_tokens.json").write_text(json.dumps({"<tool>": vocab_size, "漢é": vocab_size + 1}))
    return model_dir


def settings(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_vocab_json_gives_the_tokenizer_of_tokenizer_json(folder: Path) -> None:
    settings(
        folder, tokenizer_class="GPT2Tokenizer", additional_special_tokens=["<|im_start|>", {"content": "<|im_end|>"}]
    )
    ours, given = read(folder), Tokenizer(train_byte_level())
    for text in TEXTS:
        assert ours.encode(text) == given.encode(text)
        assert ours.decode(ours.encode(text), False) == text
    assert ours.special_ids == given.special_ids and ours.vocab_size == given.vocab_size
    assert ours.special_tokens["eos_token"] == "<|endoftext|>"


def test_added_tokens_decoder_is_read(folder: Path) -> None:
    (folder / "added_tokens.json").unlink()
    entry = {"content": "<tool>", "special": True, "lstrip": False}
    settings(folder, eos_token={"content": "<|im_end|>"}, added_tokens_decoder={"360": entry})
    ours = read(folder)
    assert ours.encode("the<tool>")[-1] == 360 and 360 in ours.special_ids
    assert ours.eos_token_ids == (2, 0)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "qwen2", "prefix", "ends"])
def test_transformers_agrees(folder: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    more: dict[str, Any] = {
        "gpt2": {"tokenizer_class": "GPT2Tokenizer"},
        "opt": {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<|im_end|>"},
        "qwen2": {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None},
        "prefix": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
        "ends": {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_eos_token": True},
    }[kind]
    settings(folder, **(special | more))
    theirs, ours = AutoTokenizer.from_pretrained(folder), read(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False), text
        ids = ours.encode(text, False)
        assert ours.decode(ids, False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_id == theirs.eos_token_id


def test_qwen2_is_recognised_by_model_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "qwen2"}))
    (qwen2,) = [read(folder)]
    assert qwen2.encode("e\u0301") == qwen2.encode("é")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    assert read(folder).encode("e\u0301") != read(folder).encode("é")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vocab.json", "{", "not valid JSON"),
        ("vocab.json", "[]", "list"),
        ("vocab.json", '{"a": "b"}', "not integers"),
        ("vocab.json", '{"a": -1}', "not integers"),
        ("merges.txt", "#version: 0.2\na z9\n", "broken"),
        ("merges.txt", "a b c\n", "broken"),
        ("merges.txt", "\xff\xfe", "broken"),
        ("added_tokens.json", '{"<tool>": 5}', "the id 5 to two tokens"),
        ("tokenizer_config.json", '{"tokenizer_class": "CLIPTokenizer"}', "'CLIPTokenizer'; known: GPT2Tokenizer"),
    ],
)
def test_unusable_vocabularies_are_rejected(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=words) as caught:
        read(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    assert "skip_tokenizer_init" in message or "fetch it again" in message


def test_vocab_json_without_merges_is_no_tokenizer(folder: Path) -> None:
    (folder / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"nor vocab\.json and merges\.txt"):
        read(folder)


# ---- tokenizer.json


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["model"]["vocab"].update(the=5), "the id 5 to two tokens"),
        (lambda p: p["added_tokens"][1].update(id=0), "'<|im_start|>' as id 0"),
        (lambda p: p["added_tokens"][-1].update(id=10**9), "as id 1000000000"),
        (lambda p: p["added_tokens"][-1].update(id=50), "as id 50"),
        (lambda p: p["added_tokens"][-1].update(id=-1), "broken"),
        (lambda p: p["model"]["vocab"].update(a=1 << 33), "broken"),
    ],
)
def test_duplicate_ids_and_gaps_are_rejected(model_dir: Path, change: Any, words: str) -> None:
    paper = json.loads((model_dir / "tokenizer.json").read_text())
    change(paper)
    (model_dir / "tokenizer.json").write_text(json.dumps(paper, ensure_ascii=False))
    with pytest.raises(CheckpointError, match=words.replace("|", r"\|")) as caught:
        read(model_dir)
    assert "skip_tokenizer_init" in str(caught.value)


def test_added_tokens_are_found_in_any_json_layout(model_dir: Path) -> None:
    paper = json.loads((model_dir / "tokenizer.json").read_text())
    for indent in (None, 2):
        (model_dir / "tokenizer.json").write_text(json.dumps(paper, indent=indent))
        assert read(model_dir).vocab_size == 362
    paper["added_tokens"] = []
    paper["model"]["vocab"]['"added_tokens": 7'] = 360
    (model_dir / "tokenizer.json").write_text(json.dumps(paper))
    assert read(model_dir).vocab_size == 361


def test_exploding_pattern_fails_only_its_prompt() -> None:
    backend = train_byte_level()
    parts = [pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated"), pre_tokenizers.ByteLevel(False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[assignment]
    tokenizer = Tokenizer(backend)
    start = time.perf_counter()
    with pytest.raises(PromptError, match="fails on this text"):
        tokenizer.encode("x" * 40)
    with pytest.raises(PromptError, match="fails on this text"):
        tokenizer.encode_batch(["the", "x" * 40])
    assert time.perf_counter() - start < 60
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


def test_find_special_token() -> None:
    tokenizer = Tokenizer(train_byte_level())
    assert tokenizer.find_special_token("a<|im_end|>b<|im_start|>") == "<|im_end|>"
    assert tokenizer.find_special_token("a<tool><|im_end") is None
    assert all(tokenizer.find_special_token(special) == special for special in SPECIALS)
    assert Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())).find_special_token("<s>") is None


@pytest.mark.parametrize(
    "values",
    [
        {"added_tokens_decoder": {"5": "x"}},
        {"added_tokens_decoder": {"5": {"special": True}}},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"5": {"content": ["a"]}}},
        {"additional_special_tokens": 7},
    ],
)
def test_damaged_settings_file_is_named(folder: Path, values: dict[str, Any]) -> None:
    settings(folder, tokenizer_class="GPT2Tokenizer", **values)
    with pytest.raises(CheckpointError, match="is broken"):
        read(folder)
