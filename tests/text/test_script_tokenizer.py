"""`ScriptTokenizer` is Transformers' tokenizer, on every kind of tokenizer that the tests build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from octavo.text.script_tokenizer import ScriptTokenizer
from tests.engine.models import make_talking_checkpoint
from tests.text.samples import CHATML, CONFIG, make_sentencepiece, read, train_byte_level

TEXTS = ["", "the quick brown fox", " the  dog\n", "a<|im_end|>b</s>", "<tool> 漢é naïve 🙂", "x"]
MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "and"}]
SPECIALS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": CHATML,
}
NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"]


def write(folder: Path, backend: Any, settings: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"not read here")
    (folder / "tokenizer.json").write_text(backend.to_str())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | settings))
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "byte level": lambda folder: write(folder, train_byte_level(), SPECIALS),
    "byte level without names": lambda folder: write(folder, train_byte_level(), {"chat_template": CHATML}),
    "sentencepiece": lambda folder: write(
        folder,
        make_sentencepiece(),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML},
    ),
    "characters": make_talking_checkpoint,
}


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ScriptTokenizer, Any]:
    folder = KINDS[request.param](tmp_path)
    return ScriptTokenizer(read(folder)), AutoTokenizer.from_pretrained(folder)


def test_texts_and_ids(both: tuple[ScriptTokenizer, Any]) -> None:
    ours, theirs = both
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            found, want = ours(text, add_special_tokens=special), theirs(text, add_special_tokens=special)
            assert (found.input_ids, found["attention_mask"]) == (want.input_ids, want["attention_mask"])
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.tokenize(text) == theirs.tokenize(text)
        tokens = theirs.convert_ids_to_tokens(ids)
        assert ours.convert_ids_to_tokens(ids) == tokens
        assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == theirs.convert_ids_to_tokens(
            ids, skip_special_tokens=True
        )
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
        assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)
    assert ours(TEXTS).input_ids == theirs(TEXTS)["input_ids"]
    batch = [theirs.encode(text) for text in TEXTS]
    assert ours.batch_decode(batch) == ours.decode(batch) == theirs.batch_decode(batch) == theirs.decode(batch)
    with pytest.raises(AttributeError):
        _ = ours(TEXTS).pixels


def test_vocabulary(both: tuple[ScriptTokenizer, Any]) -> None:
    ours, theirs = both
    assert ours.get_vocab() == theirs.get_vocab() and ours.get_added_vocab() == theirs.get_added_vocab()
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    for token in [*theirs.get_vocab(), "no such token"]:
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token), token
    for i in range(len(theirs)):
        assert ours.convert_ids_to_tokens(i) == theirs.convert_ids_to_tokens(i)
        assert ours.decode(i) == theirs.decode(i)


def test_special_tokens(both: tuple[ScriptTokenizer, Any]) -> None:
    ours, theirs = both
    for name in NAMES:
        assert getattr(ours, name) == getattr(theirs, name), name
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id"), name
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template and ours.is_fast
    with pytest.raises(AttributeError, match="'image_token'"):
        _ = ours.image_token


def test_chat_template(both: tuple[ScriptTokenizer, Any]) -> None:
    ours, theirs = both
    options: dict[str, Any] = {"chat_template": theirs.chat_template or CHATML}
    for add in (True, False):
        for conversation in (MESSAGES, [MESSAGES, MESSAGES[:1]]):
            options["add_generation_prompt"] = add
            for more in ({"tokenize": False}, {"return_dict": False}):
                want = theirs.apply_chat_template(conversation, **options, **more)
                assert ours.apply_chat_template(conversation, **options, **more) == want
            found, whole = (t.apply_chat_template(conversation, **options) for t in both)
            assert (found.input_ids, found["attention_mask"]) == (whole["input_ids"], whole["attention_mask"])
    more = {"chat_template": CHATML, "tokenize": False, "continue_final_message": True}
    assert ours.apply_chat_template(MESSAGES, **more) == theirs.apply_chat_template(MESSAGES, **more)
    more = {"chat_template": "{{ colour }}{{ tools }}", "tokenize": False, "colour": "red"}
    assert ours.apply_chat_template(MESSAGES, **more) == theirs.apply_chat_template(MESSAGES, **more)
