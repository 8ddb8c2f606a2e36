"""Recorded decode steps give the model's logits, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.integers import cdiv
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu.packed_linear import SMALL_BATCH_ROWS
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import DecodeInputs
from octavo.models.decoder import Decoder
from octavo.models.linear_methods import PackedMethod
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.passes.recorded_graphs import RecordedGraphs
from tests.models.tiny import load_tiny, make_tiny_checkpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")
BLOCK_SIZE, MAX_BLOCKS, NUM_ROWS = 2, 64, 20
NUM_BLOCKS = 6 * MAX_BLOCKS


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return load_tiny(folder, cpu, torch.bfloat16, linear_method=PackedMethod, max_len=4 * MAX_BLOCKS)


class Passes:
    """Decode passes over the buffers of `DecodeInputs`, replayed where possible. Counts the calls of the model."""

    def __init__(self, model: Any, kv: Tensor) -> None:
        self.model, self.kv, self.calls = model, kv, 0
        head = [torch.zeros(NUM_ROWS, dtype=torch.int64) for _ in range(3)]
        step_counter = torch.zeros(2, dtype=torch.int64)
        self.inputs = DecodeInputs.allocate(step_counter, *head, max_blocks=MAX_BLOCKS, block_size=BLOCK_SIZE)
        self.graphs = RecordedGraphs(self.inputs)

    def fill(self, tokens: Tensor, batch: RaggedBatch) -> DecodeInputs:
        inputs = self.inputs.first(len(tokens))
        inputs.token_ids.copy_(tokens)
        inputs.batch.positions.copy_(batch.positions)
        inputs.batch.slot_mapping.copy_(batch.slot_mapping)
        inputs.batch.seq_lens.copy_(batch.seq_lens)
        inputs.batch.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        return inputs

    def __call__(self, tokens: Tensor, batch: RaggedBatch) -> Tensor:
        inputs, size = self.fill(tokens, batch), len(tokens)

        def forward() -> Tensor:
            self.calls += 1
            logits: Tensor = self.model.forward(inputs.token_ids, inputs.batch, self.kv, None)
            return logits

        if size <= self.graphs.max_slices and size not in self.graphs:
            self.graphs.capture(size, forward)
        return self.graphs.replay(size) if size in self.graphs else forward()


def pool(decoder: Decoder) -> Tensor:
    spec = decoder.spec
    shape = (NUM_BLOCKS + 1, spec.num_layers, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def random_step(rng: random.Random, num_seqs: int, max_len: int) -> tuple[Tensor, RaggedBatch]:
    lens = [rng.randint(1, max_len) for _ in range(num_seqs)]
    ids = rng.sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
    tables = [[ids.pop() for _ in range(cdiv(n, BLOCK_SIZE))] for n in lens]
    return torch.tensor([rng.randrange(97) for _ in lens]), RaggedBatch.from_lists(
        [1] * num_seqs, lens, tables, BLOCK_SIZE
    )


def test_replayed_passes_equal_the_model(decoder: Decoder) -> None:
    rng = random.Random(0)
    kv, expected_kv = pool(decoder), pool(decoder)
    recorded = Passes(decoder, kv)
    sizes = [(n, max_len) for n in (1, 2, 4) for max_len in (9, 2 * MAX_BLOCKS - 1)] * 4
    rng.shuffle(sizes)
    for num_seqs, max_len in sizes:
        tokens, batch = random_step(rng, num_seqs, max_len)
        logits = recorded(tokens, batch).clone()
        assert torch.equal(logits, decoder.forward(tokens, batch, expected_kv, None))
        assert torch.equal(kv[1:], expected_kv[1:])  # the null block may differ
    assert recorded.calls == 3 * 3  # sizes, each computed twice for the recording and once for its check


def test_passes_of_many_rows_are_not_recorded(decoder: Decoder) -> None:
    assert Passes(decoder, pool(decoder)).graphs.max_slices == SMALL_BATCH_ROWS


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", "olmo2", "granite", "gpt_oss", "qwen3_moe", "qwen3_5", "qwen3_next"]
)
def test_whole_passes_and_models_are_replayed(kind: str, tmp_path: Path) -> None:
    """A filter is not native: only the model is replayed. Passes of more rows and prefill passes are computed. A
    recording advances no recurrent state, and moves no row."""
    model = str(make_tiny_checkpoint(kind, tmp_path / kind))
    always: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 40}
    replays: list[Any] = []
    prompts = [[3 + (7 * i + j) % 90 for j in range(5)] for i in range(SMALL_BATCH_ROWS + 3)]
    greedy, seeded, filtered = (
        SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, seed=1, **options)
        for options in ({"temperature": 0}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 9})
    )
    found: list[list[Any]] = []
    for options in ({}, {"enforce_eager": True}):
        with LLM(model, **always, **options) as llm:
            runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
            if graphs := runner.passes.graphs.captured:
                replay = graphs.replay
                graphs.replay = lambda name, replay=replay: [replays.append(name), replay(name)][1]
            for params in ([greedy, seeded], [greedy, filtered], [greedy] * len(prompts)):
                outputs = llm.generate(prompts[: len(params)], params, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
    whole, model = PassShape(2, filters=False), PassShape(2, "model")
    assert found[:3] == found[3:] and replays == [*[model] * 2, *[whole] * 3, *[model] * 3]  # 2 for the recording


def test_a_recording_leaves_the_ring_to_the_passes(decoder: Decoder) -> None:
    passes, columns = Passes(decoder, pool(decoder)), []
    counter = passes.inputs.step_counter.fill_(3)

    def work() -> None:
        columns.append(int(counter[0]))
        counter.add_(1)

    passes.graphs.capture(PassShape(1, filters=False), work)
    assert columns == [3, 3] and counter[0] == 3


class PartlyRecorded:
    """A model with one torch operation, which is not recorded, before or after the others."""

    def __init__(self, decoder: Decoder, where: str) -> None:
        self.decoder = decoder
        self.where = where

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        if self.where == "before":
            token_ids = (token_ids + 1) % 97
        logits = self.decoder.forward(token_ids, batch, kv, logits_rows, sliced)
        return logits + batch.positions.unsqueeze(1) if self.where == "after" else logits


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_model_with_unrecorded_operations_is_not_replayed(decoder: Decoder, where: str) -> None:
    rng = random.Random(0)
    kv = pool(decoder)
    recorded = Passes(PartlyRecorded(decoder, where), kv)
    for _ in range(3):
        tokens, batch = random_step(rng, 1, 20)
        assert torch.equal(recorded(tokens, batch), recorded.model.forward(tokens, batch, kv, None))


def test_unpacked_models_are_not_recorded(tmp_path: Path) -> None:
    decoder = load_tiny(make_tiny_checkpoint("llama", tmp_path), cpu, torch.float32, max_len=64)
    rng = random.Random(0)
    kv = pool(decoder).float()
    recorded = Passes(decoder, kv)
    for _ in range(5):
        tokens, batch = random_step(rng, 2, 20)
        assert torch.equal(recorded(tokens, batch), decoder.forward(tokens, batch, kv, None))
    assert recorded.calls == 2 + 5  # one recording without all operations


def test_operations_after_a_recording_are_not_recorded() -> None:
    library = native.library()
    assert library is not None
    with library.record() as recording:
        library.silu_mul(torch.ones(1, 8))
    library.silu_mul(torch.ones(1, 8))
    assert len(recording._pairs) == 1
