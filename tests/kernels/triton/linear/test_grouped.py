"""Products with quantised weights, against the dequantised weight in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.activation import gelu_mul, silu_mul
from octavo.kernels.triton.linear import grouped
from octavo.kernels.triton.linear.grouped import GroupedWeight, float8_columns
from octavo.kernels.triton.linear.grouped_kernels import quantise
from octavo.kernels.triton.linear.tuning import GroupedTuning
from octavo.kernels.triton.norms import add_rms_norm
from tests.kernels.pool import norm_error, relative_error
from tests.kernels.triton.device import DEVICE, DTYPES, INTERPRETED

HALF = DTYPES[-1]  # float16 in the interpreter, else bfloat16
TOLERANCE = 1e-3 if INTERPRETED else 6e-3
INT4 = GroupForm(4, 128, zero=8)
FLOAT8 = GroupForm(8, 128, is_float=True)


def make_groups(
    form: GroupForm, num_out: int, num_in: int, scales: torch.dtype = torch.float16, *, blocks: bool = False
) -> Groups:
    """blocks: 128 outputs have the same scales"""
    shape = num_out, num_in // form.group_size
    values = torch.randint(0, 1 << form.bits, (num_out, num_in), device=DEVICE).to(torch.uint8)
    if form.is_float:
        values, scales = torch.randn(num_out, num_in, device=DEVICE).to(torch.float8_e4m3fn), torch.float32
    zeros = torch.randint(0, 1 << form.bits, shape, device=DEVICE).to(torch.uint8) if form.has_zeros else None
    factors = torch.rand(shape, device=DEVICE) / 8 + 0.01
    if blocks:
        factors = factors[::128].repeat_interleave(128, 0)[:num_out].contiguous()
    return Groups(form, values, factors.to(scales), zeros)


def pack(groups: Groups) -> GroupedWeight:
    assert cuda.keeps_groups(groups.form, groups.shape[1], HALF)
    weight = cuda.pack_groups(groups)
    assert weight is not None
    return weight


def check(groups: Groups, num_rows: int, **kwargs: Any) -> Tensor:
    num_out, num_in = groups.shape
    weight, wide = pack(groups), groups.dequantised().double()
    x, bias = torch.randn(num_rows, num_in + 8, device=DEVICE).to(HALF)[:, :num_in], torch.randn(num_out, device=DEVICE)
    bias = bias.to(HALF)
    y = weight(x, bias, **kwargs)
    assert y.shape == (num_rows, num_out)
    assert relative_error(y, x.double() @ wide.T + bias) < TOLERANCE
    return y


FORMS = [
    (INT4, 200, 640),
    (GroupForm(4, 32, zero=8), 129, 96),
    (GroupForm(4, 64, zero=7), 128, 192),
    (GroupForm(4, 288, zero=8), 40, 288),
    (GroupForm(4, 128, has_zeros=True), 200, 384),
    (GroupForm(4, 32, has_zeros=True), 65, 160),
    (GroupForm(4, 160, has_zeros=True), 65, 160),
    (GroupForm(8, 32, zero=128), 200, 160),
    (GroupForm(8, 128, has_zeros=True), 30, 256),
    (GroupForm(8, 288, zero=128), 300, 288),
    (FLOAT8, 200, 640),
    (GroupForm(8, 288, is_float=True), 129, 288),
    (GroupForm(8, 64, is_float=True), 40, 64),
]


@pytest.mark.parametrize(("form", "num_out", "num_in"), FORMS, ids=str)
def test_products_of_few_rows(form: GroupForm, num_out: int, num_in: int) -> None:
    groups = make_groups(form, num_out, num_in)
    check(groups, 3)
    check(groups, 13 if form.is_float else 33, float32_out=True, tuning=GroupedTuning(16, 3, 2))


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_scales_of_other_dtypes(scales: torch.dtype) -> None:
    check(make_groups(INT4, 129, 384, scales), 2)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 130, *([] if INTERPRETED else [65, 128, 200, 256, 300, 1100])])
@pytest.mark.parametrize("form", [INT4, GroupForm(8, 128, zero=128)], ids=str)
def test_products_of_any_number_of_rows(form: GroupForm, num_rows: int) -> None:
    check(make_groups(form, 136, 512), num_rows)


@pytest.mark.parametrize("num_rows", [20] if INTERPRETED else [65, 300])  # the interpreter has one kernel for all
@pytest.mark.parametrize(("form", "num_out", "num_in"), [(f, 8 * n, k) for f, n, k in FORMS if not f.is_float], ids=str)
def test_products_of_many_rows(form: GroupForm, num_out: int, num_in: int, num_rows: int) -> None:
    for scales in (torch.float16, torch.bfloat16):
        check(make_groups(form, num_out, num_in, scales), num_rows)


@pytest.mark.parametrize("num_rows", [130, *([] if INTERPRETED else [300, 600])])
@pytest.mark.parametrize(("size", "blocks"), [(128, False), (128, True), (384, False)])
def test_with_many_rows_x_is_rounded_to_float8(size: int, blocks: bool, num_rows: int) -> None:
    """Up to 16 rows it is not. Rounding x, whose numbers keep 4 bits, changes results by 2.6 % of their norm."""
    groups = make_groups(GroupForm(8, size, is_float=True), 200, 384, blocks=blocks)
    weight, wide = pack(groups), groups.dequantised().double()
    x = torch.randn(num_rows, 384, device=DEVICE).to(HALF)
    assert relative_error(weight(x[:16], None), x[:16].double() @ wide.T) < TOLERANCE
    values, scales = quantise(x, size)
    rounded = values[:num_rows].double().view(num_rows, -1, size) * scales.T[:num_rows].unsqueeze(2)
    y = weight(x, None)
    if size == 128:  # the library has one scale for each row of x, the kernel for each 128 inputs
        assert relative_error(y, rounded.flatten(1) @ float8_columns(wide).T) < TOLERANCE
    assert norm_error(rounded.flatten(1), float8_columns(x).double()) < 0.028
    assert norm_error(y, x.double() @ wide.T) < 0.03


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("size", [128, 384])
def test_an_activation_is_rounded_to_float8_without_being_stored(size: int, gate: Gate) -> None:
    gate_up = torch.randn(70, 768, device=DEVICE).to(HALF)
    activated = silu_mul(gate_up) if gate == "silu" else gelu_mul(gate_up)
    for fused, separate in zip(quantise(gate_up, size, gate), quantise(activated, size), strict=True):
        fused, separate = (x[:70] if x.dtype == torch.float8_e4m3fn else x[:, :70] for x in (fused, separate))
        assert torch.equal(fused.float(), separate.float())
    weight = pack(make_groups(GroupForm(8, size, is_float=True), 200, 384))
    for num_rows in (3, 70):
        assert torch.equal(weight.gated(gate_up[:num_rows], None, gate), weight(activated[:num_rows], None))


def multiply(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, by_row: bool, dtype: torch.dtype) -> Tensor:
    """`grouped.float8_product` in float32."""
    wide, other = (
        values.float().view(len(values), len(planes), -1) * planes.T.unsqueeze(2)
        for values, planes in ((x, x_scales), (weight, scales))
    )
    return (wide.flatten(1) @ other.flatten(1).T).to(dtype)


@pytest.mark.parametrize("size", [128, 384])
def test_a_norm_is_rounded_to_float8_without_being_stored(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows the norm is stored, and x is not rounded as a whole."""
    if INTERPRETED:
        monkeypatch.setattr(grouped, "multiplies_float8", lambda device, by_row: True)
        monkeypatch.setattr(grouped, "float8_product", multiply)
    weight = pack(make_groups(GroupForm(8, size, is_float=True), 200, 384))
    norm, bias = (torch.rand(n, device=DEVICE).to(HALF) for n in (384, 200))
    for num_rows in (3, 40):
        x, residual = torch.randn(2, num_rows, 384, device=DEVICE).to(HALF)
        y, total = weight.add_norm_linear(x, residual, norm, 1e-5, bias)
        normed, expected_total = add_rms_norm(x, residual, norm, 1e-5)
        assert torch.equal(y, weight(normed, bias)) and torch.equal(total, expected_total)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_a_gpu_without_float8_widens_the_weight(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = replace(grouped.kernels_for(torch.device(DEVICE)), float8=False, hopper=False)
    monkeypatch.setattr(grouped, "kernels_for", lambda device: choice)
    check(make_groups(FLOAT8, 200, 384), num_rows)
    check(make_groups(GroupForm(8, 288, is_float=True), 129, 288), num_rows)


@pytest.mark.parametrize(("form", "num_out", "num_in"), FORMS, ids=str)
def test_many_rows_by_the_library(form: GroupForm, num_out: int, num_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 128 outputs."""
    monkeypatch.setattr(grouped, "MIN_ROWS_CUBLAS", 5)
    monkeypatch.setattr(grouped, "CUBLAS_WEIGHT_BYTES", 1)
    groups = make_groups(form, num_out, num_in)
    check(groups, 5)
    weight, wide = pack(groups), groups.dequantised()
    assert relative_error(weight.dequantised(0, num_out, HALF), wide.double()) < TOLERANCE
    rows = torch.randint(0, num_out, (7,), device=DEVICE)
    assert torch.equal(weight.gather_rows(rows), wide[rows].bfloat16())
    assert weight.nbytes < 1.6 * (1 + 128 / num_out) * form.num_bytes(num_out * max(num_in, 256)) + 2000


def test_an_out_with_a_stride_is_written_between_its_neighbours() -> None:
    whole = torch.full((5, 300), 7.0, device=DEVICE, dtype=HALF)
    y = check(make_groups(INT4, 200, 256), 5, out=whole[:, 64:264])
    assert y.data_ptr() == whole[:, 64:].data_ptr() and (whole[:, :64] == 7).all() and (whole[:, 264:] == 7).all()


def test_a_rows_result_does_not_depend_on_the_other_rows() -> None:
    weight = pack(make_groups(INT4, 200, 1024))
    x = torch.randn(64, 1024, device=DEVICE).to(HALF)
    alone = weight(x[:1], None, tuning=GroupedTuning(16, 2, 3))
    assert torch.equal(weight(x, None, tuning=GroupedTuning(64, 2, 3))[:1], alone)


def test_other_forms_are_refused() -> None:
    minima = GroupForm(4, 32, has_minima=True)
    assert not cuda.keeps_groups(minima, 64, HALF) and not cuda.keeps_groups(INT4, 128, torch.float32)
    for form in (minima, GroupForm(5, 32), GroupForm(6, 16, zero=32, is_nested=True), GroupForm(4, 16)):
        assert not cuda.keeps_groups(form, 256, HALF)
        assert cuda.pack_groups(make_groups(form, 32, 256)) is None
    assert cuda.pack_groups(make_groups(GroupForm(4, 32, has_zeros=True), 32, 64, torch.float32)) is None


def to_double(residual: NormedResidual) -> NormedResidual:
    return NormedResidual(residual.x.double(), residual.weighted.double(), residual.squares.double())


@pytest.mark.parametrize("form", [INT4, GroupForm(4, 128, has_zeros=True), FLOAT8], ids=str)
@pytest.mark.parametrize("num_out", [256, 264])
def test_fused_products_match_the_reference(form: GroupForm, num_out: int) -> None:
    """A gate's halves that are tiles, and others."""
    groups = make_groups(form, num_out, 256)
    weight, wide = pack(groups), groups.dequantised().double()
    norm, bias = torch.rand(256, device=DEVICE).to(HALF), torch.randn(num_out, device=DEVICE).to(HALF)
    residual = cuda.make_normed_residual(torch.randn(5, 256, device=DEVICE).to(HALF) / 64, norm)
    expected = reference.norm_linear(to_double(residual), 1e-5, wide, bias.double())
    assert relative_error(weight.norm_linear(residual, 1e-5, bias), expected) < 2 * TOLERANCE
    expected = reference.norm_linear(to_double(residual), 1e-5, wide, bias.double(), "silu")
    assert relative_error(weight.norm_linear(residual, 1e-5, bias, "silu"), expected) < 3 * TOLERANCE
    begin, next_norm = torch.randn(5, num_out, device=DEVICE).to(HALF), torch.rand(num_out, device=DEVICE).to(HALF)
    stream = cuda.make_normed_residual(begin, next_norm)
    actual = weight.add_linear(stream, residual.x, bias, next_norm)
    total = reference.add_linear(to_double(stream), residual.x.double(), wide, bias.double(), next_norm.double())
    assert relative_error(actual.x, total.x) < TOLERANCE
    assert relative_error(actual.weighted, total.weighted) < 2 * TOLERANCE
    assert relative_error(actual.squares.sum(0)[:5], total.squares.sum(0)) < 2 * TOLERANCE


@pytest.mark.parametrize(("form", "head_dim"), [(INT4, 128), (INT4, 64), (FLOAT8, 128), (FLOAT8, 32)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_project_qkv_matches_the_reference(form: GroupForm, head_dim: int, normed: bool) -> None:
    """With a bias or norms; in one kernel on Hopper, but for heads of 32. Of 64, the last tile has one head."""
    num_heads, num_kv_heads, num_in, num_tokens = 5, 2, 256, 5
    groups = make_groups(form, (num_heads + 2 * num_kv_heads) * head_dim, num_in)
    weight, wide = pack(groups), groups.dequantised().double()
    residual = cuda.make_normed_residual(
        torch.randn(num_tokens, num_in, device=DEVICE).to(HALF) / 64, torch.rand(num_in, device=DEVICE).to(HALF)
    )
    bias = None if normed else torch.randn(len(wide), device=DEVICE).to(HALF)
    norms = [torch.rand(head_dim, device=DEVICE).to(HALF) if normed else None for _ in range(2)]
    wide_bias, *wide_norms = (None if x is None else x.double() for x in (bias, *norms))
    batch = RaggedBatch.from_lists([1] * 5, [3, 30, 17, 1, 9], [[4, 7], [1, 5], [3, 6], [2], [8]], 16, device=DEVICE)
    table = reference.rope_table(head_dim, 64, 10000.0, device=DEVICE)
    kv = torch.zeros(9, 2, num_kv_heads, 16, head_dim, device=DEVICE, dtype=HALF)
    wide_kv = kv.double()
    q = weight.project_qkv(residual, 0.5, bias, kv, batch, table, q_norm=norms[0], k_norm=norms[1], norm_eps=0.1)
    expected = reference.project_qkv(
        to_double(residual), 0.5, wide, wide_bias, wide_kv, batch, table.double(),
        q_norm=wide_norms[0], k_norm=wide_norms[1], norm_eps=0.1,
    )  # fmt: skip
    assert q.shape == expected.shape and relative_error(q, expected) < 3 * TOLERANCE
    assert relative_error(kv, wide_kv) < 3 * TOLERANCE
