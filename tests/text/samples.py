"""Small tokenizers and GGUF files that tests build for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.checkpoint.resolve import open_checkpoint
from octavo.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs " * 4,
    "naïve café, 漢字 かな 한국어, 🙂🙃 👩‍👩‍👧 e\u0301 o\u0308 " * 4,
    "def f(x):\n    return x + 1234567890\n\n" * 4,
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read(path: Path) -> Tokenizer:
    """The tokenizer of a model directory or a GGUF file."""
    return Tokenizer.from_checkpoint(open_checkpoint(path))


def train_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("漢é", normalized=False)])
    return backend


def sentencepiece_parts() -> tuple[list[str], list[int], list[float]]:
    """Pieces, token types and scores of a SentencePiece model, as in a GGUF file."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    merged = ["th", "▁th", "▁the", "he", "in", "▁a", "an", "▁an", "and", "▁and", "s>", "</", "▁▁"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,<>/é"))
    pieces += merged + letters
    types += [1] * (len(merged) + len(letters))
    return (
        pieces,
        types,
        [0.0] * 259 + [-float(n) for n in range(len(merged))] + [-1e3 - n for n in range(len(letters))],
    )


def make_sentencepiece(*, strip: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece conventions: a space before the text, "▁" for spaces, bytes for unknown characters."""
    pieces, _, _ = sentencepiece_parts()
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("h", "e"), ("i", "n"), ("▁", "a"), ("▁a", "n"), ("a", "n")]
    vocab = {p: i for i, p in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 362, "eos_token_id": 2}


def write_gguf_file(
    path: Path,
    *,
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a tiny GGUF file; None as a value of `metadata` leaves the key out."""
    writer = gguf.GGUFWriter(str(path), arch)
    keys: dict[str, Any] = {
        f"{arch}.block_count": 1,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": 16,
        f"{arch}.feed_forward_length": 32,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }
    for key, value in (keys | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    weights = {
        "token_embd.weight": np.zeros((4, 16), np.float32),
        "blk.0.attn_q.weight": np.ones((16, 16), np.float32),
    }
    for tensor_name, array in (tensors if tensors is not None else weights).items():
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
