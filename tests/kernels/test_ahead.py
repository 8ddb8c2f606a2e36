"""Compiling ahead, without a GPU: what a rehearsal lists, and that a launch finds what was compiled of it."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (the gpu extra)", allow_module_level=True)

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from octavo.kernels.reference import NormedResidual
from octavo.kernels.triton import precompile as ahead
from octavo.kernels.triton.linear import skinny as thin_linear
from octavo.kernels.triton.linear import skinny_hopper as stream_linear
from octavo.kernels.triton.linear.skinny_hopper import StreamTuning


class FakeDriver:
    """A Hopper that compiles, and runs nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache on disk, also for other processes, and nothing in memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver())
    for kernel in (stream_linear._stream_linear, thin_linear._make_normed_residual):
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))


def work() -> None:
    """Two kernels, one of them in Gluon, which is launched twice; in two forms."""
    x, norm = torch.zeros(5, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    stream = NormedResidual(x, x, torch.zeros(3, 16))
    thin_linear.make_normed_residual(x, norm)
    for tuning in (StreamTuning(128, 64, 1, 3), StreamTuning(128, 64, 1, 3), StreamTuning(64, 64, 2, 2)):
        thin_linear.norm_linear(stream, 1e-6, weight, tuning=tuning)


def launch_for_real(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(kernel, whether it was found) of each that `work` has to have compiled. As `run`, but for the launch itself."""
    found: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, cache_hit))

    run = ahead.JITFunction.run
    with monkeypatch.context() as patch:
        patch.setattr(knobs.compilation, "listener", listen)
        patch.setattr(ahead.JITFunction, "run", lambda *args, **kw: run(*args, **(kw | {"warmup": True})))
        work()
    return found


def test_what_a_rehearsal_lists_is_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ahead.listed(work)
    assert len(lines) == 3 and knobs.runtime.jit_cache_hook is None
    assert sum("_stream_linear" in line for line in lines) == 2
    for line in lines[:2]:
        ahead.compile_line(line)
    assert launch_for_real(monkeypatch) == [
        ("_make_normed_residual", True),
        ("_stream_linear", True),
        ("_stream_linear", False),
    ]
    assert ahead.listed(work) == []  # all of it is in memory


def test_others_go_on_while_one_rehearses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine may start while the first one computes."""
    ran: list[bool] = []
    monkeypatch.setattr(ahead.JITFunction, "run", lambda self, *args, warmup, **kwargs: ran.append(warmup))

    def compiles() -> None:
        kernel = SimpleNamespace(module="a module", name="a kernel")
        ran.append(knobs.runtime.jit_cache_hook(fn=kernel, compile={"specialization_data": "{}"}))  # type: ignore[misc]

    def beside() -> None:
        for target in (work, compiles):
            target()
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    assert len(ahead.listed(beside)) == 1
    assert ran == [True] * 4 + [False] * 4 + [True, False]


def test_processes_compile_and_one_that_dies_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = ahead.Compilers(2)
    try:
        lines = ahead.listed(work)
        assert compilers.compile([*lines, "no kernel"]) == 3
        compilers._processes[0].kill()
        compilers._processes[0].wait()
        assert compilers.compile(lines) < 3
    finally:
        compilers.close()
    assert [hit for _, hit in launch_for_real(monkeypatch)] == [True] * 3


def test_it_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    made: list[list[str]] = []
    fake = SimpleNamespace(compile=made.append, close=lambda: made.append(["closed"]))
    monkeypatch.setattr(ahead, "Compilers", lambda num: fake)
    device = torch.device("cuda")
    with pytest.raises(KeyError), ahead.Ahead("a model", device):
        raise KeyError
    with ahead.Ahead("a model", device) as first:
        first.rehearse(work)
        first.rehearse(lambda: [][0])  # says so when it is done for real
    assert [len(lines) for lines in made] == [1, 3, 1]
    with ahead.Ahead("a model", device) as again:
        again.rehearse(lambda: pytest.fail("it was seen"))
    with ahead.Ahead("another", device) as other:
        other.rehearse(lambda: None)
    assert made[3:] == [[], ["closed"]]
