"""GGUF files with a SentencePiece vocabulary cut 10,000 lines as the original does: code, and text of ten alphabets."""

from __future__ import annotations

import io
import random
import sysconfig
from pathlib import Path

import gguf
import pytest

from octavo.checkpoint.resolve import open_checkpoint
from octavo.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

# fmt: off
ALPHABETS = [
    (0x430, 0x44F), (0x3B1, 0x3C9), (0x5D0, 0x5EA), (0x627, 0x64A), (0x905, 0x939), (0xE01, 0xE2E), (0x4E00, 0x5200),
    (0x3042, 0x3093), (0xAC00, 0xB000), (0x561, 0x586),
]
# fmt: on
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6


def make_lines(rng: random.Random) -> tuple[list[str], list[str]]:
    """Lines of Python's standard library, and lines of words in ten alphabets."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [line for file in files for line in file.read_text(errors="ignore").split("\n")]

    def word(first: int, last: int) -> str:
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))

    return code, [" ".join(word(*ends) for _ in range(rng.randint(1, 9))) for ends in ALPHABETS for _ in range(400)]


def write_gguf(path: Path, original: sentencepiece.SentencePieceProcessor, *, prefix: bool) -> None:
    """The vocabulary as llama.cpp's converter stores it."""
    ids = range(original.vocab_size())
    checks = {UNKNOWN: original.is_unknown, CONTROL: original.is_control, UNUSED: original.is_unused}
    checks[BYTE] = original.is_byte
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([original.id_to_piece(i).encode() for i in ids])
    writer.add_token_scores([original.get_score(i) for i in ids])
    writer.add_token_types([next((kind for kind, check in checks.items() if check(i)), NORMAL) for i in ids])
    writer.add_add_space_prefix(prefix)
    writer.add_bos_token_id(original.bos_id())
    writer.add_eos_token_id(original.eos_id())
    writer.add_unk_token_id(original.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.proof
@pytest.mark.parametrize("prefix", [True, False])
def test_lines_have_the_ids_and_the_text_of_the_original(prefix: bool, tmp_path: Path) -> None:
    rng, trained = random.Random(0), io.BytesIO()
    code, words = make_lines(rng)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in rng.sample(code, 20_000) + words[::2] if line.strip()]),
        model_writer=trained,
        model_type="bpe",
        vocab_size=4000,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    write_gguf(tmp_path / "model.gguf", original, prefix=prefix)
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(tmp_path / "model.gguf"))
    lines = rng.sample(code, 6000) + words
    assert len(lines) == 10_000
    assert [line for line in lines if tokenizer.encode(line, False) != original.encode(line)] == []
    texts = [(tokenizer.decode(ids), original.decode(ids)) for ids in map(original.encode, lines)]
    assert [pair for pair in texts if pair[0] != pair[1]] == []
