"""Groups of layers in an engine: their memory, and the option that turns them off."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.metadata import RaggedBatch
from tests.models.tiny import make_tiny_checkpoint

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "block_size": 4, "max_model_len": 100}
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("octavo.core.kv_cache_spec.MIN_CHUNK", 8)  # else sequences are too short for groups
    return str(make_tiny_checkpoint("gemma3", tmp_path / "gemma3"))


def test_layers_with_a_window_keep_it_alone(directory: str) -> None:
    """One layer of three is full, and the others have a window of 6: a sequence of 90 tokens takes half the bytes."""
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 80 for j in range(60)]} for i in range(6)]
    found, bytes_used = [], []
    for disabled in (False, True):
        with LLM(directory, **OPTIONS, disable_hybrid_kv_cache_manager=disabled) as llm:
            assert llm.config.kv.windows == (() if disabled else (6, 6))
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)])
            bytes_used.append(llm.stats().peak_used_blocks * llm.config.kv.bytes_per_block)
            assert bool(llm.kv_stats().num_dropped) != disabled
            again = llm.generate(prompts, PARAMS, use_tqdm=False)
            assert [output.num_cached_tokens for output in again] == [56] * 6
            assert [output.outputs[0].token_ids for output in again] == found[-1]
    assert found[0] == found[1]
    assert bytes_used[0] < 0.6 * bytes_used[1]


def test_short_sequences_have_one_table(directory: str) -> None:
    """A window group of sequences that are hardly longer than the window would take more."""
    with LLM(directory, **(OPTIONS | {"max_model_len": 12})) as llm:
        assert llm.config.kv.windows == () and llm.config.kv.num_layers == 3


def test_a_batch_of_groups_is_freed_at_once() -> None:
    """The engine turns the garbage collector off: a cycle would keep the tensors of each pass."""
    gc.disable()
    try:
        batch = RaggedBatch.from_lists([1], [3], [[1, 2]], 2)
        tables, slots = batch.block_tables.repeat(2, 1, 1), batch.slot_mapping.repeat(2, 1)
        batch = replace(batch, window_tables=tables, window_slots=slots)
        batch.group(2).derived["by an operation"] = torch.ones(1)
        kept = weakref.ref(batch.positions)
        assert list(batch.derived) == ["by an operation"]
        del batch
        assert kept() is None
    finally:
        gc.enable()
