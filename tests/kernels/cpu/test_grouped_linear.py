"""Weights in groups: packed, their products are those of the rounded x with exactly the weights that they came with."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu.grouped_linear import GroupedWeight, keeps_groups, pack_groups
from octavo.kernels.group_form import GGUF_FORMS
from octavo.kernels.groups import GroupForm, Groups
from tests.kernels.cpu.backends import EMULATED, MARCHES, compile_for, use_backend
from tests.kernels.cpu.groups import make_groups

FORMS = {
    **GGUF_FORMS,
    "AWQ 32": GroupForm(4, 32, has_zeros=True),
    "AWQ 64": GroupForm(4, 64, has_zeros=True),
    "AWQ 128": GroupForm(4, 128, has_zeros=True),
    "GPTQ 64": GroupForm(4, 64, zero=8),
    "GPTQ 128": GroupForm(4, 128, zero=8),
    "8 bits, zeros": GroupForm(8, 64, has_zeros=True),
    "8 bits, channels": GroupForm(8, 0, zero=128),  # 0: num_in
}
LIMITS = {"Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.625}


@pytest.fixture(params=["native", *MARCHES, EMULATED])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.manual_seed(0)
    use_backend(request.param, monkeypatch)
    return request.param


def packed(name: str, num_out: int, num_in: int) -> tuple[Groups, GroupedWeight]:
    form = FORMS[name]
    form = form if form.group_size else replace(form, group_size=num_in)
    assert keeps_groups(form, num_in, torch.bfloat16)
    groups = make_groups(form, num_out, num_in)
    weight = pack_groups(groups)
    assert weight is not None
    return groups, weight


def sizes(name: str) -> list[tuple[int, int]]:
    """Tiles and blocks that are not full, where the form allows them."""
    unit = 256 if FORMS[name].is_nested else FORMS[name].group_size or 32
    return [(37, unit), (16, 3 * unit), (100, -(-1100 // unit) * unit)]


def make_x(num_rows: int, num_in: int) -> Tensor:
    """With large channels, and a row of zeros if there are several rows."""
    x = torch.randn(num_rows, num_in)
    x[:, :: num_in // 8] *= 20
    x[1:2] = 0
    return x.bfloat16()


def rounded(x: Tensor) -> Tensor:
    """x as products see it, float64: int8 times a float32 scale, in groups of 32."""
    groups = x.float().unflatten(1, (-1, 32))
    most = groups.abs().amax(2, keepdim=True)
    values = (groups * torch.where(most > 0, torch.tensor(127.0) / most, 0.0)).round()
    return (values.double() * (most / 127).double()).flatten(1)


@pytest.mark.parametrize("name", FORMS)
def test_products(backend: str, name: str) -> None:
    for num_out, num_in in sizes(name):
        groups, weight = packed(name, num_out, num_in)
        bias = torch.randn(num_out).bfloat16()
        for num_rows in (1, 3, 4, 5, 23):
            x = make_x(num_rows, num_in)
            expected = rounded(x) @ groups.dequantised().double().T + bias.double()
            actual = weight(x, bias, float32_out=True)
            assert float((actual - expected).norm() / expected.norm()) < 3e-6, (num_out, num_in, num_rows)
            assert torch.equal(weight(x, bias), actual.bfloat16())


@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(backend: str, name: str) -> None:
    num_in = 1280  # several steps
    _, weight = packed(name, 48, num_in)
    x = make_x(512, num_in)
    together = weight(x, None, float32_out=True)
    for num_rows in range(41):
        last = slice(512 - num_rows, 512)
        assert torch.equal(weight(x[last], None, float32_out=True), together[last]), num_rows


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_the_weight(backend: str, name: str) -> None:
    for num_out, num_in in sizes(name):
        groups, weight = packed(name, num_out, num_in)
        indices = torch.tensor([num_out - 1, 0, 5, 5])
        assert torch.equal(weight.gather_rows(indices), groups.dequantised()[indices].bfloat16())


@pytest.mark.parametrize("name", FORMS)
def test_memory(name: str) -> None:
    if native.library() is None:
        pytest.skip("no C++ compiler")
    groups, weight = packed(name, 64, 2048)
    assert weight.nbytes <= 1.1 * groups.form.num_bytes(64 * 2048)
    assert weight.nbytes * 8 / (64 * 2048) == LIMITS.get(name, weight.nbytes * 8 / (64 * 2048))


def test_results_are_written_among_others(backend: str) -> None:
    _, weight = packed("Q4_0", 40, 96)
    for num_rows in (1, 9):
        x, merged = make_x(num_rows, 96), torch.full((num_rows, 100), 7.0).bfloat16()
        out = merged[:, 30:70]
        assert weight(x, None, out=out) is out and torch.equal(out, weight(x, None))
        assert bool((merged[:, :30] == 7).all()) and bool((merged[:, 70:] == 7).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_stay_so(backend: str, value: float) -> None:
    for name in ("Q4_1", "Q6_K", "Q8_0", "AWQ 128"):
        _, weight = packed(name, 40, 256)
        for num_rows in (3, 17):
            x = torch.randn(num_rows, 256).bfloat16()
            x[2, 7] = value
            finite = weight(x, None, float32_out=True).isfinite()
            assert not finite[2].any() and bool(finite[:2].all()) and bool(finite[3:].all())


def test_recorded_products_follow_their_inputs() -> None:
    if (library := native.library()) is None:
        pytest.skip("no C++ compiler")
    _, weight = packed("Q5_K", 40, 256)
    x, indices = make_x(3, 256), torch.tensor([1, 2])
    with library.record() as calls:
        y, rows = weight(x, None), weight.gather_rows(indices)
    x.copy_(torch.randn(3, 256)), indices.copy_(torch.tensor([39, 17]))
    calls.replay()
    assert torch.equal(y, weight(x, None)) and torch.equal(rows, weight.gather_rows(indices))


def test_what_is_not_kept() -> None:
    assert not keeps_groups(GroupForm(8, 128, is_float=True), 256, torch.bfloat16)
    assert not keeps_groups(FORMS["Q4_0"], 256, torch.float32)
    assert not keeps_groups(GroupForm(4, 16, zero=8), 256, torch.bfloat16)
    if native.library() is None:
        pytest.skip("no C++ compiler")
    groups = make_groups(FORMS["Q4_0"], 16, 64)
    fine = replace(groups, scales=torch.full((16, 2), 2.0**-14, dtype=torch.bfloat16))
    assert pack_groups(fine) is not None
    assert pack_groups(replace(fine, scales=fine.scales * 2.0**-20)) is None  # below float16's smallest number
    mxfp4 = make_groups(FORMS["MXFP4"], 16, 64)
    assert pack_groups(replace(mxfp4, scales=mxfp4.scales * 1.5)) is None
    assert pack_groups(replace(mxfp4, scales=-mxfp4.scales)) is None


def test_all_exponents_of_mxfp4() -> None:
    """Also subnormal ones, and each code."""
    if native.library() is None:
        pytest.skip("no C++ compiler")
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 2)
    groups = Groups(FORMS["MXFP4"], codes, torch.exp2(torch.arange(-127.0, 128).double()).float()[:, None])
    weight = pack_groups(groups)
    assert weight is not None
    assert torch.equal(weight.gather_rows(torch.arange(255)), groups.dequantised().bfloat16())
    x = torch.zeros(1, 32).bfloat16()
    x[0, 7] = 127  # rounded to int8 without an error
    finite = slice(0, 240)
    assert torch.equal(weight(x, None, float32_out=True)[0, finite], 127 * groups.dequantised()[finite, 7])


# -- Intel's matrix unit ----------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Each thread configures the unit for itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_forms_have_all_kinds() -> None:
    kinds = {packed(name, 16, 256)[1].kind for name in FORMS}
    assert kinds == set(native.GROUPED_BLOCKS)


@pytest.mark.parametrize("unit", ["native", EMULATED])
@pytest.mark.parametrize("name", FORMS)
def test_the_matrix_unit_has_the_bits_of_vectors(
    name: str, unit: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd numbers of tiles, blocks that are not full, and so many inputs that rows are multiplied in two parts."""
    torch.manual_seed(0)
    for num_out, num_in in [*sizes(name), (33, 5120)]:
        use_backend("cascadelake", monkeypatch)
        _, weight = packed(name, num_out, num_in)
        bias, x = torch.randn(num_out).bfloat16(), make_x(70, num_in)
        x[3, 5] = torch.nan
        exact, with_bias = weight(x, None, float32_out=True), weight(x, bias)
        assert exact[:3].isfinite().all() and exact[3].isnan().all() and with_bias[4:].isfinite().all()
        use_backend(unit, monkeypatch)
        for rows in range(1, 71):
            few = x[:rows]
            assert torch.equal(weight(few, None, float32_out=True).view(torch.int32), exact[:rows].view(torch.int32))
            assert torch.equal(weight(few, bias).view(torch.int16), with_bias[:rows].view(torch.int16)), (num_in, rows)


def test_the_matrix_unit_is_named_where_linux_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, no instruction of it runs: the emulation would abort."""
    if (path := compile_for(EMULATED)) is None:
        pytest.skip("needs a C++ compiler, and AVX-512 with VNNI")
    assert native.Library(path).instructions["int8"] == "tdpbsud and vpdpbusd, 512 bits"
    monkeypatch.setenv("REFUSE_MATRIX_UNIT", "1")
    refused = native.Library(shutil.copy(path, tmp_path / "refused.so"))
    assert refused.instructions["int8"] == "vpdpbusd, 512 bits"
    _, weight = packed("Q4_K", 40, 256)
    x = make_x(70, 256)
    expected = weight(x, None)
    monkeypatch.setattr(native, "library", lambda: refused)
    assert torch.equal(weight(x, None), expected)


def test_the_matrix_units_instructions_compile(tmp_path: Path) -> None:
    command = [shutil.which("c++") or "g++", *native.FLAGS, "-O0", "-march=sapphirerapids", "-c", "-o", "native.o"]
    if subprocess.run([*command, "-x", "c++", "/dev/null"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no C++ compiler that knows AMX")
    done = subprocess.run([*command, str(native.SOURCE)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert b"tdpbsud and vpdpbusd" in (tmp_path / "native.o").read_bytes()
