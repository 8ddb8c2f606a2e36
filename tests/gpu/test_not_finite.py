"""The check of tests/runner/test_not_finite.py on a GPU: its kernels read blocks that were never cleared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from tests.models.tiny import make_tiny_checkpoint
from tests.proof import margins as m
from tests.runner.test_not_finite import check_other_requests, poison_one

WAYS: list[dict[str, Any]] = [{}, {"enforce_eager": True, "decode_window": 1}]


@pytest.mark.parametrize("options", WAYS, ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_nan_keys_fail_one_request_and_spoil_no_block(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model = str(make_tiny_checkpoint(kind, tmp_path / kind))
    check_other_requests(model, lambda llm: llm, device="cuda", **options)


@pytest.mark.parametrize("options", WAYS, ids=["graphs", "eager"])
def test_nan_keys_with_16_bit_kernels(tmp_path: Path, options: dict[str, Any]) -> None:
    """The kernels for long prompts on Hopper, and the QKV projection that writes into blocks."""
    judge = m.Judge(m.make_rounded_checkpoint(m.LARGE_KIND, tmp_path / "large", **m.LARGE_SIZES))
    prompts = [m.LARGE_PROMPTS[i] for i in (1, 3, 2, 5)]
    late = [prompts[1], m.LARGE_PROMPTS[6], list(range(90))]
    options = m.LARGE | {"num_gpu_blocks_override": 64} | options
    with LLM(str(tmp_path / "large"), device="cuda", **options) as llm:
        judge.check(poison_one(llm, prompts, late))
