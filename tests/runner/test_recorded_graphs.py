"""Decode steps that were recorded give what the model gives, to the last bit."""

from __future__ import annotations

import random
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu.packed_linear import SMALL_BATCH_ROWS
from octavo.kernels.metadata import RaggedBatch
from octavo.models.decoder import Decoder
from octavo.runner.recorded_graphs import MIN_TABLE_WIDTH, RecordedModel
from tests.models.tiny import load_tiny, make_tiny_checkpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")
BLOCK_SIZE, NUM_BLOCKS = 2, 6 * MIN_TABLE_WIDTH


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return load_tiny(folder, cpu, torch.bfloat16, finish=methodcaller("pack"), max_len=4 * MIN_TABLE_WIDTH)


class Counting:
    """A model that counts how often it is called."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0

    def forward(self, *args: Any) -> Tensor:
        self.calls += 1
        return self.model.forward(*args)


def pool(decoder: Decoder) -> Tensor:
    spec = decoder.spec
    shape = (NUM_BLOCKS + 1, spec.num_layers, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def random_step(rng: random.Random, num_seqs: int, longest: int) -> tuple[Tensor, RaggedBatch, Tensor]:
    lens = [rng.randint(1, longest) for _ in range(num_seqs)]
    ids = rng.sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
    tables = [[ids.pop() for _ in range(-(-n // BLOCK_SIZE))] for n in lens]
    tokens = torch.tensor([rng.randrange(97) for _ in lens])
    return tokens, RaggedBatch.from_lists([1] * num_seqs, lens, tables, BLOCK_SIZE), torch.arange(num_seqs)


def test_steps_of_all_sizes_and_lengths(decoder: Decoder) -> None:
    rng = random.Random(0)
    model = Counting(decoder)
    replays = RecordedModel(model)
    kv, expected_kv = pool(decoder), pool(decoder)
    sizes = [(n, longest) for n in (1, 2, 4) for longest in (9, 2 * MIN_TABLE_WIDTH - 1)] * 4
    rng.shuffle(sizes)
    for num_seqs, longest in sizes:
        tokens, batch, rows = random_step(rng, num_seqs, longest)
        logits = replays.forward(tokens, batch, kv, rows).clone()
        assert torch.equal(logits, decoder.forward(tokens, batch, expected_kv, rows))
        assert torch.equal(kv[1:], expected_kv[1:])  # the null block is anyone's
    assert model.calls == 3 * 3  # sizes, each computed twice to record it and once to try it


def test_longer_tables_are_another_recording(decoder: Decoder) -> None:
    rng = random.Random(0)
    model = Counting(decoder)
    replays, kv = RecordedModel(model), pool(decoder)
    for longest, calls in (
        (5, 3),
        (2 * MIN_TABLE_WIDTH, 3),
        (2 * MIN_TABLE_WIDTH + 1, 6),
        (3 * MIN_TABLE_WIDTH, 6),
        (5, 6),
    ):
        block_ids = list(range(1, -(-longest // BLOCK_SIZE) + 1))
        batch = RaggedBatch.from_lists([1], [longest], [block_ids], BLOCK_SIZE)
        tokens = torch.tensor([rng.randrange(97)])
        logits = replays.forward(tokens, batch, kv, torch.arange(1)).clone()
        assert torch.equal(logits, decoder.forward(tokens, batch, kv, None))
        assert model.calls == calls


@pytest.mark.parametrize("what", ["chunk", "several rows of a token", "many sequences"])
def test_other_steps_are_the_models(decoder: Decoder, what: str) -> None:
    model = Counting(decoder)
    replays, kv = RecordedModel(model), pool(decoder)
    if what == "chunk":
        batch, rows = RaggedBatch.from_lists([3], [5], [[1, 2, 3]], BLOCK_SIZE), torch.tensor([2])
    elif what == "many sequences":
        num = SMALL_BATCH_ROWS + 1
        tables = [[i] for i in range(1, num + 1)]
        batch, rows = RaggedBatch.from_lists([1] * num, [2] * num, tables, BLOCK_SIZE), torch.arange(num)
    else:
        batch, rows = RaggedBatch.from_lists([1], [5], [[1, 2, 3]], BLOCK_SIZE), torch.tensor([0, 0])
    for _ in range(2):
        logits = replays.forward(torch.arange(len(batch.positions)), batch, kv, rows)
        assert len(logits) == len(rows)
    assert model.calls == 2


class Leaky:
    """A model that does one thing outside of the recorded operations."""

    def __init__(self, decoder: Decoder, what: str) -> None:
        self.decoder = decoder
        self.what = what

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        if self.what == "before":
            token_ids = (token_ids + 1) % 97
        logits = self.decoder.forward(token_ids, batch, kv, logits_rows)
        return logits + batch.positions.unsqueeze(1) if self.what == "behind" else logits


@pytest.mark.parametrize("what", ["before", "behind"])
def test_what_is_not_recorded_is_found_out(decoder: Decoder, what: str) -> None:
    rng = random.Random(0)
    model = Leaky(decoder, what)
    replays, kv = RecordedModel(model), pool(decoder)
    for _ in range(3):
        tokens, batch, rows = random_step(rng, 1, 20)
        assert torch.equal(replays.forward(tokens, batch, kv, rows), model.forward(tokens, batch, kv, rows))


def test_unpacked_models_are_computed_as_ever(tmp_path: Path) -> None:
    decoder = load_tiny(make_tiny_checkpoint("llama", tmp_path), cpu, torch.float32, max_len=64)
    rng = random.Random(0)
    model = Counting(decoder)
    replays, kv = RecordedModel(model), pool(decoder).float()
    for _ in range(5):
        tokens, batch, rows = random_step(rng, 2, 20)
        assert torch.equal(replays.forward(tokens, batch, kv, rows), decoder.forward(tokens, batch, kv, rows))
    assert model.calls == 3 + 5  # the vain attempt, once


def test_recording_is_the_threads_own() -> None:
    library = native.library()
    assert library is not None
    with library.record() as recording:
        library.silu_mul(torch.ones(1, 8))
    library.silu_mul(torch.ones(1, 8))
    assert len(recording._pairs) == 1
