"""A tiny model with one token per character, so that texts and stop strings are readable as tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from octavo import LLM
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

SPECIALS = ["<pad>", "<s>", "</s>"]
LETTERS = [chr(c) for c in range(ord("!"), ord("~") + 1)]


def make_talking_checkpoint(directory: Path, *, seed: int = 0, **sizes: Any) -> Path:
    """A tiny Llama with a tokenizer of the 94 printable characters, three special tokens before them."""
    write_tokenizer(make_tiny_checkpoint("llama", directory, seed=seed, **sizes))
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer to the directory of a tiny model of any kind."""
    vocab = {piece: i for i, piece in enumerate(SPECIALS + LETTERS)}
    assert len(vocab) == VOCAB_SIZE
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


class WrappedModel:
    """Wraps an engine's model: calls hooks before and after each forward pass.

    before   called with the pass number (from 0) and its tokens; an exception fails the step
    after    called with the pass number, its tokens and the logits, which it may change
    """

    def __init__(
        self,
        llm: LLM,
        *,
        before: Callable[[int, list[int]], None] = lambda number, tokens: None,
        after: Callable[[int, list[int], Tensor], None] = lambda number, tokens, logits: None,
    ) -> None:
        self.runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        self.inner = self.runner.passes.model
        self.before, self.after = before, after
        self.num_passes = 0
        self.runner.passes.replace_model(self)

    def forward(self, token_ids: Tensor, batch: Any, kv: Tensor, *rest: Any) -> Tensor:
        assert threading.current_thread() is not threading.main_thread()
        number, tokens = self.num_passes, token_ids.tolist()
        self.num_passes += 1
        self.before(number, tokens)
        logits: Tensor = self.inner.forward(token_ids, batch, kv, *rest)
        self.after(number, tokens, logits)
        return logits
