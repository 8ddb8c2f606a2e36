"""Each key of a directory's tokenizer files, in its variants, gives Transformers' tokens and texts, or is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import CheckpointError, PromptError, UnsupportedModelError
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_config import KEYS, NOT_REBUILT, REBUILT
from octavo.text.tokenizer_loader import LLAMA3_WORDS, QWEN2_WORDS, tokenizer_key_uses
from tests.text.samples import CONFIG, CORPUS, SPECIALS, make_sentencepiece, read, train_byte_level

TEXTS = [
    "the quick fox",
    " the  other ",
    "a<tool>b <|im_end|> x",
    "<extra> the [PAD] y",
    "12345 naïve café e\u0301 漢é",
    "def f(x):\n    return x <|endoftext|>the",
    "</s> <s> the , . x's",
    "",
]
TEMPLATE = "{{bos_token}}|{{eos_token}}|{{pad_token}}|{{unk_token}}|{{image_token}}|{{messages[0].content}}"
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
BACKEND = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", **SPECIAL}


def token(content: str, **flags: Any) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


def write(folder: Path, **files: Any) -> Path:
    """A model directory; `files` are tokenizer_config, special_tokens_map, ... with their JSON values."""
    files = {"config": CONFIG, "tokenizer": json.loads(train_byte_level().to_str()), **files}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "model.safetensors").write_bytes(b"not read here")
    return folder


def assert_same(folder: Path, theirs: Any = None, texts: list[str] = TEXTS) -> Tokenizer:
    """Octavo's ids, texts and chats of `folder` are those of Transformers."""
    theirs = theirs or AutoTokenizer.from_pretrained(folder)
    ours = read(folder)
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids, (text, theirs.convert_ids_to_tokens(ids))
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    messages = [{"role": "user", "content": "hi"}]
    chat = theirs.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    assert ours.encode_chat(messages, template=TEMPLATE)[0] == chat
    assert theirs.eos_token is None or ours.eos_token_id == theirs.eos_token_id
    return ours


# fmt: off
SAME: dict[str, dict[str, Any]] = {
    "no config": {},
    "no class": {"tokenizer_config": SPECIAL},
    "no names": {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}},
    "null": {"tokenizer_config": {**BACKEND, "bos_token": None, "extra_special_tokens": None}},
    "object": {"tokenizer_config": {**BACKEND, "eos_token": {"__type": "AddedToken", **token("<|endoftext|>")}}},
    "token that no file has": {"tokenizer_config": {**BACKEND, "pad_token": "[PAD]"}},
    "token of the vocabulary": {"tokenizer_config": {**BACKEND, "unk_token": "the"}},
    "plain token": {"tokenizer_config": {**BACKEND, "eos_token": "<tool>"}},
    "plain token beside other added tokens":
        {"tokenizer_config": {**BACKEND, "eos_token": "<tool>", "added_tokens_decoder": {"0": token(SPECIALS[0])}}},
    "additional": {"tokenizer_config": {**BACKEND, "additional_special_tokens": ["<extra>", "<tool>"]}},
    "additional object":
        {"tokenizer_config": {**BACKEND, "additional_special_tokens": [
            {"__type": "AddedToken", **token("<extra>", special=False, lstrip=True)}]}},
    "extra list": {"tokenizer_config": {**BACKEND, "extra_special_tokens": ["<extra>"]}},
    "extra and additional":
        {"tokenizer_config": {**BACKEND, "extra_special_tokens": ["<extra>"], "additional_special_tokens": ["[PAD]"]}},
    "extra object": {"tokenizer_config": {**BACKEND, "extra_special_tokens": {"image_token": "<extra>"}}},
    "model-specific": {"tokenizer_config": {**BACKEND, "model_specific_special_tokens": {"image_token": "<extra>"}}},
    "image token": {"tokenizer_config": {**BACKEND, "image_token": "<extra>"}},
    "added": {"tokenizer_config": {**BACKEND, "added_tokens_decoder": {"362": token("<extra>")}}},
    "added, two": {"tokenizer_config":
        {**BACKEND, "added_tokens_decoder": {"363": token("[PAD]"), "362": token("<extra>")}}},
    "added under another id": {"tokenizer_config": {**BACKEND, "added_tokens_decoder": {"5": token("<tool>")}}},
    "added with other flags":
        {"tokenizer_config": {**BACKEND, "added_tokens_decoder": {"360": token("<tool>", rstrip=True, lstrip=True)}}},
    "named and added as plain":
        {"tokenizer_config": {
            **BACKEND, "eos_token": "<tool>", "added_tokens_decoder": {"360": token("<tool>", special=False)}}},
    "map, not the ids of config.json": {
        "config": CONFIG | {"bos_token_id": 1}, "tokenizer_config": {"eos_token": "<|im_end|>"},
        "special_tokens_map": {"eos_token": SPECIALS[0]}},
    "map": {"tokenizer_config": BACKEND, "special_tokens_map": {"eos_token": SPECIALS[0]}},
    "map beside no added tokens": {
        "tokenizer_config": {**BACKEND, "added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": SPECIALS[0]}},
    "map beside a null":
        {"tokenizer_config": {**BACKEND, "bos_token": None}, "special_tokens_map": {"eos_token": SPECIALS[0]}},
    "map with more": {"tokenizer_config": BACKEND, "special_tokens_map": {"additional_special_tokens": ["<extra>"]}},
    "map with object":
        {"tokenizer_config": BACKEND, "special_tokens_map": {"eos_token": token("<extra>", lstrip=True)}},
    "map beside added tokens": {
        "tokenizer_config": {**BACKEND, "added_tokens_decoder": {"0": token(SPECIALS[0])}},
        "special_tokens_map": {"eos_token": SPECIALS[0]}},
    "added_tokens.json": {"tokenizer_config": BACKEND, "added_tokens": {"[PAD]": 363, "<extra>": 362}},
    "added_tokens.json, named": {"tokenizer_config": {**BACKEND, "pad_token": "[PAD]"}, "added_tokens": {"[PAD]": 362}},
    "BOS flags": {"tokenizer_config": {**BACKEND, "add_bos_token": True, "add_eos_token": True}},
    "BOS flags of GPT-2": {"tokenizer_config": {**GPT2, "add_bos_token": True, "add_eos_token": True}},
    "prefix": {"tokenizer_config": {**BACKEND, "add_prefix_space": True}},
    "no prefix": {"tokenizer_config": {**GPT2, "add_prefix_space": False}},
    "clean-up": {"tokenizer_config": {**BACKEND, "clean_up_tokenization_spaces": True}},
    "lower case":
        {"tokenizer_config": {
            **GPT2, "do_lower_case": True, "remove_space": True, "strip_accents": True, "keep_accents": True}},
    "text": {"tokenizer_config": {**GPT2, "errors": "ignore", "spaces_between_special_tokens": True, "legacy": True}},
    "batches": {"tokenizer_config": {**GPT2, "model_max_length": 2, "padding_side": "left", "truncation_side": "left"}},
    "GPT-2's defaults": {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}},
    "a default of GPT-2 is null": {"tokenizer_config": {"tokenizer_class": "GPT2TokenizerFast", "bos_token": None}},
    "byte-level Llama": {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast"}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "split_special_tokens": {"split_special_tokens": True},
    "even_though_it_will_corrupt_output": {
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        "clean_up_tokenization_spaces": True},
    "fix_mistral_regex": {"fix_mistral_regex": True},
    "fast_tokenizer_files": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]},
    "init_inputs": {"init_inputs": ["vocab.json"]},
    "add_prefix_space": {"add_prefix_space": True},
    "370, but the next id is 362": {"added_tokens_decoder": {"370": token("<extra>")}},
}
# fmt: on


@pytest.mark.parametrize("name", SAME)
def test_keys_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    assert_same(write(tmp_path, **SAME[name]))


@pytest.mark.parametrize("words", REFUSED)
def test_keys_that_change_tokens_are_refused_by_name(words: str, tmp_path: Path) -> None:
    for neutral in (None, False):
        write(tmp_path, tokenizer_config={**GPT2, **({words: neutral} if words in KEYS.refused else {})})
        if neutral is None or KEYS.refused.get(words) == (False,):
            read(tmp_path)
    write(tmp_path, tokenizer_config={**GPT2, **REFUSED[words]})
    with pytest.raises((UnsupportedModelError, CheckpointError), match=words):
        read(tmp_path)


@pytest.mark.parametrize("key", KEYS.inert)
def test_inert_keys_change_nothing_in_transformers_either(key: str, tmp_path: Path) -> None:
    for value in (3, "x", True, None):
        write(tmp_path, tokenizer_config={**BACKEND, key: value})
        try:
            theirs = AutoTokenizer.from_pretrained(tmp_path)
            theirs.encode("the")
        except (TypeError, ValueError, AttributeError):
            continue  # it takes no such value
        assert_same(tmp_path, theirs)


@pytest.mark.parametrize("key", [key.replace("*", "pad") for key in (*KEYS.read, *KEYS.refused)])
def test_null_is_as_absent(key: str, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, tokenizer_config=BACKEND))
    assert_same(write(tmp_path, tokenizer_config=BACKEND | ({} if key in BACKEND else {key: None})), theirs)


def edited(**changes: Any) -> dict[str, Any]:
    paper = json.loads(train_byte_level().to_str())
    for path, value in changes.items():
        *folders, last = path.split("__")
        target = paper
        for folder in folders:
            target = target[folder]
        target[last] = value
    return paper


TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": SPECIALS[0],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"truncation": TRUNCATION}, {"padding": PADDING}, {"model__ignore_merges": True}, {"model__dropout": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("config", [BACKEND, GPT2], ids=["backend", "gpt2"])
def test_parts_of_tokenizer_json_give_the_tokens_of_transformers(
    changes: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    assert_same(write(tmp_path, tokenizer=edited(**changes), tokenizer_config=config))


def test_dropout_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=edited(model__dropout=0.5), tokenizer_config=BACKEND)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer.json: dropout 0.5 is not supported"):
        read(tmp_path)


def test_clean_up_is_refused_for_other_models_than_bpe(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"the": 0, "[UNK]": 1}, unk_token="[UNK]"))
    paper = json.loads(words.to_str())
    assert_same(
        write(tmp_path, tokenizer=paper, tokenizer_config={"clean_up_tokenization_spaces": False}), texts=["the"]
    )
    write(tmp_path, tokenizer=paper, tokenizer_config={"clean_up_tokenization_spaces": True})
    with pytest.raises(UnsupportedModelError, match="clean_up_tokenization_spaces True"):
        read(tmp_path)


# ---- classes that Transformers rebuilds


def test_tokenizer_json_is_the_pipeline_where_transformers_rebuilds_another(tmp_path: Path) -> None:
    """SmolLM2 and StarCoder2 name GPT2Tokenizer, whose rebuilt pipeline no longer separates digits."""
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend = train_byte_level()
    backend.pre_tokenizer = digits
    write(tmp_path, tokenizer=json.loads(backend.to_str()), tokenizer_config=GPT2)
    ours = read(tmp_path)
    assert [ours.backend.id_to_token(i) for i in ours.encode("1234")] == ["1", "2", "3", "4"]
    assert ours.encode("1234") == backend.encode("1234").ids
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("1234") != backend.encode("1234").ids  # else the rows in docs/models.md are out of date


def metaspace(kind: str) -> tokenizers.Tokenizer:
    backend = make_sentencepiece(strip=kind == "LlamaTokenizer")
    backend.normalizer = normalizers.Replace(" ", "▁") if kind == "GemmaTokenizer" else None
    backend.pre_tokenizer = (
        pre_tokenizers.Split(" ", "merged_with_previous")
        if kind == "GemmaTokenizer"
        else pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    )
    return backend


def published(kind: str) -> tokenizers.Tokenizer:
    """A pipeline as published tokenizer.json files of the class have it."""
    if kind in ("LlamaTokenizer", "GemmaTokenizer"):
        return metaspace(kind)
    backend, split, byte_level = train_byte_level(), pre_tokenizers.Split, pre_tokenizers.ByteLevel
    words = {"Qwen2Tokenizer": QWEN2_WORDS, "PreTrainedTokenizerFast": LLAMA3_WORDS}.get(kind)
    if words:
        cut = split(tokenizers.Regex(words), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level(False, use_regex=False)])
    if kind in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


CLASSES = [*REBUILT, "PreTrainedTokenizerFast"]
"""The classes of published files of all families."""


def names_of(kind: str) -> dict[str, str]:
    spm = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "mask_token": "<unk>"}
    plain = {"unk_token": SPECIALS[0], "bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "pad_token": SPECIALS[0]}
    return spm if kind in ("LlamaTokenizer", "GemmaTokenizer") else plain


# ---- every key of tokenizer.json


def places(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Each key of a tokenizer.json, with its object, and of the first and the last added token. The words of the
    vocabulary are none."""
    if isinstance(value, list):
        for one in value:
            yield from places(one)
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            if key not in ("vocab", "merges", "special_tokens"):
                inner = value[key]
                yield from places([inner[0], inner[-1]] if key == "added_tokens" else inner)


def other_values(value: Any) -> list[Any]:
    """Values to try in place of one; `...` stands for an absent key."""
    others = {bool: [not value], str: ["", "▁"], int: [1], dict: [{}], list: [[]]}
    return [..., None, *others.get(type(value), [True, ""])]


@pytest.mark.parametrize("kind", CLASSES)
def test_variants_of_each_key_of_tokenizer_json_give_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    """What Transformers cannot read or run, Octavo need not."""
    paper = json.loads(published(kind).to_str())
    equal = 0
    for inner, key in list(places(paper)):
        kept = inner[key]
        for value in other_values(kept):
            inner[key] = value
            if value is ...:
                del inner[key]
            write(tmp_path, tokenizer=paper, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
            try:
                theirs = AutoTokenizer.from_pretrained(tmp_path)
                theirs.decode(theirs.encode("the quick")), theirs.decode([])
            except BaseException:  # the library panics
                with contextlib.suppress(CheckpointError, UnsupportedModelError, PromptError):
                    read(tmp_path)
                continue
            try:
                assert_same(tmp_path, theirs)
                equal += 1
            except (CheckpointError, UnsupportedModelError) as error:
                if key not in str(error) and "adds the token" not in str(error):
                    raise
        inner[key] = kept
    assert equal > 50


def test_unknown_keys_of_tokenizer_json_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paper = json.loads(published("Qwen2Tokenizer").to_str())
    paper["pre_tokenizer"]["pretokenizers"][0]["case_folding"] = paper["model"]["temperature"] = True
    folder = write(tmp_path, tokenizer=paper, tokenizer_config=BACKEND)
    assert_same(folder)
    assert "tokenizer.json: unknown keys are ignored: model.temperature, pre_tokenizer.case_folding" in caplog.text
    (use,) = [use for use in tokenizer_key_uses(open_checkpoint(folder)) if use.file == "tokenizer.json"]
    assert use.unknown == ("model.temperature", "pre_tokenizer.case_folding")
    assert {"model.merges", "normalizer"} < set(use.read) and "truncation" in use.inert


def test_old_steps_have_no_unknown_keys(tmp_path: Path) -> None:
    paper = json.loads(published("LlamaTokenizer").to_str())
    paper["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True}
    folder = write(tmp_path, tokenizer=paper, tokenizer_config=BACKEND)
    assert not any(use.unknown for use in tokenizer_key_uses(open_checkpoint(folder)))
    assert_same(folder)


@pytest.mark.parametrize("model_type", ["llama", *NOT_REBUILT, "qwen2", "qwen3", "gemma2", "gemma3_text", "starcoder2"])
@pytest.mark.parametrize("kind", CLASSES)
def test_published_pipelines_are_those_of_transformers(kind: str, model_type: str, tmp_path: Path) -> None:
    backend = published(kind)
    config = {"tokenizer_class": kind, **names_of(kind)}
    write(
        tmp_path,
        config={**CONFIG, "model_type": model_type, "architectures": ["Any"]},
        tokenizer=json.loads(backend.to_str()),
        tokenizer_config=config,
    )
    if model_type == "qwen2" and kind != "Qwen2Tokenizer":
        return  # Transformers takes Qwen2Tokenizer whatever the file names
    assert_same(tmp_path)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_folders_that_transformers_saves_are_read_alike(kind: str, template: str | None, tmp_path: Path) -> None:
    paper = json.loads(published(kind).to_str())["model"]
    maker: Callable[..., Any] = getattr(transformers, kind)
    if kind == "PreTrainedTokenizerFast":
        made = maker(tokenizer_object=published(kind), **names_of(kind))
    else:
        made = maker(vocab=paper["vocab"], merges=[tuple(m) for m in paper["merges"]], **names_of(kind))
    made.add_tokens(["<tool>"])
    made.add_special_tokens({"extra_special_tokens": ["<extra>"]})
    made.chat_template = template
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"not read here")
    assert_same(tmp_path, theirs=made)
    ours = assert_same(tmp_path)
    assert ours.chat_template == template
    made.save_pretrained(tmp_path, legacy_format=False)
    assert_same(tmp_path, texts=[*TEXTS, *CORPUS])
