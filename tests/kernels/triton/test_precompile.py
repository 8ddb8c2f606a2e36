"""Precompiling kernels, without a GPU: which kernels a dry run lists, and that a launch finds what was compiled."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton import knobs

from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton import precompile
from octavo.kernels.triton.linear import skinny, skinny_hopper
from octavo.kernels.triton.linear.tuning import HopperTuning
from octavo.kernels.triton.peer_memory import PeerCopies
from tests.kernels.triton.compiled import FakeDriver


@pytest.fixture(autouse=True)
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU with an empty cache on disk, also for child processes, and no kernel in memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver((9, 0)))
    for kernel in (skinny_hopper._skinny_hopper, skinny._make_normed_residual):
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))


def forward_pass() -> None:
    """Two kernels; one is in Gluon, and launched three times in two variants."""
    x, norm = torch.zeros(5, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    stream = NormedResidual(x, x, torch.zeros(3, 16))
    skinny.make_normed_residual(x, norm)
    for tuning in (
        HopperTuning(128, 64, 1, 3),
        HopperTuning(128, 64, 1, 3),
        HopperTuning(64, 64, 2, 2),
    ):
        skinny.norm_linear(stream, 1e-6, weight, tuning=tuning)


def run_and_compile(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(kernel, found in the cache on disk) of each that `forward_pass` compiles; nothing is launched."""
    compiled: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        compiled.append((src.name, cache_hit))

    run = precompile.JITFunction.run
    with monkeypatch.context() as patch:
        patch.setattr(knobs.compilation, "listener", listen)
        patch.setattr(precompile.JITFunction, "run", lambda *args, **kw: run(*args, **(kw | {"warmup": True})))
        forward_pass()
    return compiled


def test_listed_kernels_are_found_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = precompile.list_kernels(forward_pass)
    assert len(lines) == 3 and knobs.runtime.jit_cache_hook is None
    assert sum("_skinny_hopper" in line for line in lines) == 2
    for line in lines[:2]:
        precompile.compile_kernel(line)
    assert run_and_compile(monkeypatch) == [
        ("_make_normed_residual", True),
        ("_skinny_hopper", True),
        ("_skinny_hopper", False),
    ]
    assert precompile.list_kernels(forward_pass) == []  # all of them are in memory


def test_other_threads_launch_during_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine may start while the first one computes."""
    ran: list[bool] = []
    monkeypatch.setattr(precompile.JITFunction, "run", lambda self, *args, warmup, **kwargs: ran.append(warmup))

    def compiles() -> None:
        kernel = SimpleNamespace(module="a module", name="a kernel")
        ran.append(knobs.runtime.jit_cache_hook(fn=kernel, compile={"specialization_data": "{}"}))  # type: ignore[misc]

    def in_two_threads() -> None:
        for target in (forward_pass, compiles):
            target()
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    assert len(precompile.list_kernels(in_two_threads)) == 1
    assert ran == [True] * 4 + [False] * 4 + [True, False]


def test_a_compiler_that_dies_loses_only_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = precompile.CompilerPool(2)
    try:
        lines = precompile.list_kernels(forward_pass)
        assert compilers.compile([*lines, "no kernel"]) == 3
        compilers._processes[0].kill()
        compilers._processes[0].wait()
        assert compilers.compile(lines) < 3
    finally:
        compilers.close()
    assert [hit for _, hit in run_and_compile(monkeypatch)] == [True] * 3


def test_kernels_of_a_key_are_precompiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    calls: list[list[str]] = []
    fake = SimpleNamespace(compile=calls.append, close=lambda: calls.append(["closed"]))
    monkeypatch.setattr(precompile, "CompilerPool", lambda num: fake)
    device = torch.device("cuda")
    with pytest.raises(KeyError), precompile.Precompiler("a model", device):
        raise KeyError
    with precompile.Precompiler("a model", device) as first:
        first.precompile(forward_pass)
        first.precompile(lambda: [][0])  # a failing pass is ignored here: the real run raises
    assert [len(lines) for lines in calls] == [1, 3, 1]
    with precompile.Precompiler("a model", device) as again:
        again.precompile(lambda: pytest.fail("this key was compiled before"))
    with precompile.Precompiler("another", device) as other:
        other.precompile(lambda: None)
    assert calls[3:] == [[], ["closed"]]


class FakeRank(NamedTuple):
    """One of two ranks; `others`: the least numbers of the other one, in turn."""

    rank: int
    others: list[int]
    size: int = 2

    def least(self, number: int) -> int:
        return min(number, self.others.pop(0))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Of each pool of compilers its number of processes, and what it compiled."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda pid: range(9))
    made: list[tuple[int, list[str]]] = []

    def make_pool(num: int) -> SimpleNamespace:
        made.append((num, []))
        return SimpleNamespace(compile=made[-1][1].extend, close=lambda: None)

    monkeypatch.setattr(precompile, "CompilerPool", make_pool)
    return made


def test_ranks_compile_a_part_of_the_kernels_each(pools: list[tuple[int, list[str]]]) -> None:
    """Also where one has a marker, which another engine left, and the other has none."""
    lines = precompile.list_kernels(forward_pass)
    for rank in range(2):
        with precompile.Precompiler("a model", torch.device("cuda"), FakeRank(rank, [False, True])) as precompiler:
            precompiler.precompile(forward_pass)
    assert [num for num, _ in pools] == [5, 5]
    assert sorted(pools[0][1] + pools[1][1]) == sorted(lines)
    with precompile.Precompiler("a model", torch.device("cuda"), FakeRank(0, [True])) as precompiler:
        precompiler.precompile(lambda: pytest.fail("all ranks have a marker"))


def test_ranks_whose_passes_have_parted_go_no_further(pools: list[tuple[int, list[str]]]) -> None:
    """A pass that fails on all ranks is ignored here: the real run raises."""
    device = torch.device("cuda")
    first = precompile.Precompiler("a model", device, FakeRank(0, [False, False]))
    with pytest.raises(RuntimeError, match="another rank failed"):
        first.precompile(forward_pass)
    with precompile.Precompiler("a model", torch.device("cuda"), FakeRank(0, [False, False])) as precompiler:
        precompiler.precompile(lambda: [][0])


def test_copies_of_a_dry_run_are_not_done() -> None:
    """A flag that a copy sets would tell of data that no kernel has written."""
    copies, ends = object.__new__(PeerCopies), []  # its stream needs a GPU
    precompile.list_kernels(lambda: ends.append(copies.copy([(torch.zeros(1), 0)])))
    assert ends == [None]
    copies.wait(ends[0])


def test_what_no_kernel_writes_is_zero_in_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks indices, on a GPU by ending the process."""
    sums: list[int] = []
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # new tensors have the largest numbers
    try:
        index = torch.empty(3, dtype=torch.int64)
        precompile.list_kernels(lambda: sums.append(int(torch.arange(2)[torch.empty_like(index)].sum())))
    finally:
        torch.use_deterministic_algorithms(False)
    assert sums == [0] and int(index[0]) > 2
