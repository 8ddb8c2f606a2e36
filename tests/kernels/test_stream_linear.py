"""The kernel that streams weights, without a Hopper: compiled for one, and how it is told to. tests/gpu runs it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (the gpu extra)", allow_module_level=True)

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.kernels import stream_linear, thin_linear
from octavo.kernels.stream_linear import StreamTuning, stream_tuning

SHARED_BYTES = 227 * 1024
POINTERS = {
    **dict.fromkeys(("bias", "residual", "norm", "y", "weighted"), "*bf16"),
    **dict.fromkeys(("squares", "own_squares", "parts"), "*fp32"),
    "meetings": "*i32",
}


def compile_for_hopper(tuning: StreamTuning, num_tokens: int, *, gate: str, sums: bool) -> object:
    """A product behind a norm, or one that is added to a stream."""
    padded = stream_linear.padded_tokens(num_tokens)
    tokens = min(padded, stream_linear.TILE_TOKENS)
    kernel = stream_linear._stream_linear
    constants = {
        "ROWS": tuning.rows,
        "TOKENS": tokens,
        "PADDED": padded,
        "COLUMNS": tuning.columns,
        "SPLITS": tuning.splits,
        "STAGES": tuning.stages,
        "GATE": gate,
        "SCALED": not sums,
        "WITH_BIAS": True,
        "WITH_RESIDUAL": sums,
        "WITH_NORM": sums,
        "OVERLAPPED": True,
    }
    types = {
        "xs": f"tensordesc<bf16[{tokens}, {tuning.columns}],{stream_linear.LAYOUT!r}>",
        "weights": f"tensordesc<bf16[{tuning.rows}, {tuning.columns}],{stream_linear.LAYOUT!r}>",
        "eps": "fp32",
        **POINTERS,
        **dict.fromkeys(constants, "constexpr"),
    }
    source = GluonASTSource(
        kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if types.get(n, "")[:1] == "*"},
    )
    options = {"num_warps": 4, "maxnreg": stream_linear.REGISTERS}
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("num_tokens", [1, 32, 64, 130])
@pytest.mark.parametrize(
    ("num_out", "num_in", "gate", "sums"),
    [(14336, 4096, "silu", False), (4096, 14336, "", True), (6144, 4096, "", False), (1024, 2048, "", True)],
    ids=str,
)
def test_it_compiles_for_hopper_and_fits(num_out: int, num_in: int, gate: str, sums: bool, num_tokens: int) -> None:
    """Products of a layer of Llama 3.1 8B, and a small one."""
    tuning = stream_tuning(num_out, num_in, num_tokens, bool(gate))
    kernel = compile_for_hopper(tuning, num_tokens, gate=gate, sums=sums)
    assert kernel.metadata.shared <= SHARED_BYTES  # type: ignore[attr-defined]
    ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor.2d" in ptx and "setmaxnreg" in ptx
    # The copies of weights come before the wait for the kernel in front, those of what it may have written behind it
    first, wait, last = ptx.index("cp.async.bulk"), ptx.rindex("griddepcontrol.wait"), ptx.rindex("cp.async.bulk")
    assert first < wait < last
    assert ("atom" in ptx) == (tuning.splits > 1)  # where programs meet


def test_every_program_of_a_tuning_is_at_work_at_once() -> None:
    """Those that share a tile wait for each other."""
    for num_out in range(128, 40_000, 128):
        for num_tokens in (1, 32, 33, 64, 65, 256):
            for gated in (False, True):
                tuning = stream_tuning(num_out, 4096, num_tokens, gated)
                padded = stream_linear.padded_tokens(num_tokens)
                rows = tuning.rows * (2 if gated else 1) + min(padded, stream_linear.TILE_TOKENS)
                used = rows * tuning.columns * 2 * tuning.stages + 4096
                programs = -(-num_out // tuning.rows) * tuning.splits * -(-padded // stream_linear.TILE_TOKENS)
                assert used <= SHARED_BYTES and tuning.rows // tuning.splits >= 8
                assert programs <= stream_linear.MULTIPROCESSORS * (SHARED_BYTES // used) or tuning.splits == 1


def test_who_takes_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(megabytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(megabytes << 10, 1024 // dtype.itemsize, dtype=dtype, device="meta")

    assert thin_linear.max_thin_tokens(weight(30)) == thin_linear.EDGE_TOKENS  # no Hopper
    assert thin_linear.max_thin_tokens(weight(200)) == 0
    assert not isinstance(thin_linear._tuning(weight(30), 8, False), StreamTuning)
    monkeypatch.setattr(stream_linear, "_hopper", lambda device: True)
    assert thin_linear.max_thin_tokens(weight(30)) == thin_linear.max_thin_tokens(weight(200)) == 64
    assert isinstance(thin_linear._tuning(weight(30), 40, False), StreamTuning)
    assert thin_linear.max_thin_tokens(weight(200, torch.float32)) == 0  # the matrix units multiply bfloat16
    assert not isinstance(thin_linear._tuning(weight(30, torch.float32), 8, False), StreamTuning)
