"""A tiny model that writes given tokens, with a tokenizer of bytes and special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.text.tokenizer import Tokenizer
from tests.engine.models import WrappedModel
from tests.models.tiny import make_tiny_checkpoint

SPECIALS = ("<pad>", "<s>", "</s>")


def make_byte_checkpoint(directory: Path, specials: Sequence[str] = SPECIALS, **sizes: Any) -> Path:
    """A random model whose tokens are the bytes and these special tokens, which have the first ids. The second begins
    a text, the third ends it."""
    make_tiny_checkpoint("llama", directory, vocab_size=256 + len(specials), **sizes)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate([*specials, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    backend.save(str(directory / "tokenizer.json"))
    names = {"bos_token": specials[1], "eos_token": specials[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


class Script(WrappedModel):
    """Makes a model write the tokens of `text`, one request at a time; `prompts` has the tokens of each prefill."""

    def __init__(self, llm: Any, tokenizer: Tokenizer) -> None:
        super().__init__(llm, after=self._choose)
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._at = 0

    def write(self, text: str) -> None:
        """The output of the next requests. It begins again at its end or with a prompt."""
        self._ids, self._at = self._tokenizer.encode(text, add_special_tokens=False), 0

    def _choose(self, number: int, tokens: list[int], logits: Any) -> None:
        if len(tokens) > 1 or self._at == len(self._ids):
            self._at = 0
        logits[:, self._ids[self._at]] = 1e4
        self._at += 1
