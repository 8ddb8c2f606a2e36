"""GGUF vocabularies cut 10,000 lines as the originals do: code, and text of ten alphabets."""

from __future__ import annotations

import io
import itertools
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from octavo.errors import UnsupportedModelError
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_loader import PRE_TOKENIZERS, find_merges
from tests.text.samples import read, write_gguf_file

sentencepiece = pytest.importorskip("sentencepiece")
sentencepiece_model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

# fmt: off
ALPHABETS = [
    (0x430, 0x44F), (0x3B1, 0x3C9), (0x5D0, 0x5EA), (0x627, 0x64A), (0x905, 0x939), (0xE01, 0xE2E), (0x4E00, 0x5200),
    (0x3042, 0x3093), (0xAC00, 0xB000), (0x561, 0x586),
]
# fmt: on
NORMAL, UNUSED = 1, 5


def make_lines(rng: random.Random) -> tuple[list[str], list[str]]:
    """Lines of Python's standard library, and lines of words in ten alphabets."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [line for file in files for line in file.read_text(errors="ignore").split("\n")]

    def word(first: int, last: int) -> str:
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))

    return code, [" ".join(word(*ends) for _ in range(rng.randint(1, 9))) for ends in ALPHABETS for _ in range(400)]


def write_gguf(path: Path, original: sentencepiece.SentencePieceProcessor, *, prefix: bool) -> None:
    """The vocabulary as llama.cpp's converter stores it."""
    pieces = sentencepiece_model_pb2.ModelProto.FromString(original.serialized_model_proto()).pieces
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece.encode() for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.type for piece in pieces])
    writer.add_add_space_prefix(prefix)
    writer.add_bos_token_id(original.bos_id())
    writer.add_eos_token_id(original.eos_id())
    writer.add_unk_token_id(original.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SOME_AND_ALL = pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.proof)])


def train(lines: list[str], *, prefix: bool, size: int = 4000, **more: Any) -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=trained,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **more,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def convert(path: Path, original: sentencepiece.SentencePieceProcessor, *, prefix: bool) -> Tokenizer:
    write_gguf(path, original, prefix=prefix)
    return read(path)


@SOME_AND_ALL
@pytest.mark.parametrize("prefix", [True, False])
def test_lines_have_the_ids_and_the_text_of_the_original(prefix: bool, count: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    code, words = make_lines(rng)
    original = train([*rng.sample(code, 2 * count), *words[::2]], prefix=prefix)
    tokenizer = convert(tmp_path / "model.gguf", original, prefix=prefix)
    lines = rng.sample(rng.sample(code, 6000) + words, count)
    assert [line for line in lines if tokenizer.encode(line, False) != original.encode(line)] == []
    texts = [(tokenizer.decode(ids), original.decode(ids)) for ids in map(original.encode, lines)]
    assert [pair for pair in texts if pair[0] != pair[1]] == []


@pytest.mark.parametrize("prefix", [True, False])
def test_user_defined_pieces_cut_a_text_as_in_llama_cpp(prefix: bool, tmp_path: Path) -> None:
    """With a space prefix, a word after such a piece has one, too; SentencePiece has it only at the start."""
    code, _ = make_lines(random.Random(0))
    original = train(code[:3000], prefix=prefix, size=1000, user_defined_symbols=["<tool>", "\u2581\u2581"])
    tokenizer = convert(tmp_path / "model.gguf", original, prefix=prefix)
    tool, spaces = map(original.piece_to_id, ("<tool>", "\u2581\u2581"))
    assert tokenizer.encode("def<tool>self", False) == [*original.encode("def"), tool, *original.encode("self")]
    if not prefix:
        for line in [line + "<tool>" + line for line in code[:400]]:
            assert tokenizer.encode(line, False) == original.encode(line)
        assert spaces in tokenizer.encode("a  b", False)


def edit(original: sentencepiece.SentencePieceProcessor, change: Callable[[Any], None]) -> Any:
    """The model with a change of its pieces."""
    model = sentencepiece_model_pb2.ModelProto.FromString(original.serialized_model_proto())
    for piece in model.pieces:
        change(piece)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_scores_and_types_that_merges_cannot_express_are_refused(tmp_path: Path) -> None:
    code, _ = make_lines(random.Random(0))
    original = train(code[:3000], prefix=True, size=1000)

    def forget_scores(piece: Any) -> None:
        piece.score = -1000

    def disuse(piece: Any) -> None:
        piece.type = UNUSED if piece.piece == "self" else piece.type

    with pytest.raises(UnsupportedModelError, match=r"tokenizer.ggml.scores is the same for"):
        convert(tmp_path / "scores.gguf", edit(original, forget_scores), prefix=True)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer.ggml.token_type is UNUSED for 'self'"):
        convert(tmp_path / "types.gguf", edit(original, disuse), prefix=True)


def test_unused_tokens_that_no_text_reaches_are_kept(tmp_path: Path) -> None:
    code, _ = make_lines(random.Random(0))
    original = edit(
        train(code[:3000], prefix=True, size=1000, user_defined_symbols=["[PAD7]"]),
        lambda piece: setattr(piece, "type", UNUSED if piece.piece == "[PAD7]" else piece.type),
    )
    tokenizer = convert(tmp_path / "model.gguf", original, prefix=True)
    assert tokenizer.encode("the [PAD7]", False) == original.encode("the [PAD7]")


# ---- byte-level vocabularies

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def published_words(pre: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer in the tokenizer.json of the models that a name in GGUF stands for."""
    byte_level = pre_tokenizers.ByteLevel
    if pre in ("smollm", "starcoder"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(False)])
    patterns = {"qwen2": QWEN2, "qwen35": QWEN35, "deepseek-r1-qwen": QWEN2}
    pattern = (patterns | {"gpt-4o": GPT4O, "llama-bpe": LLAMA3, "llama3": LLAMA3}).get(pre)
    if pattern is None:
        return byte_level(False)
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, byte_level(False, use_regex=False)])


@SOME_AND_ALL
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_lines_have_the_ids_and_the_text_of_the_original(pre: str, count: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    code, words = make_lines(rng)
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("gpt-4o", "llama-bpe", "llama3")))
    original.pre_tokenizer, original.decoder = published_words(pre), decoders.ByteLevel()
    if "qwen" in pre:
        original.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator([*rng.sample(code, 4000), *words[::4]], trainer)
    paper = json.loads(original.to_str())["model"]
    metadata = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(paper["vocab"], key=paper["vocab"].get),
        "tokenizer.ggml.token_type": [NORMAL] * len(paper["vocab"]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in paper["merges"]],
        "tokenizer.ggml.eos_token_id": None,
    }
    path = write_gguf_file(tmp_path / "model.gguf", metadata=metadata)
    tokenizer = read(path)
    lines = rng.sample(rng.sample(code, 6000) + words, count)
    lines = [*lines, *("\n".join(lines[i : i + 5]) for i in range(0, count, 50)), "e\u0301 ½ ² ٣ Ⅳ\u3000\r\n\t x'LL"]
    expected = [encoding.ids for encoding in original.encode_batch(lines, add_special_tokens=False)]
    assert [line for line, ids in zip(lines, expected, strict=True) if tokenizer.encode(line, False) != ids] == []
    assert [tokenizer.decode(ids) for ids in expected] == [original.decode(ids) for ids in expected]


def merge_by_score(scores: dict[str, float], text: str) -> list[str]:
    """SentencePiece's algorithm: the neighbours of the best score merge, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = enumerate(itertools.pairwise(symbols))
        best = max(((scores[a + b], -i) for i, (a, b) in pairs if a + b in scores), default=None)
        if best is None:
            return symbols
        i = -best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.proof)])
def test_vocabularies_with_equal_scores_are_exact_or_refused(count: int) -> None:
    rng, outcomes = random.Random(count), {True: 0, False: 0}
    for _ in range(count):
        letters = rng.choice(["a", "ab", "abc"])
        pieces = list(letters)
        for _ in range(rng.randint(1, 9)):
            pieces += {rng.choice(pieces) + rng.choice(pieces)} - set(pieces)
        levels = rng.choice([0, 2, 5, 100])
        scores = {piece: -float(rng.randint(0, levels)) for piece in pieces}
        try:
            merges = find_merges("model.gguf", pieces, [NORMAL] * len(pieces), list(scores.values()))
        except UnsupportedModelError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
        for _ in range(20):
            text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 16)))
            assert backend.encode(text).tokens == merge_by_score(scores, text), scores
    assert min(outcomes.values()) > count / 10
