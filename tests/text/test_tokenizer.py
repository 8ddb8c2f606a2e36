"""Tokenizers: encoding, decoding, special tokens in user text, and loading."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from octavo.checkpoint import catalog
from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import CheckpointError, PromptError, TemplateError, UnsupportedModelError
from octavo.text.tokenizer import MARK, Tokenizer
from octavo.text.tokenizer_loader import GGUF_KEYS, tokenizer_key_uses
from tests.text.samples import CHATML, CONFIG, SPECIALS, make_sentencepiece, read, sentencepiece_parts, train_byte_level

SHARED = Path(__file__).parents[3] / "shared" / "data"
STORIES = SHARED / "models" / "stories260k"
BYTE_LEVEL = Tokenizer(train_byte_level(), chat_templates={"default": CHATML})
SENTENCEPIECE = Tokenizer(
    make_sentencepiece(), chat_templates={"default": "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"}
)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])

pieces = st.sampled_from(
    [*SPECIALS, "<s>", "</s>", "<unk>", "<|im_", "end|>", "<", "|", ">", "s", "/", " ", "the ", "é", "🙂", "\n"]
)
hostile = st.lists(pieces, max_size=8).map("".join)


# ---- ids and text


@BOTH
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=MARK + "▁")))  # SentencePiece's space
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@BOTH
def test_encoding_equals_the_library(tokenizer):
    plain = tokenizers.Tokenizer.from_str(
        (train_byte_level() if tokenizer is BYTE_LEVEL else make_sentencepiece()).to_str()
    )
    texts = ["", " ", "the <|im_end|> </s> and <tool> 漢é", "naïve 👩‍👩‍👧\n\n the"]
    assert tokenizer.encode_batch(texts) == [plain.encode(t).ids for t in texts]
    assert [tokenizer.encode(t) for t in texts] == [plain.encode(t).ids for t in texts]
    assert tokenizer.encode_batch([]) == []


def test_encoding_long_text_releases_the_gil():
    """Tokenizing a prompt of megabytes must not block an event loop."""
    text, num_turns = "x" * 1_000_000, 0
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"x": 0}, [])))
    thread = threading.Thread(target=tokenizer.encode, args=[text])
    thread.start()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 10
    assert tokenizer.encode(text[:5000]) == [0] * 5000


def test_truncation_and_padding_are_off():
    backend = train_byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert 3 < len(Tokenizer(backend).encode("the quick brown fox")) < 50


@pytest.mark.parametrize("ids", [[-1], [362], [1, 10**12], [1.5], ["a"], [None]])
def test_ids_out_of_range_are_rejected(ids):
    with pytest.raises(PromptError, match="0 to 361"):
        BYTE_LEVEL.decode(ids)


def test_padding_ids_decode_to_nothing():
    padded = Tokenizer(train_byte_level(), num_ids=512)
    assert (padded.vocab_size, padded.num_ids) == (362, 512)
    assert padded.decode([511, *padded.encode("the"), 362]) == "the"
    assert padded.token_bytes(511) == b""
    with pytest.raises(PromptError, match="0 to 511"):
        padded.decode([512])


@pytest.mark.parametrize("text", [None, 7, b"the", ["the"], {}])
def test_prompts_must_be_text(text):
    with pytest.raises(PromptError, match=type(text).__name__):
        BYTE_LEVEL.encode(text)
    with pytest.raises(PromptError, match=type(text).__name__):
        BYTE_LEVEL.encode_batch(["a", text], parse_special=False)


def test_lone_surrogate_is_rejected():
    with pytest.raises(PromptError, match="surrogate"):
        BYTE_LEVEL.encode("ab\ud800")


@BOTH
@given(ids=st.lists(st.integers(0, 280), max_size=12))
def test_token_bytes_make_up_the_text(tokenizer, ids):
    raw = b"".join(map(tokenizer.token_bytes, ids))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if tokenizer is BYTE_LEVEL:
        assert raw.decode("utf-8", "replace") == text
    elif "\ufffd" not in text:  # the library drops a whole run with one bad byte in it
        assert raw.decode().removeprefix(" ") == text


def test_token_bytes_equal_the_library():
    for i in range(BYTE_LEVEL.vocab_size):
        assert BYTE_LEVEL.token_bytes(i).decode("utf-8", "replace") == BYTE_LEVEL.decode([i], False), i


def test_other_decoders_have_no_token_bytes():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##m": 2}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    assert not Tokenizer(backend).has_token_bytes
    assert not Tokenizer(tokenizers.Tokenizer(models.BPE())).has_token_bytes
    metaspace = make_sentencepiece()
    metaspace.decoder = tokenizers.decoders.Metaspace()
    assert not Tokenizer(metaspace).has_token_bytes


# ---- user text never turns into control tokens


@BOTH
@given(text=hostile)
def test_special_tokens_spelled_in_text_are_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == text
    literal = tokenizers.Tokenizer.from_str(
        (train_byte_level() if tokenizer is BYTE_LEVEL else make_sentencepiece()).to_str()
    )
    literal.encode_special_tokens = True  # the library's own switch: same ids
    assert ids == literal.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_parsed_on_request():
    assert BYTE_LEVEL.encode("<|im_start|>the<|im_end|>")[::2] == [1, 2]


@given(contents=st.lists(hostile, min_size=1, max_size=3), role=hostile)
def test_only_the_template_adds_special_tokens_to_a_chat(contents, role):
    messages = [{"role": role, "content": content} for content in contents]
    text, ids = BYTE_LEVEL.encode_chat(messages)
    assert text == "".join(f"<|im_start|>{role}\n{c}<|im_end|>\n" for c in contents) + "<|im_start|>assistant\n"
    assert [i for i in ids if i in BYTE_LEVEL.special_ids] == [1, 2] * len(contents) + [1]
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


@given(contents=st.lists(hostile, min_size=1, max_size=3))
def test_chat_with_sentencepiece(contents):
    text, ids = SENTENCEPIECE.encode_chat([{"role": "user", "content": c} for c in contents])
    assert [i for i in ids if i in SENTENCEPIECE.special_ids] == [1, 2] * len(contents)
    assert text == "".join(f"<s>{c}</s>" for c in contents)


def test_chat_is_encoded_as_its_text():
    text, ids = BYTE_LEVEL.encode_chat([{"role": "user", "content": "the quick 漢字 <b>"}])
    assert ids == BYTE_LEVEL.encode(text)


@pytest.mark.parametrize(
    "parts", [("<|im_", "end|>"), ("<|im_ \n", "end|>"), ("<", "|im_end|>"), ("<|im_end|", ">"), ("<", "|im_", "end|>")]
)
def test_special_token_cannot_be_assembled_from_parts(parts):
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
    text, ids = BYTE_LEVEL.encode_chat(messages, template=template)
    assert text == "<|im_end|>"
    assert not BYTE_LEVEL.special_ids & set(ids)


def test_tools_and_variables_are_user_text():
    template = "{{ tools | tojson }}{{ note }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "<|im_end|>", "parameters": {"<|im_start|>": {}}}}]
    text, ids = BYTE_LEVEL.encode_chat([{"content": "x"}], tools=tools, template=template, note="<|endoftext|>")
    assert "<|im_end|>" in text
    assert MARK not in text
    assert not BYTE_LEVEL.special_ids & set(ids)


def test_messages_of_any_mapping_type_are_marked():
    messages = [MappingProxyType({"role": "user", "content": "<|im_end|>"})]
    _, ids = BYTE_LEVEL.encode_chat(messages)
    assert [i for i in ids if i in BYTE_LEVEL.special_ids] == [1, 2, 1]


def test_normalized_special_token_is_hidden_too():
    backend = train_byte_level()
    paper = json.loads(backend.to_str())
    for token in paper["added_tokens"]:
        token["normalized"] = True  # as in GPT-2's own file
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(paper)))
    assert not tokenizer.special_ids & set(tokenizer.encode("the<|im_end|>", parse_special=False))
    assert tokenizer.encode("the<|im_end|>")[-1] == 2


def test_marks_do_not_hide_the_fields_of_messages():
    backend = train_byte_level()
    backend.add_special_tokens(["the", "e>"])  # "content" and "role" end with their first letters
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert Tokenizer(backend).encode_chat([{"role": "user", "content": "hi"}], template=template)[0] == "user: hi"


def test_mark_in_user_text_has_no_effect():
    assert BYTE_LEVEL.encode(f"the{MARK}n") == BYTE_LEVEL.encode("then")
    assert not BYTE_LEVEL.special_ids & set(BYTE_LEVEL.encode(f"<{MARK}|im_end|>", parse_special=False))


def test_vocabulary_with_holes():
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 7}, [])))
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([7, 3, 0]) == "b a"  # no decoder: the library puts spaces


def test_tokenizers_without_special_tokens():
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])))
    assert tokenizer.encode("aba", parse_special=False) == [2, 0]
    assert tokenizer.special_ids == frozenset()
    assert tokenizer.eos_token_id is None


def test_chat_without_a_template_is_rejected(byte_level):
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(byte_level).encode_chat([{"role": "user", "content": "x"}])


def test_chat_gets_no_second_bos(byte_level):
    pair = ("<|im_start|>", 1)
    byte_level.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", special_tokens=[pair])
    tokenizer = Tokenizer(byte_level, chat_templates={"default": CHATML})
    assert tokenizer.encode("x")[0] == 1
    _, ids = tokenizer.encode_chat([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert ids.count(1) == 1


def test_turn_openings_are_the_templates_own_tokens(byte_level):
    tokenizer = Tokenizer(byte_level, chat_templates={"default": CHATML})
    user, model = tokenizer.turn_openings()
    assert tokenizer.decode(user, skip_special_tokens=False) == "<|im_start|>user\n"
    assert tokenizer.decode(model, skip_special_tokens=False) == "<|im_start|>assistant\n"
    unopened = Tokenizer(byte_level, chat_templates={"default": "{{ messages[0].content }}"})
    other = Tokenizer(
        byte_level,
        chat_templates={"default": "{{ messages[0].content }}{% if add_generation_prompt %}<|im_end|>{% endif %}"},
    )
    assert [t.turn_openings() for t in (Tokenizer(byte_level), unopened)] == [((), ())] * 2
    assert other.turn_openings() == ((), (2,))


def test_tools_select_the_tool_use_template(byte_level):
    tokenizer = Tokenizer(byte_level, chat_templates={"default": "plain", "tool_use": "tools"})
    assert tokenizer.encode_chat([{"content": ""}])[0] == "plain"
    assert tokenizer.encode_chat([{"content": ""}], tools=[{"name": "f"}])[0] == "tools"


# ---- from a directory


def test_tokenizer_of_a_directory(model_dir):
    tokenizer = read(model_dir)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, (2, 0))
    assert tokenizer.chat_template == CHATML
    assert tokenizer.vocab_size == tokenizer.num_ids == 362
    assert tokenizer.special_ids == {0, 1, 2}


def test_directory_with_only_tokenizer_json(model_dir):
    (model_dir / "tokenizer_config.json").unlink()
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"bos_token_id": 1, "vocab_size": 512}))
    tokenizer = read(model_dir)
    assert tokenizer.special_tokens == {}
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.chat_template is None
    assert tokenizer.num_ids == 512


@pytest.mark.parametrize("nothing", [-1, 1 << 70])
def test_negative_ids_mean_no_token(model_dir, nothing):
    """Some converted models have -1 for a missing token."""
    (model_dir / "tokenizer_config.json").unlink()
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"bos_token_id": nothing, "eos_token_id": [nothing, 2]}))
    tokenizer = read(model_dir)
    assert (tokenizer.bos_token_id, tokenizer.special_tokens) == (None, {})
    assert nothing not in tokenizer.eos_token_ids


def test_chat_templates_of_a_directory(model_dir):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, "nonsense", {}]
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read(model_dir).chat_templates == {"default": "a", "tool_use": "b"}
    (model_dir / "chat_template.jinja").write_text("file ü")
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "rag.jinja").write_text("c")
    templates = read(model_dir).chat_templates
    assert templates == {"default": "file ü", "rag": "c"}
    (model_dir / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        read(model_dir)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\xff"])
def test_broken_tokenizer_is_rejected(model_dir, content):
    (model_dir / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match="skip_tokenizer_init=True") as caught:
        read(model_dir)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_is_reported(model_dir):
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy them from the model .* skip_tokenizer_init=True in Python"):
        read(model_dir)


def test_huge_tokenizer_file_is_not_read(model_dir):
    with open(model_dir / "tokenizer.json", "r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="1,073,741,824"):
        read(model_dir)


def test_custom_code_is_rejected(model_dir):
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["t.T", None]}}))
    with pytest.raises(UnsupportedModelError, match="custom code"):
        read(model_dir)


# ---- from a GGUF file


def byte_level_metadata(pre: str, **more: object) -> dict[str, object]:
    paper = json.loads(train_byte_level().to_str())
    added = {token["id"]: token for token in paper["added_tokens"]}
    vocab = {i: piece for piece, i in paper["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(vocab))]
    return {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [vocab[i] for i in range(len(vocab))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in paper["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
        **more,
    }


def test_byte_level_from_gguf_equals_the_original(write_gguf):
    tokenizer = read(write_gguf(metadata=byte_level_metadata("gpt-2")))
    for text in [
        "the quick brown 123 dogs'",
        "  e\u0301 漢é<tool>\n\n x",
        "<|im_start|>user\nnaïve<|im_end|>",
        "🙂👩‍👩‍👧",
    ]:
        assert tokenizer.encode(text) == BYTE_LEVEL.encode(text)
    assert tokenizer.special_ids == BYTE_LEVEL.special_ids
    assert tokenizer.vocab_size == BYTE_LEVEL.vocab_size
    assert tokenizer.chat_template == CHATML
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_ids == (2, 0)  # <|endoftext|> by its name


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", " DON", "'", "T", " é", "...", "\n ", " x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'", "T", " é", "...", "\n ", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", " é", "...\n", " ", " x"]),
        ("qwen35", ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", " é", "...\n", " ", " x"]),
        ("gpt-4o", ["It's", " ", "123", "45", " DON'T", " é", "...\n", " ", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " DON", "'T", " é", "...\n", " ", " x"]),
    ],
)
def test_pre_tokenizers_split_words_as_their_models_do(write_gguf, pre, words):
    tokenizer = read(write_gguf(metadata=byte_level_metadata(pre)))
    text = "It's 12345 DON'T é...\n  x"
    spans = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in spans] == words


def test_qwen2_normalizes_to_nfc(write_gguf):
    tokenizer = read(write_gguf(metadata=byte_level_metadata("qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert tokenizer.encode("ﬁ") != tokenizer.encode("fi")  # NFC does not replace compatibility characters


@pytest.mark.parametrize(("pre", "words"), [("qwen2", ["\u0928", "\u093f\u0902"]), ("qwen35", ["\u0928\u093f\u0902"])])
def test_marks_are_letters_in_qwen3_5(write_gguf, pre, words):
    tokenizer = read(write_gguf(metadata=byte_level_metadata(pre)))
    text = "".join(words)
    spans = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in spans] == words
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_llama3_looks_up_whole_words_first(write_gguf):
    """ "ab" cannot be merged from its letters, yet it is a token."""
    for pre, pieces in (("llama-bpe", ["ab"]), ("gpt-2", ["a", "b"])):
        path = write_gguf(
            metadata={
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.merges": ["b a"],
                "tokenizer.ggml.tokens": ["a", "b", "ab", "ba"],
            }
        )
        tokenizer = read(path)
        assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("ab")] == pieces


@pytest.mark.parametrize(
    ("pre", "flags", "ids"),
    [
        ("gpt-2", {}, []),
        ("llama-bpe", {}, [1]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, []),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1, 2]),
        ("gpt-2", {"tokenizer.ggml.add_eos_token": True}, [2]),
    ],
)
def test_bos_and_eos_follow_the_gguf_flags(write_gguf, pre, flags, ids):
    tokenizer = read(write_gguf(metadata=byte_level_metadata(pre, **flags)))
    assert tokenizer.encode("") == ids
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.encode("the")[:1] == (ids[:1] if 1 in ids else tokenizer.encode("the", False)[:1])


def sentencepiece_metadata(
    tokens: list[str], types: list[int], scores: list[float], **more: object
) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_sentencepiece_from_gguf(write_gguf):
    metadata = sentencepiece_metadata(*sentencepiece_parts(), unknown_token_id=0)
    tokenizer = read(write_gguf(metadata=metadata))
    piece = tokenizer.backend.id_to_token
    assert [piece(i) for i in tokenizer.encode("the and thin")] == ["<s>", "▁the", "▁and", "▁th", "in"]
    assert [piece(i) for i in tokenizer.encode("漢", False)] == ["▁", "<0xE6>", "<0xBC>", "<0xA2>"]
    assert tokenizer.decode(tokenizer.encode(" the 漢é\n")) == " the 漢é\n"
    # "</" and "s>" are tokens, but no merge turns them into the control token.
    assert [piece(i) for i in tokenizer.encode("</s>", False, parse_special=False)] == ["▁", "</", "s>"]
    assert tokenizer.encode("a</s>", False)[-1] == 2
    assert tokenizer.strips_first_space
    path = write_gguf("bare.gguf", metadata=metadata | {"tokenizer.ggml.add_space_prefix": False})
    bare = read(path)
    assert piece(bare.encode("the")[1]) == "th"
    assert bare.decode(bare.encode(" the")) == " the"


@pytest.mark.parametrize("count", range(1, 41))
def test_runs_of_equal_score_merge_from_the_left(write_gguf, count):
    """Mistral's runs of spaces have one score, and ids in no order of length."""
    runs = ["▁" * n for n in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 1)]
    tokens = ["<unk>", "<s>", "</s>", *runs, "x"]
    scores = [0.0] * 3 + [-1e9] * 16
    metadata = sentencepiece_metadata(tokens, [2, 3, 3, *[1] * 16], scores, add_space_prefix=False)
    symbols = [*"▁" * count, "x"]
    while True:  # SentencePiece's algorithm: the leftmost of equal scores
        pairs = [i for i in range(len(symbols) - 1) if symbols[i] + symbols[i + 1] in runs]
        if not pairs:
            break
        symbols[pairs[0] : pairs[0] + 2] = [symbols[pairs[0]] + symbols[pairs[0] + 1]]
    tokenizer = read(write_gguf(metadata=metadata))
    assert [tokens[i] for i in tokenizer.encode(" " * count + "x", False)] == symbols


def test_tokens_end_by_their_name_whatever_their_type(write_gguf):
    for kind in (1, 3, 4):
        metadata = {
            "tokenizer.ggml.tokens": ["a", "b", "<|eot_id|>", "</s>"],
            "tokenizer.ggml.token_type": [1, 1, kind, 3],
            "tokenizer.ggml.merges": None,
        }
        tokenizer = read(write_gguf(f"{kind}.gguf", metadata=metadata))
        assert tokenizer.eos_token_ids == (3, 2) and 2 in tokenizer.special_ids


def test_gemma_from_gguf(write_gguf):
    """SentencePiece without a space before the text, and with tokens for runs of spaces and newlines."""
    tokens, types, scores = sentencepiece_parts()
    tokens, types, scores = [*tokens, "   ", "\n\n", "<start_of_turn>"], [*types, 4, 4, 3], [*scores, *[-1e3] * 3]
    metadata = sentencepiece_metadata(tokens, types, scores, pre="default", add_space_prefix=False)
    tokenizer = read(write_gguf(metadata=metadata))
    piece = tokenizer.backend.id_to_token
    text = "the   the\n\nthe <start_of_turn>"
    pieces = ["<s>", "th", "e", "   ", "th", "e", "\n\n", "th", "e", "▁", "<start_of_turn>"]
    assert [piece(i) for i in tokenizer.encode(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text), False) == "<s>" + text
    assert {piece(i) for i in tokenizer.special_ids} == {"<unk>", "<s>", "</s>", "<start_of_turn>"}
    assert tokenizer.encode(text, False, parse_special=False)[-1] not in tokenizer.special_ids


def test_gemma4_from_gguf(write_gguf):
    """Characters joined by the file's merges, bytes for others, BOS always, and ends that llama.cpp knows by name."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    merges = ["t h", "th e", "▁ the", "\n \n", "\n\n \n", "▁ ▁"]
    made = [merge.replace(" ", "") for merge in merges]
    named = ["<turn|>", "<|tool_response>", "<|channel>"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, *made, *"▁the\n", *named]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[3] * 4, *[6] * 256, *[1] * (len(made) + 5), 3, 4, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = read(write_gguf(metadata=metadata))
    text = "the the\n\n\n  thé<turn|><|channel>"
    pieces = ["<bos>", "the", "▁the", "\n\n\n", "▁▁", "th", "<0xC3>", "<0xA9>", "<turn|>", "<|channel>"]
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text), False) == "<bos>" + text
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<turn|>", "")
    assert sorted(tokenizer.eos_token_ids) == sorted([1, *(tokens.index(name) for name in named[:2])])
    from transformers import GemmaTokenizer

    pairs = [tuple(merge.split(" ")) for merge in merges]
    original = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    for each in ("the the\n\n\n  thé", " the\tthe  ", "\n" * 5, "漢 the"):
        assert tokenizer.encode(each, False) == original(each, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'; known: gpt2, llama"),
        ({"tokenizer.ggml.pre": "chameleon"}, "'chameleon'"),
        ({"tokenizer.ggml.pre": None}, "known: gpt-2"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a", "ab"]}, "'a' twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.merges": ["a z"]}, "broken"),
        ({"tokenizer.ggml.merges": ["az"]}, "broken"),
        ({"tokenizer.ggml.model": "llama"}, "score"),
        ({"tokenizer.ggml.model": ["llama"]}, "tokenizer.ggml.model is .*type str"),
        ({"tokenizer.ggml.tokens": 4}, "tokenizer.ggml.tokens is 4, it must be of type list"),
        ({"tokenizer.ggml.token_type": 1.5}, "token_type is 1.5"),
        ({"tokenizer.ggml.unknown_token_id": "a"}, "unknown_token_id is 'a'.*type int"),
        ({"tokenizer.chat_templates": 1}, "chat_templates is 1"),
    ],
)
def test_unusable_gguf_tokenizers_are_rejected(write_gguf, metadata, words):
    checkpoint = open_checkpoint(write_gguf(metadata=metadata))
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.from_checkpoint(checkpoint)
    assert "\n" not in str(caught.value)


def test_duplicate_token_is_found_quickly(write_gguf):
    checkpoint = open_checkpoint(write_gguf(metadata={"tokenizer.ggml.tokens": [*map(str, range(80_000)), "79999"]}))
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match="'79999' twice"):
        Tokenizer.from_checkpoint(checkpoint)
    assert time.perf_counter() - begin < 10


# ---- real models


def prompts() -> list[str]:
    """Texts that are hard for tokenizers, and real questions if the data folder is present."""
    texts = [
        "Hello, World!",
        "  two  spaces ",
        "12345 3.14",
        "naïve café 漢字 👩‍👩‍👧",
        "def f(x):\n\treturn x\n\n\n",
        "I'LL don't",
    ]
    path = SHARED / "prompts" / "mt_bench_question.jsonl"
    if path.exists():
        texts += [turn for line in path.read_text().splitlines() for turn in json.loads(line)["turns"]]
    return texts


@pytest.mark.model
@pytest.mark.proof
@pytest.mark.skipif(not catalog.CATALOG["smollm2-135m-instruct"].path.exists(), reason="SmolLM2 is not in the cache")
def test_smollm2_agrees_with_transformers():
    path = catalog.cached_path("smollm2")
    ours = read(path)
    # In a subprocess: it imports torch and takes seconds.
    code = (
        "import sys, json, warnings; warnings.simplefilter('ignore'); from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2])\n"
        "texts = json.load(sys.stdin)\n"
        "messages = [{'role': 'user', 'content': 'Hi'}]\n"
        "chat = t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)\n"
        "print(json.dumps([[t.encode(x) for x in texts], [t.decode(t.encode(x)) for x in texts], chat]))"
    )
    command = [sys.executable, "-c", code, str(path.parent), path.name]
    done = subprocess.run(command, input=json.dumps(prompts()), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ids, texts, chat = json.loads(done.stdout.splitlines()[-1])
    assert ours.encode_batch(prompts()) == ids
    assert [ours.decode(i) for i in ids] == texts
    text, chat_ids = ours.encode_chat([{"role": "user", "content": "Hi"}])
    assert text == chat
    assert chat_ids == ours.encode(chat)


@pytest.mark.model
@pytest.mark.proof
@pytest.mark.skipif(not catalog.CATALOG["smollm2-135m-instruct"].path.exists(), reason="SmolLM2 is not in the cache")
def test_smollm2_known_ids():
    tokenizer = read(catalog.cached_path("smollm2"))
    assert tokenizer.decode(tokenizer.encode("<|im_start|>assistant\n"), False) == "<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_start|>assistant\n") == [1, 520, 9531, 198]
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("in 2024")] == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.shared
@pytest.mark.skipif(not STORIES.exists(), reason="shared/data is not there")
def test_stories260k_round_trips():
    tokenizer = read(STORIES)
    text = "Once upon a time, there was a little girl named Lily. 漢"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (2, 1)
    assert not tokenizer.special_ids & set(tokenizer.encode("</s><s>", False, parse_special=False))


@pytest.mark.shared
@pytest.mark.skipif(not STORIES.exists(), reason="shared/data is not there")
def test_stories260k_through_gguf_equals_the_original(write_gguf):
    paper = json.loads((STORIES / "tokenizer.json").read_text())
    vocab = sorted(paper["model"]["vocab"], key=paper["model"]["vocab"].get)
    rank = {left + right: -float(n) for n, (left, right) in reversed(list(enumerate(paper["model"]["merges"])))}
    types, scores = [2, 3, 3, *[6] * 256, *[1] * (len(vocab) - 259)], [rank.get(piece, -1e6) for piece in vocab]
    metadata = sentencepiece_metadata(vocab, types, scores)
    ours = read(write_gguf(metadata=metadata))
    given = read(STORIES)
    for text in prompts():
        assert ours.encode(text) == given.encode(text)
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("key", "neutral", "value"),
    [
        ("remove_extra_whitespaces", False, True),
        ("precompiled_charsmap", None, [1, 2]),
        ("add_sep_token", False, True),
        ("normalizer.lowercase", False, True),
        ("suppress_tokens", None, [1, 2]),
    ],
)
def test_gguf_keys_that_change_tokens_are_refused(write_gguf, key, neutral, value):
    key = f"tokenizer.ggml.{key}"
    read(write_gguf("neutral.gguf", metadata={key: neutral}))
    with pytest.raises(UnsupportedModelError, match=rf"{key} .* is not supported; set skip_tokenizer_init"):
        read(write_gguf(metadata={key: value}))
    assert key in GGUF_KEYS.refused


def test_keys_of_tokenizer_files_are_sorted(model_dir, write_gguf):
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 9, "novelty": 1}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    use = tokenizer_key_uses(open_checkpoint(model_dir))[0]
    assert (use.read, use.inert, use.unknown) == (("tokenizer_class",), ("model_max_length",), ("novelty",))
    use = tokenizer_key_uses(open_checkpoint(write_gguf(metadata={"tokenizer.ggml.novelty": 1})))[0]
    assert "tokenizer.ggml.tokens" in use.read and use.unknown == ("tokenizer.ggml.novelty",)
