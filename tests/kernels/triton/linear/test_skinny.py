"""Linear layers for small batches, with norms, gates and residuals, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.linear.tuning import SkinnyTuning
from tests.kernels.pool import relative_error
from tests.kernels.triton.device import DEVICE

SHAPES = [(1, 40, 256), (3, 33, 300), (16, 64, 517)]


def to_double(residual: NormedResidual) -> NormedResidual:
    return NormedResidual(residual.x.double(), residual.weighted.double(), residual.squares.double())


def check_residual(actual: NormedResidual, expected: NormedResidual, num_tokens: int) -> None:
    assert relative_error(actual.x, expected.x) < 1e-3
    assert relative_error(actual.weighted, expected.weighted) < 2e-3  # x is rounded before
    assert relative_error(actual.squares.sum(0)[:num_tokens], expected.squares.sum(0)) < 1e-3


@pytest.mark.parametrize(
    ("num_tokens", "size", "num_in", "splits"),
    [*((*shape, splits) for shape in SHAPES for splits in (1, 3)), (31, 1048, 260, 3)],
)
def test_skinny_products_match_the_reference(num_tokens: int, size: int, num_in: int, splits: int) -> None:
    """Repeated launches need counters that are 0 again; the bias of a split product is added once."""
    x = torch.randn(num_tokens, num_in + 8, device=DEVICE).half()[:, :num_in]
    weight, bias = torch.randn(size, num_in, device=DEVICE).half() / 16, torch.randn(size, device=DEVICE).half()
    norm = torch.rand(size, device=DEVICE).half()
    tuning = SkinnyTuning(rows=16, columns=128, splits=splits, num_warps=2, num_stages=3)
    begin = torch.randn(num_tokens, size, device=DEVICE).half()
    residual, expected = (
        cuda.make_normed_residual(begin, norm),
        reference.make_normed_residual(begin.double(), norm.double()),
    )
    check_residual(residual, expected, num_tokens)
    for b in (None, bias, bias):
        wide_bias = None if b is None else b.double()
        product = cuda.norm_linear(residual, 1e-5, weight.T.contiguous(), None, tuning=tuning)
        assert relative_error(product, reference.norm_linear(to_double(residual), 1e-5, weight.T.double())) < 1e-3
        expected = reference.add_linear(to_double(residual), x.double(), weight.double(), wide_bias, norm.double())
        residual = cuda.add_linear(residual, x, weight, b, norm, tuning=tuning)
        check_residual(residual, expected, num_tokens)
        product = cuda.few_rows_linear(x, weight, b, tuning=tuning)
        assert relative_error(product, reference.few_rows_linear(x.double(), weight.double(), wide_bias)) < 1e-3


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_fused_gate_matches_the_reference(gate: Any, biased: bool) -> None:
    """With a norm weight in float32, and everything else in float16."""
    x, weight = torch.randn(5, 96, device=DEVICE).half(), torch.randn(2 * 40, 96, device=DEVICE).half() / 4
    norm, bias = torch.rand(96, device=DEVICE), torch.randn(2 * 40, device=DEVICE).half() if biased else None
    residual = cuda.make_normed_residual(x, norm)
    wide_bias = None if bias is None else bias.double()
    expected = reference.norm_linear(to_double(residual), 1e-5, weight.double(), wide_bias, gate)
    assert relative_error(cuda.norm_linear(residual, 1e-5, weight, bias, gate), expected) < 2e-3


def test_project_qkv_matches_the_reference() -> None:
    """With two eps that differ much, and a bias."""
    num_heads, num_kv_heads, head_dim, size = 4, 2, 32, 96
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    weight, bias = torch.randn(rows, size, device=DEVICE).half() / 8, torch.randn(rows, device=DEVICE).half()
    norms = [torch.rand(head_dim, device=DEVICE).half() for _ in range(2)]
    batch = RaggedBatch.from_lists([1] * 5, [3, 30, 17, 1, 9], [[4, 7], [1, 5], [3, 6], [2], [8]], 16, device=DEVICE)
    table = reference.rope_table(head_dim, 64, 10000.0, device=DEVICE)
    residual = cuda.make_normed_residual(
        torch.randn(5, size, device=DEVICE).half(), torch.rand(size, device=DEVICE).half()
    )
    kv = torch.zeros(9, 2, num_kv_heads, 16, head_dim, device=DEVICE, dtype=torch.float16)
    wide_kv = kv.double()
    q = cuda.project_qkv(residual, 0.5, weight, bias, kv, batch, table, q_norm=norms[0], k_norm=norms[1], norm_eps=0.1)
    expected = reference.project_qkv(
        to_double(residual), 0.5, weight.double(), bias.double(), wide_kv, batch, table.double(),
        q_norm=norms[0].double(), k_norm=norms[1].double(), norm_eps=0.1,
    )  # fmt: skip
    assert q.shape == (5, num_heads, head_dim) and relative_error(q, expected) < 3e-3
    assert relative_error(kv, wide_kv) < 3e-3 and wide_kv.count_nonzero() == 5 * 2 * num_kv_heads * head_dim
