"""RMS norm, with and without the residual addition, and layer norm, of the reference and the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo.kernels import reference
from tests.kernels.pool import BOTH, relative_error

SHAPES = pytest.mark.parametrize("shape", [(1, 8), (5, 576), (3, 4, 64), (0, 16)])


def definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


@BOTH
@SHAPES
def test_rms_norm_is_its_definition(ops: ModuleType, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    out = ops.rms_norm(x, weight, 1e-2)
    assert out.shape == x.shape
    if x.numel():
        assert relative_error(out, definition(x, weight, 1e-2)) < 1e-6


@BOTH
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_tiny_and_large_rows_keep_their_precision(ops: ModuleType, scale: float) -> None:
    x, weight = torch.randn(4, 64) * scale, torch.ones(64)
    assert relative_error(ops.rms_norm(x, weight, 1e-6), definition(x, weight, 1e-6)) < 1e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_where_transformers_does(ops: ModuleType, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(7, 96).to(dtype)
    out = ops.rms_norm(x, norm.weight.data, 1e-5)
    assert out.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(out, norm(x).detach())
    else:
        assert relative_error(out, norm(x).detach().double()) < 1e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float32_weight_is_applied_before_rounding(ops: ModuleType, dtype: torch.dtype) -> None:
    norm = Gemma3RMSNorm(96, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(7, 96).to(dtype)
    out = ops.rms_norm(x, 1 + norm.weight.data, 1e-5)
    assert out.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(out, norm(x).detach())
        assert not torch.equal(out, ops.rms_norm(x, (1 + norm.weight.data).to(dtype), 1e-5))
        assert torch.equal(out, ops.add_rms_norm(x, torch.zeros_like(x), 1 + norm.weight.data, 1e-5)[0])
    else:
        assert relative_error(out, norm(x).detach().double()) < 1e-6


@BOTH
@SHAPES
@pytest.mark.parametrize("weighted", [True, False])
def test_layer_norm_is_its_definition(ops: ModuleType, shape: tuple[int, ...], weighted: bool) -> None:
    x, weight, bias = torch.randn(shape) * 3 + 2, torch.randn(shape[-1]), torch.randn(shape[-1])
    out = ops.layer_norm(x, weight, bias, 1e-2) if weighted else ops.layer_norm(x, None, None, 1e-2)
    assert out.shape == x.shape
    if x.numel():
        wide = x.double() - x.double().mean(-1, keepdim=True)
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt()
        assert relative_error(out, normed * weight.double() + bias.double() if weighted else normed) < 1e-6


@BOTH
def test_add_rms_norm_adds_then_normalises(ops: ModuleType) -> None:
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    kept = x.clone(), residual.clone()
    out, stream = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, x + residual)
    assert relative_error(out, definition(x + residual, weight, 1e-5)) < 1e-6
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_float64_stays_exact() -> None:
    x, weight = torch.randn(5, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    assert relative_error(reference.rms_norm(x, weight, 1e-5), definition(x, weight, 1e-5)) < 1e-14
