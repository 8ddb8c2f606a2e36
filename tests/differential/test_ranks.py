"""Two and four tensor parallel ranks on a CPU: the tokens of one in float32, for every family and every way."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM
from tests.models.test_tensor_parallel import CASES
from tests.models.tiny import HYBRIDS, make_tiny_checkpoint
from tests.proof.ways import OPTIONS, WAYS, runs
from tests.runner.test_stub_platform import completions, mixed_params

SIZES = {"intermediate_size": 40}
OTHER_NAMES = "gpt2", "opt"
"""Kinds whose cases name the size of the MLP as their config.json does."""


QUICK = "gpt2 untied", 2, "windows"
"""It found that ranks chose different ones of too many stop tokens."""
OTHERS = [
    *((case, 2, "windows") for case in CASES if CASES[case][0] not in HYBRIDS),
    *((case, 4, "chunks") for case in ("llama", "mistral", "gemma3", "gpt2", "olmo2", "phi3")),
    *(("llama tied", 2, way) for way in WAYS if way not in ("windows", "graphs", "eager")),
    *((kind, 2, "chunks") for kind in ("qwen3_5", "qwen3_next", "qwen3_5_moe")),
]


@pytest.mark.parametrize(
    ("case", "size", "way"),
    [QUICK, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS if other != QUICK)],
)
def test_ranks_give_the_tokens_of_one(case: str, size: int, way: str, tmp_path: Path) -> None:
    kind, sizes = CASES[case]
    directory = str(make_tiny_checkpoint(kind, tmp_path / kind, **({} if kind in OTHER_NAMES else SIZES) | sizes))
    params = [p for p in mixed_params() if not p.stop]
    plain = [p for p in params if not p.has_filters]  # ranks sample from their slices of the vocabulary
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    with LLM(directory, device="cpu", **OPTIONS) as llm:
        expected = completions(llm.generate(prompts, params, use_tqdm=False))
        expected_plain = completions(llm.generate(prompts[: len(plain)], plain, use_tqdm=False))
    with LLM(directory, device="cpu", tensor_parallel_size=size, **(OPTIONS | WAYS[way])) as llm:
        for outputs in runs(llm, way, prompts, params):
            assert completions(outputs) == expected
        assert completions(llm.generate(prompts[: len(plain)], plain, use_tqdm=False)) == expected_plain
