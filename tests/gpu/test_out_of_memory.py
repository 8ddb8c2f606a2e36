"""Steps that run out of memory on a GPU: they are repeated in smaller steps, and their memory is freed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM
from octavo.engine.outputs import request_failed_error
from tests.models.tiny import make_tiny_checkpoint
from tests.proof.ways import OPTIONS
from tests.runner.test_out_of_memory import prompts
from tests.runner.test_stub_platform import completions, mixed_params

BYTES_PER_TOKEN = 64 << 20
ROOM = 1 << 30
ON_GPU: dict[str, Any] = {**OPTIONS, "device": "cuda", "enforce_eager": True, "gpu_memory_utilization": 0.3}


class LargeModel:
    """A model that takes 64 MiB a token, and more than any GPU has for the token `never`."""

    def __init__(self, llm: LLM, never: int = -1) -> None:
        runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
        self.inner, self.never = runner.passes.model, never
        runner.passes.model = self

    def forward(self, token_ids: Tensor, *rest: Any) -> Tensor:
        tokens = 1 << 20 if bool((token_ids == self.never).any()) else len(token_ids)
        hidden = torch.empty(tokens * BYTES_PER_TOKEN, dtype=torch.uint8, device="cuda")
        logits: Tensor = self.inner.forward(token_ids, *rest)
        del hidden
        return logits


@pytest.fixture
def limit_memory() -> Iterator[Any]:
    """Limits this process to its present memory and room for sixteen tokens."""
    total = torch.cuda.mem_get_info()[1]

    def begin() -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / total)

    yield begin
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("options", [{"decode_window": 4}, {"async_scheduling": False}], ids=str)
def test_smaller_steps_give_the_same_tokens(tmp_path: Path, limit_memory: Any, options: dict[str, Any]) -> None:
    model = str(make_tiny_checkpoint("llama", tmp_path / "llama"))
    params = [replace(p, detokenize=False) for p in mixed_params()]
    with LLM(model, **ON_GPU, **options) as llm:
        expected = completions(llm.generate(prompts(len(params)), params, use_tqdm=False))
    with LLM(model, **ON_GPU, **options) as llm:
        LargeModel(llm)
        limit_memory()
        assert completions(llm.generate(prompts(len(params)), params, use_tqdm=False)) == expected
        assert llm.engine.stats.num_failed_steps > 0
        llm.engine.executor.runner.platform.release_memory()  # type: ignore[attr-defined]
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < ROOM // 4  # the passes' memory is freed


def test_only_a_request_that_does_not_fit_alone_fails(tmp_path: Path, limit_memory: Any) -> None:
    model = str(make_tiny_checkpoint("llama", tmp_path / "llama"))
    params = [replace(p, detokenize=False) for p in mixed_params()[:3]]
    few = prompts(3)
    with LLM(model, **ON_GPU) as llm:
        expected = completions(llm.generate(few, params, use_tqdm=False))
    never = min(set(few[1]) - {t for tokens, *_ in expected for t in tokens}.union(few[0], few[2]))
    with LLM(model, **ON_GPU) as llm:
        LargeModel(llm, never)
        limit_memory()
        outputs = llm.generate(few, params, use_tqdm=False)
    assert completions([outputs[0], outputs[2]]) == [expected[0], expected[2]]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert request_failed_error(outputs[1]).code == "out_of_memory"
