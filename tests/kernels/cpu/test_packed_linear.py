"""Packed weights: the same products as the plain ones, whoever computes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from octavo.kernels.cpu import native
from octavo.kernels.cpu import packed_linear as packed
from octavo.kernels.cpu.packed_linear import FEW_ROWS, Blocks, Machine, Tiled, choose, pack, pack_head, packed_bytes
from tests.kernels.machines import INSTRUCTIONS, MARCHES, WAYS, become, way_of

SHAPES = pytest.mark.parametrize("shape", [(32, 32), (96, 64), (100, 40), (37, 64), (96, 37), (576, 1536)], ids=str)
NUM_ROWS = pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 7, 17])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """As on another machine."""
    become(request.param, monkeypatch)
    return request.param


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@SHAPES
@NUM_ROWS
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16(way: str, shape: tuple[int, int], num_rows: int, with_bias: bool) -> None:
    weight, x = torch.randn(shape).bfloat16(), torch.randn(num_rows, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if with_bias else None
    made = pack(weight)
    assert made is not None and made.way == way_of(way, None)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = made(x, bias)
    assert out.dtype == torch.bfloat16 and out.shape == (num_rows, shape[0])
    assert relative_error(out, expected) < 4e-3
    head = pack_head(weight)
    assert head is not None
    logits = head(x, bias, wide=True)
    assert logits.dtype == torch.float32 and relative_error(logits, expected) < 1e-6


@SHAPES
@NUM_ROWS
def test_int8(way: str, shape: tuple[int, int], num_rows: int) -> None:
    """Against the product of what the numbers were rounded to; and that is near what they were."""
    scales = torch.logspace(-3, 3, shape[0]).unsqueeze(1)  # a scale for all outputs would lose most of them
    weight, bias = (torch.randn(shape) * scales).bfloat16(), torch.randn(shape[0]).bfloat16()
    x = (torch.randn(num_rows, shape[1]) * torch.logspace(-2, 2, num_rows).unsqueeze(1)).bfloat16()
    made = pack(weight, "int8")
    assert made is not None and made.way == way_of(way, "int8")
    integers, scale = packed.quantize_weight(weight)
    rounded_weight = integers.double() * scale.unsqueeze(1)
    assert float((rounded_weight - weight.double()).abs().amax() / weight.double().abs().amax()) < 1 / 200
    values, x_scale = packed.quantize_rows(x)
    assert values.abs().amax(1).tolist() == [127] * num_rows
    rounded_x = x.double() if made.way == "blocks" else values.double() * x_scale.unsqueeze(1)
    out = made(x, bias, wide=True)
    expected = rounded_x @ rounded_weight.T + bias.double()
    most = rounded_x.abs() @ rounded_weight.abs().T + bias.double().abs()  # what sums may be wrong in proportion to
    assert float(((out - expected).abs() / most).amax()) < 1e-5
    exact = x.double() @ weight.double().T + bias.double()
    assert relative_error(out, exact) < 4e-2


def test_rows_of_zeros_stay_zeros(way: str) -> None:
    made = pack(torch.zeros(40, 8, dtype=torch.bfloat16), "int8")
    assert made is not None
    assert not made(torch.zeros(2, 8, dtype=torch.bfloat16), None).any()
    assert not made(torch.ones(9, 8, dtype=torch.bfloat16), None).any()


@pytest.mark.parametrize("num_rows", [2, 17])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(way: str, num_rows: int, value: float) -> None:
    """In 8 bits there is no NaN: a row with one must not become the zeros of a token that looks fine."""
    made = pack(torch.randn(40, 64).bfloat16(), "int8")
    x = torch.randn(num_rows, 64).bfloat16()
    x[0, 3] = value
    assert made is not None
    out = made(x, None, wide=True)
    assert not out[0].isfinite().any() and bool(out[1:].isfinite().all())


@pytest.mark.parametrize("quantization", [None, "int8"])
@SHAPES
def test_rows_can_be_read_back(way: str, quantization: packed.Quantization | None, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    made = pack_head(weight, quantization)
    assert made is not None
    indices = torch.tensor([shape[0] - 1, 0, 5, 5])
    rows = made.rows(indices)
    if quantization is None:
        assert torch.equal(rows, weight[indices])
    else:
        assert relative_error(rows, weight[indices].double()) < 1e-2


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("shape", [(100, 37), (576, 1536), (320, 4864)], ids=str)
@pytest.mark.parametrize("use", [pack, pack_head])
def test_a_rows_result_is_the_same_alone_and_among_sixteen(
    way: str, quantization: packed.Quantization | None, shape: tuple[int, int], use: type[packed.Packed]
) -> None:
    made = use(torch.randn(shape).bfloat16(), quantization)
    x, bias = torch.randn(FEW_ROWS, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    for wide in (False, True):
        together = made(x, bias, wide=wide)
        for first, last in ((0, 1), (9, 10), (15, 16), (3, 7), (4, 9), (2, 10), (0, 15)):
            assert torch.equal(made(x[first:last], bias, wide=wide), together[first:last]), (first, last)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_native_products_never_depend_on_other_rows(way: str, quantization: packed.Quantization | None) -> None:
    if way not in ("native", *MARCHES):
        pytest.skip("oneDNN and torch may")
    values, scale = torch.randn(100, 4300).bfloat16(), None
    if quantization == "int8":
        values, scale = packed.quantize_weight(values)
    made = Tiled(values, scale, "native")
    x = torch.randn(530, 4300).bfloat16()
    whole = made(x, None)
    for first, last in ((0, 1), (529, 530), (255, 257), (100, 356), (3, 520)):
        assert torch.equal(made(x[first:last], None), whole[first:last])


# -- who multiplies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "way"),
    [
        (Machine(native=True, onednn=True, amx=True), "native and oneDNN"),
        (Machine(native=True, onednn=True, amx=False), "native"),
        (Machine(native=True, onednn=False, amx=False), "native"),
        (Machine(native=True, onednn=False, amx=True), "native"),
        (Machine(native=False, onednn=True, amx=True), "oneDNN"),
        (Machine(native=False, onednn=True, amx=False), "oneDNN"),
        (Machine(native=False, onednn=False, amx=False), "blocks"),
    ],
)
def test_every_machine_has_a_way(machine: Machine, way: str) -> None:
    assert choose(machine) == way


@pytest.mark.parametrize("march", MARCHES)
def test_native_code_names_its_instructions(march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    become(march, monkeypatch)
    library = native.library()
    assert library is not None and library.instructions == INSTRUCTIONS[march]


def test_int8_of_onednn_is_used_only_where_its_sums_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI, two products of a byte without a sign and one with overflow 16 bits, and oneDNN lets them."""
    multiply = packed._multiply_int8
    monkeypatch.setattr(packed, "_multiply_int8", lambda *args: multiply(*args).clamp(-1e6, 1e6))
    assert not packed._try_int8()


MULTIPLY = """
import torch
from octavo.kernels.cpu import native, packed_linear as packed
for quantization in (None, "int8"):
    for use in (packed.pack, packed.pack_head):
        made = use(torch.randn(96, 64).bfloat16(), quantization)
        for num_rows in (1, 5, 40):
            assert made(torch.randn(num_rows, 64).bfloat16(), None, wide=True).isfinite().all()
        print("way", made.way)
"""


@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
@pytest.mark.parametrize(
    ("aten", "onednn"),
    [
        ("default", "SSE41"),
        ("avx2", "AVX2"),
        ("avx2", "AVX2_VNNI"),
        (None, "AVX512_CORE"),
        (None, "AVX512_CORE_VNNI"),
        (None, "AVX512_CORE_BF16"),
        (None, None),
    ],
)
def test_no_product_is_onednns_reference(compiler: bool, aten: str | None, onednn: str | None) -> None:
    """Under each set of instructions; oneDNN itself says which of its implementations it runs."""
    settings = {"ONEDNN_VERBOSE": "1", "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    environment = {**os.environ, **{name: value for name, value in settings.items() if value is not None}}
    environment |= {} if compiler else {"OCTAVO_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, capture_output=True, text=True, check=True)
    ran = [line.split(",")[4:7] for line in done.stdout.splitlines() if ",primitive,exec," in line]
    assert not [words for words in ran if words[1] in ("matmul", "inner_product") and "ref" in words[2]], done.stdout
    assert done.stdout.count("way ") == 4


@pytest.mark.parametrize("tile", Tiled.BFLOAT16_TILES)
@NUM_ROWS
def test_tiles_of_either_width(way: str, tile: int, num_rows: int) -> None:
    """Also those that this machine's processor does not get."""
    if (library := native.library()) is None:
        pytest.skip("there is no compiled code")
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
def test_embeddings_of_a_plain_table(way: str, dtype: torch.dtype) -> None:
    table, token_ids = torch.randn(50, 37).to(dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(packed.embed(table, token_ids), table[token_ids])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tiles_are_onednns_where_they_lie_as_expected(
    quantization: packed.Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AMX."""
    if native.library() is None or not packed.this_machine(quantization).onednn:
        pytest.skip("there is no C++ compiler, or oneDNN has no product")
    monkeypatch.setattr(packed, "has_amx", lambda: True)
    weight, x = torch.randn(128, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    shared = pack(weight, quantization)
    assert isinstance(shared, Tiled) and shared.way == "native and oneDNN"
    monkeypatch.setattr(packed, "_tiles_of", lambda *_: None)  # no weight lies as expected
    own = pack(weight, quantization)
    assert isinstance(own, Tiled) and own.way == "native"
    exact = x.double() @ weight.double().T
    for made in (shared, own):
        assert relative_error(made(x, None), exact) < (4e-3 if quantization is None else 4e-2)
        assert torch.equal(made(x[:3], None, wide=True), own(x[:3], None, wide=True))


def test_float32_is_not_packed() -> None:
    assert pack(torch.randn(8, 8)) is None and pack_head(torch.randn(8, 8)) is None


def test_float16_is_multiplied_in_float32() -> None:
    """Torch's own product of float16 takes eight times as long, and rounds."""
    weight, x = torch.randn(300, 64).half(), torch.randn(3, 64).half()
    made = pack_head(weight)
    assert isinstance(made, Blocks)
    assert relative_error(made(x, None, wide=True), x.double() @ weight.double().T) < 1e-6
    assert made(x, None).dtype == torch.float16 and torch.equal(made.rows(torch.tensor([7])), weight[7:8])


def test_bytes_are_known_before() -> None:
    weight = torch.empty(100, 64, dtype=torch.bfloat16, device="meta")
    assert packed_bytes(weight) == 100 * 64 * 2
    assert packed_bytes(weight, "int8") == 100 * 64 + 100 * 8
