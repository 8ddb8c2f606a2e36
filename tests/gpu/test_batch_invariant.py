"""`batch_invariant` on a GPU: the cases of tests/differential/test_batch_invariant.py, its kernels, and real shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels.triton.invariant_ops import linear
from tests.differential.test_batch_invariant import _use_manual_scheduler, model, variants  # noqa: F401
from tests.kernels.pool import norm_error
from tests.kernels.triton.conftest import seed  # noqa: F401
from tests.kernels.triton.linear.test_invariant import *  # noqa: F403
from tests.kernels.triton.test_invariant_ops import *  # noqa: F403

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("llama", "qwen3", "gemma3", "gpt2", "olmo2", "qwen3_moe", "gpt_oss")},
    "float16": ("llama", {"dtype": "float16"}),
    "float32": ("llama", {"dtype": "float32"}),
    "without graphs": ("gemma3", {"enforce_eager": True}),
    "float8 K and V": ("gemma3", {"kv_cache_dtype": "fp8_e5m2"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_request_has_the_same_bits_in_every_situation(name: str, model: Any) -> None:  # noqa: F811
    kind, options = CASES[name]
    alone, *others = variants(model(kind), device="cuda", **options).items()
    assert [situation for situation, found in others if found != alone[1]] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_out", "num_in"), [(6144, 4096), (4096, 12288), (151_936, 1024)])
def test_rows_of_real_shapes_have_the_bits_of_any_batch(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    x = torch.randn(2049, num_in, device="cuda").to(dtype)
    weight = (torch.randn(num_out, num_in, device="cuda") / num_in**0.5).to(dtype)
    together = linear(x, weight, None)
    assert norm_error(together[:64], x[:64].double() @ weight.double().T) < 5e-3
    for num in (1, 2, 5, 17, 64, 130, 1024):
        assert torch.equal(linear(x[:num], weight, None), together[:num]), num
    assert torch.equal(linear(x[2048:], weight, None), together[2048:])
