"""Packed weights: the same products as the plain ones, whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo.kernels import native, packed
from octavo.kernels.packed import PackedBF16, PackedInt8, pack, packed_bytes

SHAPES = pytest.mark.parametrize("shape", [(32, 32), (96, 64), (100, 40), (37, 64), (96, 37), (576, 1536)], ids=str)
NUM_ROWS = pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 17])
HAS_BFLOAT16 = pytest.mark.skipif(not packed.has_bfloat16(), reason="oneDNN packs no bfloat16 here")
HAS_INT8 = pytest.mark.skipif(not packed.has_int8(), reason="oneDNN packs no int8 here")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "torch alone"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With and without compiled code."""
    if request.param == "torch alone":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("there is no C++ compiler")
    return


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@HAS_BFLOAT16
@SHAPES
@NUM_ROWS
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16(ways: None, shape: tuple[int, int], num_rows: int, with_bias: bool) -> None:
    weight, x = torch.randn(shape).bfloat16(), torch.randn(num_rows, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if with_bias else None
    made = pack(weight)
    assert isinstance(made, PackedBF16)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = made(x, bias)
    assert out.dtype == torch.bfloat16 and out.shape == (num_rows, shape[0])
    assert relative_error(out, expected) < 4e-3
    wide = made(x, bias, wide=True)
    assert wide.dtype == torch.float32 and relative_error(wide, expected) < 4e-3


@HAS_INT8
@SHAPES
@NUM_ROWS
def test_int8(ways: None, shape: tuple[int, int], num_rows: int) -> None:
    """Against the product of what the numbers were rounded to; and that is near what they were."""
    scales = torch.logspace(-3, 3, shape[0]).unsqueeze(1)  # a scale for all outputs would lose most of them
    weight, bias = (torch.randn(shape) * scales).bfloat16(), torch.randn(shape[0]).bfloat16()
    x = (torch.randn(num_rows, shape[1]) * torch.logspace(-2, 2, num_rows).unsqueeze(1)).bfloat16()
    made = pack(weight, "int8")
    assert isinstance(made, PackedInt8)
    rounded_weight = (weight * (1 / made.scale).unsqueeze(1)).round().double() * made.scale.unsqueeze(1)
    assert float((rounded_weight - weight.double()).abs().amax() / weight.double().abs().amax()) < 1 / 200
    values, x_scale = packed.quantize_rows(x)
    assert values.abs().amax(1).tolist() == [127] * num_rows
    rounded_x = values.double() * x_scale.unsqueeze(1)
    out = made(x, bias, wide=True)
    expected = rounded_x @ rounded_weight.T + bias.double()
    most = rounded_x.abs() @ rounded_weight.abs().T + bias.double().abs()  # what sums may be wrong in proportion to
    assert float(((out - expected).abs() / most).amax()) < 1e-5
    exact = x.double() @ weight.double().T + bias.double()
    assert relative_error(out, exact) < 4e-2


@HAS_INT8
def test_rows_of_zeros_stay_zeros(ways: None) -> None:
    made = pack(torch.zeros(40, 8, dtype=torch.bfloat16), "int8")
    assert made is not None
    assert not made(torch.zeros(2, 8, dtype=torch.bfloat16), None).any()
    assert not made(torch.ones(9, 8, dtype=torch.bfloat16), None).any()


@HAS_INT8
@pytest.mark.parametrize("num_rows", [2, 17])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(ways: None, num_rows: int, value: float) -> None:
    """In 8 bits there is no NaN: a row with one must not become the zeros of a token that looks fine."""
    made = pack(torch.randn(40, 64).bfloat16(), "int8")
    x = torch.randn(num_rows, 64).bfloat16()
    x[0, 3] = value
    assert made is not None
    out = made(x, None, wide=True)
    assert not out[0].isfinite().any() and bool(out[1:].isfinite().all())


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=HAS_BFLOAT16), pytest.param("int8", marks=HAS_INT8)])
@SHAPES
def test_rows_can_be_read_back(quantization: packed.Quantization | None, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    made = pack(weight, quantization)
    assert made is not None
    if not made.has_rows:
        pytest.skip("oneDNN has a layout of its own here")
    indices = torch.tensor([shape[0] - 1, 0, 5, 5])
    rows = made.rows(indices)
    if quantization is None:
        assert torch.equal(rows, weight[indices])
    else:
        assert relative_error(rows, weight[indices].double()) < 1e-2


@pytest.mark.parametrize("tile", PackedBF16.TILES)
@NUM_ROWS
def test_tiles_of_either_width(tile: int, num_rows: int) -> None:
    """Also those that this machine's processor does not get."""
    if (library := native.library()) is None:
        pytest.skip("there is no C++ compiler")
    num_out, num_in, padded = 100, 37, 38
    weight, bias = torch.randn(num_out, num_in).bfloat16(), torch.randn(num_out).bfloat16()
    x = torch.randn(num_rows, num_in).bfloat16()
    tiles = torch.zeros(-(-num_out // tile) * tile, padded, dtype=torch.bfloat16)
    tiles[:num_out, :num_in] = weight
    tiles = tiles.view(-1, tile, padded // 2, 2).transpose(1, 2).contiguous()
    expected = x.double() @ weight.double().T + bias.double()
    out = library.linear(tiles, None, x, bias, num_out, wide=True)
    assert relative_error(out, expected) < 1e-5
    token_ids = torch.tensor([99, 0, 63, 64, 32])
    assert torch.equal(library.embed(tiles, None, token_ids, num_in), weight[token_ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_of_a_plain_table(ways: None, dtype: torch.dtype) -> None:
    table, token_ids = torch.randn(50, 37).to(dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(packed.embed(table, token_ids), table[token_ids])


@HAS_BFLOAT16
def test_an_unknown_layout_is_oneDNNs_affair(monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    monkeypatch.setattr(PackedBF16, "TILES", (16,))  # no weight lies like that
    weight, x = torch.randn(64, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    made = pack(weight)
    assert made is not None and not made.has_rows
    assert relative_error(made(x, None), x.double() @ weight.double().T) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    assert pack(torch.randn(8, 8).to(dtype)) is None


def test_bytes_are_known_before() -> None:
    weight = torch.empty(100, 64, dtype=torch.bfloat16, device="meta")
    assert packed_bytes(weight) == 100 * 64 * 2
    assert packed_bytes(weight, "int8") == 100 * 64 + 100 * 8
