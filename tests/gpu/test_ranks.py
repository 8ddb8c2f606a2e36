"""Two GPUs give the tokens of one CPU in float32: every family, every way to compute a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from tests.gpu.test_engine import params
from tests.models.tiny import make_tiny_checkpoint
from tests.proof.ways import OPTIONS, WAYS, runs
from tests.runner.test_stub_platform import completions

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 38},
    "mistral": {"num_attention_heads": 4, "intermediate_size": 38},  # one K/V head, which both ranks have
    "qwen2": {"intermediate_size": 38},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 38},
    "gemma3": {"num_key_value_heads": 2, "intermediate_size": 38},
    "gpt2": {"n_head": 4, "n_inner": 38},
    "opt": {"num_attention_heads": 4, "ffn_dim": 38},
    "phi3": {"intermediate_size": 38},
    "olmo2": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 38},
    "smollm3": {"intermediate_size": 38},
    "granite": {"intermediate_size": 38},
    "starcoder2": {"intermediate_size": 38},
    "internlm2": {"intermediate_size": 38},
    "internlm3": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 38},
}
"""Heads and columns that two ranks divide."""


@pytest.mark.parametrize(("kind", "way"), [*((kind, "graphs") for kind in SIZES), *(("llama", way) for way in WAYS)])
def test_tokens_of_two_ranks_equal_the_cpu_engines(kind: str, way: str, tmp_path: Path) -> None:
    directory = str(make_tiny_checkpoint(kind, tmp_path / kind, **SIZES[kind]))
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params()))]
    with LLM(directory, device="cpu", **OPTIONS) as llm:
        expected = completions(llm.generate(prompts, params(), use_tqdm=False))
    with LLM(directory, device="cuda", tensor_parallel_size=2, **(OPTIONS | WAYS[way])) as llm:
        for outputs in runs(llm, way, prompts, params()):
            assert completions(outputs) == expected
