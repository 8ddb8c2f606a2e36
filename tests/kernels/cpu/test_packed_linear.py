"""Packed weights: each backend computes the same products as the plain weight."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from octavo.integers import cdiv
from octavo.kernels.cpu import native
from octavo.kernels.cpu import packed_linear as packed
from octavo.kernels.cpu.packed_linear import (
    SMALL_BATCH_ROWS,
    BlockwiseWeight,
    CpuFeatures,
    TiledWeight,
    choose_backend,
    pack,
    pack_groups,
    pack_head,
)
from octavo.kernels.groups import GroupForm, PackedHead
from octavo.kernels.rounding import round_to_groups
from tests.kernels.cpu.backends import BACKENDS, INSTRUCTIONS, MARCHES, expected_backend, use_backend

SHAPES = pytest.mark.parametrize("shape", [(32, 32), (96, 64), (100, 40), (37, 64), (96, 37), (576, 1536)], ids=str)
NUM_ROWS = (1, 2, 4, 5, 7, 17)
INT8 = GroupForm(8, 32, zero=128)


def pack_int8(weight: torch.Tensor) -> PackedHead:
    packed_weight = pack_groups(round_to_groups(weight, INT8))
    assert packed_weight is not None
    return packed_weight


USES = [pack, pack_head, pack_int8]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    use_backend(request.param, monkeypatch)
    return request.param


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@SHAPES
def test_bfloat16(backend: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    packed_weight, head = pack(weight), pack_head(weight)
    assert packed_weight is not None and packed_weight.backend == expected_backend(backend)
    assert head is not None
    for num_rows, bias in itertools.product(NUM_ROWS, (None, torch.randn(shape[0]).bfloat16())):
        x = torch.randn(num_rows, shape[1]).bfloat16()
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        out = packed_weight(x, bias)
        assert out.dtype == torch.bfloat16 and out.shape == (num_rows, shape[0])
        assert relative_error(out, expected) < 4e-3, num_rows
        logits = head(x, bias, float32_out=True)
        assert logits.dtype == torch.float32 and relative_error(logits, expected) < 1e-6, num_rows


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (37, 64), (576, 1536)], ids=str)
def test_int8(backend: str, shape: tuple[int, int]) -> None:
    """Compares with the product of the rounded numbers, and these with the originals."""
    scales = torch.logspace(-3, 3, shape[0]).unsqueeze(1)  # a scale for all outputs would lose most of them
    weight, bias = (torch.randn(shape) * scales).bfloat16(), torch.randn(shape[0]).bfloat16()
    packed_weight = pack_int8(weight)
    rounded_weight = round_to_groups(weight, INT8).dequantised().double()
    assert float(((rounded_weight - weight.double()).abs().amax(1) / weight.double().abs().amax(1)).amax()) < 1 / 200
    for num_rows in NUM_ROWS:
        x = (torch.randn(num_rows, shape[1]) * torch.logspace(-2, 2, num_rows).unsqueeze(1)).bfloat16()
        exact = x.double() @ rounded_weight.T + bias.double()
        scale_of_error = x.double().abs() @ rounded_weight.abs().T + bias.double().abs()
        error = (packed_weight(x, bias, float32_out=True) - exact).abs() / scale_of_error
        assert float(error.amax()) < (1e-5 if isinstance(packed_weight, BlockwiseWeight) else 1e-2), num_rows


@pytest.mark.parametrize("use", USES)
def test_results_are_written_among_others(backend: str, use: Callable[[torch.Tensor], PackedHead]) -> None:
    packed_weight, bias = use(torch.randn(40, 64).bfloat16()), torch.randn(40).bfloat16()
    assert packed_weight is not None and packed_weight.nbytes >= 40 * 64
    for num_rows in (3, 20):
        x, merged = torch.randn(num_rows, 64).bfloat16(), torch.full((num_rows, 100), 7.0).bfloat16()
        out = merged[:, 30:70]
        assert packed_weight(x, bias, out=out) is out and torch.equal(out, packed_weight(x, bias))
        assert bool((merged[:, :30] == 7).all()) and bool((merged[:, 70:] == 7).all())


def test_rows_of_zeros_stay_zeros(backend: str) -> None:
    packed_weight = pack_int8(torch.zeros(40, 32, dtype=torch.bfloat16))
    assert not packed_weight(torch.zeros(2, 32, dtype=torch.bfloat16), None).any()
    assert not packed_weight(torch.ones(9, 32, dtype=torch.bfloat16), None).any()


@pytest.mark.parametrize("num_rows", [2, 17])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_keeps_non_finite_rows_non_finite(backend: str, num_rows: int, value: float) -> None:
    """int8 has no NaN: the result of such a row must not become finite."""
    packed_weight = pack_int8(torch.randn(40, 64).bfloat16())
    x = torch.randn(num_rows, 64).bfloat16()
    x[0, 3] = value
    out = packed_weight(x, None, float32_out=True)
    assert not out[0].isfinite().any() and bool(out[1:].isfinite().all())


@pytest.mark.parametrize("use", [pack_head, pack_int8])
@pytest.mark.parametrize("shape", [(32, 32), (37, 64), (576, 1536)], ids=str)
def test_gather_rows(backend: str, use: Callable[[torch.Tensor], PackedHead], shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    packed_weight = use(weight)
    indices = torch.tensor([shape[0] - 1, 0, 5, 5])
    rows = packed_weight.gather_rows(indices)
    if use is pack_head:
        assert torch.equal(rows, weight[indices])
    else:
        assert relative_error(rows, weight[indices].double()) < 1e-2


@pytest.mark.parametrize("shape", [(100, 64), (576, 1536), (320, 4864)], ids=str)
@pytest.mark.parametrize("use", USES)
def test_small_batches_are_batch_invariant(
    backend: str, shape: tuple[int, int], use: Callable[[torch.Tensor], PackedHead]
) -> None:
    packed_weight = use(torch.randn(shape).bfloat16())
    x, bias = torch.randn(SMALL_BATCH_ROWS, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    for float32_out in (False, True):
        together = packed_weight(x, bias, float32_out=float32_out)
        for first, last in ((0, 1), (9, 10), (15, 16), (3, 7), (4, 9), (2, 10), (0, 15)):
            assert torch.equal(packed_weight(x[first:last], bias, float32_out=float32_out), together[first:last]), (
                first,
                last,
            )


@pytest.mark.parametrize("num_threads", [2, 3])
def test_native_products_are_batch_invariant(backend: str, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend not in ("native", *MARCHES):
        pytest.skip("not guaranteed by oneDNN and torch")
    packed_weight = TiledWeight(torch.randn(100, 4300).bfloat16(), "native")
    x = torch.randn(530, 4300).bfloat16()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    whole = packed_weight(x, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)  # each has a chunk of rows
    assert torch.equal(packed_weight(x, None), whole)
    for first, last in ((0, 1), (529, 530), (255, 257), (100, 356), (3, 520)):
        assert torch.equal(packed_weight(x[first:last], None), whole[first:last])


# -- choice of the backend --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (CpuFeatures(native=True, onednn=True, amx=True), "native and oneDNN"),
        (CpuFeatures(native=True, onednn=True, amx=False), "native"),
        (CpuFeatures(native=True, onednn=False, amx=False), "native"),
        (CpuFeatures(native=True, onednn=False, amx=True), "native"),
        (CpuFeatures(native=False, onednn=True, amx=True), "oneDNN"),
        (CpuFeatures(native=False, onednn=True, amx=False), "oneDNN"),
        (CpuFeatures(native=False, onednn=False, amx=False), "blocks"),
    ],
)
def test_every_machine_has_a_backend(features: CpuFeatures, expected: str) -> None:
    assert choose_backend(features) == expected


@pytest.mark.parametrize("march", MARCHES)
def test_native_code_reports_its_instructions(march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(march, monkeypatch)
    library = native.library()
    assert library is not None and library.instructions == INSTRUCTIONS[march]


MULTIPLY = """
import torch
from octavo.kernels.cpu import native, packed_linear as packed
for use in (packed.pack, packed.pack_head):
    packed_weight = use(torch.randn(96, 64).bfloat16())
    for num_rows in (1, 5, 40):
        assert packed_weight(torch.randn(num_rows, 64).bfloat16(), None, float32_out=True).isfinite().all()
    print("backend", packed_weight.backend)
"""


@pytest.mark.proof
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
def test_onednns_reference_product_is_never_used(compiler: bool, aten: str | None, onednn: str | None) -> None:
    """With each set of instructions; ONEDNN_VERBOSE reports the implementations that run."""
    settings = {"ONEDNN_VERBOSE": "1", "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    environment = {**os.environ, **{name: value for name, value in settings.items() if value is not None}}
    environment |= {} if compiler else {"OCTAVO_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, capture_output=True, text=True, check=True)
    calls = [line.split(",")[4:7] for line in done.stdout.splitlines() if ",primitive,exec," in line]
    assert not [call for call in calls if call[1] in ("matmul", "inner_product") and "ref" in call[2]], done.stdout
    assert done.stdout.count("backend ") == 2


@pytest.mark.parametrize("tile", TiledWeight.TILES)
def test_tiles_of_either_width(backend: str, tile: int) -> None:
    """Also of a width that oneDNN does not use on this processor."""
    if (library := native.library()) is None:
        pytest.skip("no compiled code")
    num_out, num_in, padded = 100, 37, 38
    weight, bias = torch.randn(num_out, num_in).bfloat16(), torch.randn(num_out).bfloat16()
    tiles = torch.zeros(cdiv(num_out, tile) * tile, padded, dtype=torch.bfloat16)
    tiles[:num_out, :num_in] = weight
    tiles = tiles.view(-1, tile, padded // 2, 2).transpose(1, 2).contiguous()
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, num_in).bfloat16()
        expected = x.double() @ weight.double().T + bias.double()
        out = library.linear(tiles, x, bias, torch.empty(num_rows, num_out))
        assert relative_error(out, expected) < 1e-5, num_rows
    token_ids = torch.tensor([99, 0, 63, 64, 32])
    assert torch.equal(library.embed(tiles, token_ids, num_in), weight[token_ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_of_a_plain_table(backend: str, dtype: torch.dtype) -> None:
    table, token_ids = torch.randn(50, 37).to(dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(packed.embed(table, token_ids), table[token_ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_in_another_order(backend: str, dtype: torch.dtype) -> None:
    for num_rows in (0, 1, 5):
        x, order = torch.randn(num_rows, 74)[:, ::2].to(dtype), torch.randperm(37, dtype=torch.int32)
        assert torch.equal(packed.gather_columns(x, order), x[:, order.long()])


def test_columns_are_gathered_again_by_a_recording() -> None:
    if (library := native.library()) is None:
        pytest.skip("no C++ compiler")
    x, order = torch.randn(2, 37).bfloat16(), torch.randperm(37, dtype=torch.int32)
    with library.record() as calls:
        y = packed.gather_columns(x, order)
    x.copy_(torch.randn(2, 37))
    calls.replay()
    assert torch.equal(y, x[:, order.long()])


def test_native_code_shares_onednns_tiles_where_their_layout_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None or not packed.has_onednn_bfloat16():
        pytest.skip("no C++ compiler, or oneDNN has no product")
    monkeypatch.setattr(packed, "has_amx", lambda: True)
    weight, x = torch.randn(128, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    shared = pack(weight)
    assert isinstance(shared, TiledWeight) and shared.backend == "native and oneDNN"
    monkeypatch.setattr(packed, "_tiles_of", lambda *_: None)  # an unknown layout
    separate = pack(weight)
    assert isinstance(separate, TiledWeight) and separate.backend == "native"
    exact = x.double() @ weight.double().T
    for packed_weight in (shared, separate):
        assert relative_error(packed_weight(x, None), exact) < 4e-3
        assert torch.equal(packed_weight(x[:3], None, float32_out=True), separate(x[:3], None, float32_out=True))


def test_float32_is_not_packed() -> None:
    assert pack(torch.randn(8, 8)) is None and pack_head(torch.randn(8, 8)) is None


def test_float16_is_multiplied_in_float32() -> None:
    """torch's float16 product takes eight times as long, and rounds."""
    weight, x = torch.randn(300, 64).half(), torch.randn(3, 64).half()
    packed_weight = pack_head(weight)
    assert isinstance(packed_weight, BlockwiseWeight)
    assert relative_error(packed_weight(x, None, float32_out=True), x.double() @ weight.double().T) < 1e-6
    assert packed_weight(x, None).dtype == torch.float16 and torch.equal(
        packed_weight.gather_rows(torch.tensor([7])), weight[7:8]
    )
