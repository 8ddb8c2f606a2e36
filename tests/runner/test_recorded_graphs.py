"""Recorded decode steps give the model's logits, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu.packed_linear import SMALL_BATCH_ROWS
from octavo.kernels.metadata import RaggedBatch
from octavo.models.decoder import Decoder
from octavo.models.linear_methods import PackedMethod
from octavo.runner.recorded_graphs import MIN_TABLE_WIDTH, RecordedModel
from tests.models.tiny import load_tiny, make_tiny_checkpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")
BLOCK_SIZE, NUM_BLOCKS = 2, 6 * MIN_TABLE_WIDTH


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return load_tiny(folder, cpu, torch.bfloat16, linear_method=PackedMethod, max_len=4 * MIN_TABLE_WIDTH)


class CallCounter:
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


def random_step(rng: random.Random, num_seqs: int, max_len: int) -> tuple[Tensor, RaggedBatch, Tensor]:
    lens = [rng.randint(1, max_len) for _ in range(num_seqs)]
    ids = rng.sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
    tables = [[ids.pop() for _ in range(cdiv(n, BLOCK_SIZE))] for n in lens]
    tokens = torch.tensor([rng.randrange(97) for _ in lens])
    return tokens, RaggedBatch.from_lists([1] * num_seqs, lens, tables, BLOCK_SIZE), torch.arange(num_seqs)


def test_replayed_steps_equal_the_model(decoder: Decoder) -> None:
    rng = random.Random(0)
    model = CallCounter(decoder)
    recorded = RecordedModel(model)
    kv, expected_kv = pool(decoder), pool(decoder)
    sizes = [(n, max_len) for n in (1, 2, 4) for max_len in (9, 2 * MIN_TABLE_WIDTH - 1)] * 4
    rng.shuffle(sizes)
    for num_seqs, max_len in sizes:
        tokens, batch, rows = random_step(rng, num_seqs, max_len)
        logits = recorded.forward(tokens, batch, kv, rows).clone()
        assert torch.equal(logits, decoder.forward(tokens, batch, expected_kv, rows))
        assert torch.equal(kv[1:], expected_kv[1:])  # the null block may differ
    assert model.calls == 3 * 3  # sizes, each computed twice for the recording and once for its check


def test_wider_block_tables_need_another_recording(decoder: Decoder) -> None:
    rng = random.Random(0)
    model = CallCounter(decoder)
    recorded, kv = RecordedModel(model), pool(decoder)
    for seq_len, calls in (
        (5, 3),
        (2 * MIN_TABLE_WIDTH, 3),
        (2 * MIN_TABLE_WIDTH + 1, 6),
        (3 * MIN_TABLE_WIDTH, 6),
        (5, 6),
    ):
        block_ids = list(range(1, cdiv(seq_len, BLOCK_SIZE) + 1))
        batch = RaggedBatch.from_lists([1], [seq_len], [block_ids], BLOCK_SIZE)
        tokens = torch.tensor([rng.randrange(97)])
        logits = recorded.forward(tokens, batch, kv, torch.arange(1)).clone()
        assert torch.equal(logits, decoder.forward(tokens, batch, kv, None))
        assert model.calls == calls


@pytest.mark.parametrize("step", ["prefill chunk", "several logits of a token", "many sequences"])
def test_other_steps_are_not_recorded(decoder: Decoder, step: str) -> None:
    model = CallCounter(decoder)
    recorded, kv = RecordedModel(model), pool(decoder)
    if step == "prefill chunk":
        batch, rows = RaggedBatch.from_lists([3], [5], [[1, 2, 3]], BLOCK_SIZE), torch.tensor([2])
    elif step == "many sequences":
        num = SMALL_BATCH_ROWS + 1
        tables = [[i] for i in range(1, num + 1)]
        batch, rows = RaggedBatch.from_lists([1] * num, [2] * num, tables, BLOCK_SIZE), torch.arange(num)
    else:
        batch, rows = RaggedBatch.from_lists([1], [5], [[1, 2, 3]], BLOCK_SIZE), torch.tensor([0, 0])
    for _ in range(2):
        logits = recorded.forward(torch.arange(len(batch.positions)), batch, kv, rows)
        assert len(logits) == len(rows)
    assert model.calls == 2


class PartlyRecorded:
    """A model with one torch operation, which is not recorded, before or after the others."""

    def __init__(self, decoder: Decoder, where: str) -> None:
        self.decoder = decoder
        self.where = where

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        if self.where == "before":
            token_ids = (token_ids + 1) % 97
        logits = self.decoder.forward(token_ids, batch, kv, logits_rows)
        return logits + batch.positions.unsqueeze(1) if self.where == "after" else logits


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_model_with_unrecorded_operations_is_not_replayed(decoder: Decoder, where: str) -> None:
    rng = random.Random(0)
    model = PartlyRecorded(decoder, where)
    recorded, kv = RecordedModel(model), pool(decoder)
    for _ in range(3):
        tokens, batch, rows = random_step(rng, 1, 20)
        assert torch.equal(recorded.forward(tokens, batch, kv, rows), model.forward(tokens, batch, kv, rows))


def test_unpacked_models_are_not_recorded(tmp_path: Path) -> None:
    decoder = load_tiny(make_tiny_checkpoint("llama", tmp_path), cpu, torch.float32, max_len=64)
    rng = random.Random(0)
    model = CallCounter(decoder)
    recorded, kv = RecordedModel(model), pool(decoder).float()
    for _ in range(5):
        tokens, batch, rows = random_step(rng, 2, 20)
        assert torch.equal(recorded.forward(tokens, batch, kv, rows), decoder.forward(tokens, batch, kv, rows))
    assert model.calls == 3 + 5  # one failed recording


def test_operations_after_a_recording_are_not_recorded() -> None:
    library = native.library()
    assert library is not None
    with library.record() as recording:
        library.silu_mul(torch.ones(1, 8))
    library.silu_mul(torch.ones(1, 8))
    assert len(recording._pairs) == 1
