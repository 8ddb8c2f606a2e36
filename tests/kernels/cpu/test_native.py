"""native.cpp gives the reference's results, and kernels.cpu works without it."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch
from tests.kernels.cpu.backends import MARCHES, use_backend
from tests.kernels.pool import make_case, naive_attention, relative_error, settings_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # one rounding of bfloat16 is up to 4e-3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", *MARCHES])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.Library:
    """Compiled for this processor, and for older ones with other registers."""
    use_backend(request.param, monkeypatch)
    library = native.library()
    assert library is not None
    return library


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "library", lambda: None)
    return


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (2, 5, 80), (300, 576)])
@pytest.mark.parametrize("float32_weight", [False, True])
def test_norms(library: native.Library, dtype: torch.dtype, shape: tuple[int, ...], float32_weight: bool) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(torch.float32 if float32_weight else dtype)
    out, residual_out = library.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual_out, expected_residual)
    assert relative_error(out, expected.double()) < TOLERANCE[dtype]
    # Rounded where the reference rounds: all but a few of the roundings are the same.
    assert dtype == torch.float32 or (out == expected).float().mean() > 0.98
    assert relative_error(library.add_rms_norm(x, None, weight, 1e-5)[0], reference.rms_norm(x, weight, 1e-5)) < 2e-2


@DTYPES
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_activation_far_from_zero(library: native.Library, dtype: torch.dtype, name: str) -> None:
    gate = torch.cat((torch.linspace(-200, 200, 300), torch.linspace(-2, 2, 301))).to(dtype)
    gate_up = torch.cat((gate, torch.randn(601).to(dtype))).unsqueeze(0).repeat(3, 1)
    activate = getattr(library, name)
    assert relative_error(activate(gate_up), getattr(reference, name)(gate_up.double())) < TOLERANCE[dtype]
    ends = activate(torch.tensor([[math.inf, 3e38, -3e38, -math.inf, math.nan, 2, 2, 2, 2, 2]], dtype=dtype))[0]
    assert ends[0] == math.inf and ends[1] > 3e38 and ends[2] == 0 and ends[3:].isnan().all()


@DTYPES
@pytest.mark.parametrize("norm", [None, "same", "wide"])
@pytest.mark.parametrize("num_tokens", [1, 5, 400])
def test_rope_and_write(library: native.Library, dtype: torch.dtype, norm: str | None, num_tokens: int) -> None:
    heads = torch.randn(num_tokens, 3 + 2 * 2, 24).to(dtype)  # views of one projection, as in models
    q, k, v = torch.split(heads, [3, 2, 2], dim=1)
    weights: list[torch.Tensor | None] = [None, None]
    if norm is not None:
        weights = [torch.randn(24).to(dtype if norm == "same" else torch.float32) for _ in range(2)]
    positions = torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(150 * 4)[:num_tokens]
    cos_sin = reference.rope_table(24, 50, 10000.0)
    kv, expected_kv = torch.zeros(2, 150, 3, 2, 2, 4, 24).to(dtype).unbind()
    arguments = q, k, v, positions, cos_sin
    out = library.rope_kv_write(*arguments, kv[:, 1], slots, *weights, 1e-5)
    expected = reference.rope_kv_write(
        *arguments, expected_kv[:, 1], slots, q_norm=weights[0], k_norm=weights[1], eps=1e-5
    )
    assert relative_error(out, expected.double()) < TOLERANCE[dtype]
    assert relative_error(kv, expected_kv.double()) < TOLERANCE[dtype]
    assert torch.equal(kv[:, [0, 2]], expected_kv[:, [0, 2]])  # other layers are unchanged
    assert torch.equal(kv[:, 1, 1], expected_kv[:, 1, 1])  # V is copied


@DTYPES
@pytest.mark.parametrize("head_dim", [40, 512])
@pytest.mark.parametrize("window", [0, 1, 700])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_of_long_sequences_in_parts(
    library: native.Library, dtype: torch.dtype, head_dim: int, window: int, sinks: bool
) -> None:
    case = make_case(
        [1, 1, 1], [1, 1700, 513], head_dim=head_dim, block_size=16, group_size=7, dtype=dtype, sinks=sinks
    )
    options = {"window": window, "return_lse": True, "sinks": case.sinks}
    out, lse = cpu.paged_attention(case.q, case.kv_layer, case.batch, scale=case.scale, **options)
    expected, expected_lse = naive_attention(case.double, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(lse, expected_lse) < 2e-6


@DTYPES
@pytest.mark.parametrize("head_dim", [40, 64, 128, 512])
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (600, False), (600, True)])
def test_attention_reads_int8_rows(
    library: native.Library, dtype: torch.dtype, head_dim: int, window: int, sinks: bool
) -> None:
    sizes = {"head_dim": head_dim, "block_size": 16, "group_size": 7}
    case = make_case([1] * 3, [1, 1700, 513], **sizes, dtype=dtype, int8_kv=True, sinks=sinks)
    options = {"window": window, "return_lse": True, "sinks": case.sinks}
    out, lse = cpu.paged_attention(case.q, case.kv_layer, case.batch, scale=case.scale, **options)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(lse, expected_lse) < 2e-6


def test_a_recorded_call_reads_the_sinks(library: native.Library) -> None:
    case = make_case([1, 1], [700, 9], sinks=True)
    assert case.sinks is not None
    out, lens = torch.empty_like(case.q), case.batch.seq_lens
    queries = native.Queries(torch.arange(2), lens, case.batch.block_tables)
    with library.record() as recording:
        options = {"scale": case.scale, "window": 0, "sinks": case.sinks.clone()}
        library.attention(case.q, case.kv_layer, queries, out, None, **options)
    options["sinks"].copy_(case.sinks.flip(0))
    case.sinks = case.sinks.flip(0)
    del options  # the recording has the only reference
    recording.replay()
    assert relative_error(out, naive_attention(case)[0]) < 2e-6


@DTYPES
def test_int8_rows_have_the_bytes_of_the_reference(library: native.Library, dtype: torch.dtype) -> None:
    """Magnitudes of which the scale is 0, subnormal, normal and infinite in float16."""
    magnitudes = 10.0 ** torch.arange(-12, 9).repeat_interleave(5).float()
    k = (torch.randn(2, len(magnitudes), 2, 24) * magnitudes[:, None, None]).to(dtype)
    kv, expected = torch.zeros(2, 30, 1, 2, 2, 4, 26, dtype=torch.int8).unbind()
    slots, positions = torch.randperm(120)[: len(magnitudes)], torch.zeros(len(magnitudes), dtype=torch.int64)
    cos_sin = reference.rope_table(24, 1, 10000.0)
    library.rope_kv_write(k[0], *k, positions, cos_sin, kv[:, 0], slots, None, None, 0.0)
    reference.kv_write(*k, expected[:, 0], slots)
    assert torch.equal(kv, expected)


def test_sequences_without_keys_give_zeros(library: native.Library) -> None:
    kv_layer = torch.full((2, 2, 1, 4, 8), torch.nan)
    batch = RaggedBatch.from_lists([1, 1], [1, 1], [[1], [1]], 4)
    batch.seq_lens.zero_()
    out, lse = cpu.paged_attention(torch.ones(2, 2, 8), kv_layer, batch, scale=1.0, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 128, 129, 1000, 20_000])
def test_samples_are_those_of_the_reference(library: native.Library, dtype: torch.dtype, size: int) -> None:
    """Few tokens get an exact score: the winner must be among them for flat and for steep logits."""
    for seed, (spread, temperature) in enumerate(itertools.product((0.0, 1.0, 4.0, 30.0), (0.1, 1.0, 2.5))):
        logits = (torch.randn(16, size, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
        logits[3, : size // 2] = -math.inf
        params = settings_of(
            16, temperature=temperature, seed=[size] * 16, sample_index=list(range(16)), position=[seed] * 16
        )
        assert torch.equal(cpu.sample(logits, params), reference.sample(logits, params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 100, 4096, 4097, 20_000])
def test_greedy_tokens_are_those_of_the_reference(library: native.Library, dtype: torch.dtype, size: int) -> None:
    """The first of equals; a row with NaN or infinity anywhere has an error."""
    logits = torch.randn(16, size).to(dtype)
    logits[1] = 0.0
    logits[1, size // 2 :] = -0.0
    logits[2] = -3e38
    logits[3, size // 3] = logits[3, -1] = 100.0
    for row, (place, value) in enumerate(itertools.product((0, size // 2, -1), (math.nan, math.inf, -math.inf)), 5):
        logits[row, place] = value
    params = settings_of(16, temperature=0.0)
    assert torch.equal(cpu.sample_checked(logits, params), reference.sample_checked(logits, params))
    assert torch.equal(cpu.sample_checked(logits[:0], settings_of(0, temperature=0.0)), torch.empty(0).long())


def test_the_only_unmasked_token_is_sampled(library: native.Library) -> None:
    logits = torch.full((4, 1000), -math.inf)
    logits[range(4), [0, 77, 640, 999]] = -5.0
    assert cpu.sample(logits, settings_of(4)).tolist() == [0, 77, 640, 999]


def test_attention_keeps_nan_rows_nan(library: native.Library) -> None:
    case = make_case([1, 1], [9, 9])
    case.q[1] = torch.nan
    out = cpu.paged_attention(case.q, case.kv_layer, case.batch, scale=case.scale)
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize("head_dim", [8, 80])
def test_torch_gives_the_same_results_without_a_compiler(torch_alone: None, head_dim: int) -> None:
    for int8_kv, sinks in itertools.product((False, True), repeat=2):
        case = make_case([5, 1, 1], [5, 30, 11], head_dim=head_dim, int8_kv=int8_kv, sinks=sinks)
        out = cpu.paged_attention(case.q, case.kv_layer, case.batch, scale=case.scale, sinks=case.sinks)
        assert relative_error(out, naive_attention(case)[0]) < 2e-6
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert relative_error(cpu.add_rms_norm(x, x, weight, 1e-5)[0], reference.add_rms_norm(x, x, weight, 1e-5)[0]) < 1e-6
    assert relative_error(cpu.silu_mul(x), reference.silu_mul(x)) < 1e-6


@pytest.mark.parametrize("name", ["OCTAVO_NATIVE", "CXX", "OCTAVO_CACHE"])
def test_library_is_none_if_it_cannot_be_compiled(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"OCTAVO_NATIVE": "0", "CXX": "/bin/false", "OCTAVO_CACHE": "/proc/none"}
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv(name, values[name])
    assert native._load.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


def test_a_missing_compiler_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("OCTAVO_NATIVE", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert native._load.__wrapped__() is None
    assert caplog.messages == ["no C++ compiler: the CPU's kernels run on torch alone, slower; install g++ or set CXX"]


def test_the_cache_key_depends_on_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = native._digest(sys.executable, "native")
    assert native._digest(sys.executable, "native") == before
    for name in ("native.cpp", "experts.h", "grouped.h"):
        changed = tmp_path / name
        changed.write_text(native.SOURCE.with_name(name).read_text() + "//")
        with monkeypatch.context() as patch:
            patch.setattr(native, "SOURCES", [changed if path.name == name else path for path in native.SOURCES])
            assert native._digest(sys.executable, "native") != before


SHARED = """
import os, threading, torch
from octavo.kernels.cpu.packed_linear import TiledWeight
torch.manual_seed(0)
weight, x = TiledWeight(torch.randn(4096, 512).bfloat16(), "native"), torch.randn(3, 512).bfloat16()
expected = weight(x, None)

def repeat(times):
    for _ in range(times):
        assert torch.equal(weight(x, None), expected)

threads = [threading.Thread(target=repeat, args=(200,)) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if (child := os.fork()) == 0:
    repeat(3)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_loops_of_several_threads_and_of_a_forked_process() -> None:
    if native.library() is None:
        pytest.skip("no C++ compiler")
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SHARED], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "7", done.stderr


# -- ARM: compiled, and run in an emulator ----------------------------------------------------------------------------

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs aarch64-linux-gnu-g++")
ARM_ROOT = "/usr/aarch64-linux-gnu"


def compile_for_arm(march: str, source: Path, out: Path, flags: tuple[str, ...]) -> None:
    command = [str(COMPILER), *flags, f"-march={march}", f"-I{native.SOURCE.parent}", str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


@NEEDS_COMPILER
def test_the_library_compiles_for_arm(tmp_path: Path) -> None:
    compile_for_arm("armv8.6-a", native.SOURCE, tmp_path / "native.so", native.FLAGS)


@NEEDS_COMPILER
@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize(("march", "instructions"), [("armv8-a", "int16"), ("armv8.6-a", "usdot")])
def test_products_are_right_on_arm(march: str, instructions: str, tmp_path: Path) -> None:
    flags = tuple(flag for flag in native.FLAGS if flag not in ("-shared", "-O3"))
    compile_for_arm(march, Path(__file__).with_name("check_products.cpp"), tmp_path / "check", (*flags, "-O1"))
    command = [str(EMULATOR), "-cpu", "max", "-L", ARM_ROOT, str(tmp_path / "check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == f"{instructions}: products right, halves right\n", done.stderr
