"""The choice of kernels by compute capability, and every kernel compiled for each kind of GPU, without one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.kernels.triton.capability import choose_kernels, kernels_for, num_multiprocessors
from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton import launches
from tests.kernels.triton.compiled import fake_gpu, list_launches, register_usage

KERNELS = Path(octavo.__file__).parent / "kernels" / "triton"
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
GROUPED_HOPPER = {"_grouped_hopper", "_grouped_qkv_hopper"}
HOPPER = {"_hopper_prefill", "_skinny_hopper", "_qkv_hopper", "_grouped_tiles", "_float8_tiles"} | GROUPED_HOPPER


def sm(capability: Any) -> str | None:
    return "sm_{}{}".format(*capability) if isinstance(capability, tuple) else getattr(capability, "__name__", None)


def names(lines: list[str]) -> set[str]:
    return {json.loads(line)[1] for line in lines}


@pytest.mark.parametrize(
    ("capability", "hopper", "dependent_launch", "shared_kib", "reason"),
    [
        (None, False, False, 227, "portable kernels: no GPU"),
        ((8, 0), False, False, 163, "portable kernels: sm_80 has no wgmma"),
        ((8, 6), False, False, 99, "portable kernels: sm_86 has no wgmma"),
        ((8, 9), False, False, 99, "portable kernels: sm_89 has no wgmma"),
        ((9, 0), True, True, 227, "Hopper's kernels: sm_90 has wgmma"),
        ((10, 0), False, True, 227, "portable kernels: sm_100 has no wgmma"),
        ((12, 0), False, True, 99, "portable kernels: sm_120 has no wgmma"),
    ],
    ids=str,
)
def test_the_capability_chooses_the_kernels_and_the_reason_names_it(
    capability: tuple[int, int] | None, hopper: bool, dependent_launch: bool, shared_kib: int, reason: str
) -> None:
    choice = choose_kernels(capability)
    assert (choice.hopper, choice.dependent_launch, choice.reason) == (hopper, dependent_launch, reason)
    assert choice.shared_bytes == shared_kib * 1024


def test_a_device_without_cuda_has_the_portable_kernels() -> None:
    assert kernels_for(torch.device("cpu")) == choose_kernels(None) and num_multiprocessors(torch.device("cpu")) == 3
    with fake_gpu(9, 0):
        assert kernels_for(torch.device("cpu")).hopper and num_multiprocessors(torch.device("cpu")) == 132
    assert not kernels_for(torch.device("cpu")).hopper


WITHOUT_NVIDIA = """
import sys, triton

BLOCKED = ("triton.experimental", "triton.language.extra.cuda")
for name in [name for name in sys.modules if name.startswith(BLOCKED)]:
    del sys.modules[name]
vars(triton.language.extra).pop("cuda", None)


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
import octavo.kernels.triton
import octavo.kernels.triton.ops
import octavo.kernels.triton.precompile

try:
    import octavo.kernels.triton.attention.prefill_hopper
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_operations_import_without_tritons_nvidia_modules() -> None:
    """And Hopper's kernels do not, so the block works."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NVIDIA], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("No module named 'triton.experimental")


def test_only_hopper_files_import_gluon() -> None:
    with_gluon = {path.stem for path in KERNELS.rglob("*.py") if "import gluon" in path.read_text(encoding="utf-8")}
    assert with_gluon == {path.stem for path in KERNELS.rglob("*_hopper.py")} != set()


def launched_kernels() -> set[tuple[str, str]]:
    """(module, kernel) of every `kernel[grid](...)` in the source."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        module = ".".join(("octavo.kernels.triton", *path.relative_to(KERNELS).with_suffix("").parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        jitted = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        }
        imported = {
            alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                if name in jitted:
                    found.add((module, name))
                elif name in imported:
                    found.add((str(imported[name]), name))
    return found


@pytest.mark.parametrize("capability", CAPABILITIES, ids=sm)
def test_the_compile_tests_launch_every_kernel_of_a_gpu(capability: tuple[int, int]) -> None:
    """Hopper's kernels on Hopper and nowhere else; all others on every GPU, but float8 not on an A100.

    Another GPU than Hopper has no merge of split keys.
    """
    lines = list_launches(*capability, *launches.LAUNCHES)
    expected = launched_kernels()
    assert len(expected) > 25 and {name for _, name in expected} >= HOPPER
    if capability != (9, 0):
        expected = {kernel for kernel in expected if kernel[1] not in HOPPER | {"merge_parts"}}
    if capability == (8, 0):
        expected = {kernel for kernel in expected if kernel[1] not in {"_quantise", "_add_norm_quantise"}}
    assert {tuple(json.loads(line)[:2]) for line in lines} == expected


TARGETS = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}
STACK = {
    "_decode": 112,
    "_exchange_pairs": 16,  # rows of three words: the winners of slices
    "_expert_product": 8,  # on sm_100 alone
    "_skinny": 24,
    "_hopper_prefill": 64,
    "_skinny_hopper": 48,
    "_grouped_hopper": 144,  # gates of 64 tokens; of up to 16, none
    "_grouped_tiles": 8,  # groups of 32
    "_float8_tiles": 16,
    "_prefill": 64,
    "_apply_filters": 24,
    "grouped_product": 128,
    "_prepare_chunks": 240,
    "_walk_chunks": 504,  # on sm_80 alone
}
"""Bytes of a thread's stack, where some variants have any: spilled registers, of no inner loop but `_walk_chunks`'."""


def check_compiled(line: str, capability: tuple[int, int]) -> None:
    """Compile a kernel: it fits into shared memory, spills nothing, and has the GPU's own matrix instructions."""
    kernel, name = compile_kernel(line), json.loads(line)[1]
    ptx = kernel.asm["ptx"]
    assert f".target {TARGETS[capability]}\n" in ptx, ptx[:200]
    assert kernel.metadata.shared <= choose_kernels(capability).shared_bytes, (name, kernel.metadata.shared)
    registers, stack = register_usage(kernel)
    assert registers <= 255 and stack <= STACK.get(name, 0), (name, registers, stack)
    assert "cp.async.bulk.tensor" in ptx or name not in HOPPER, name
    assert "wgmma.mma_async" in ptx or name not in HOPPER - GROUPED_HOPPER, name  # few tokens have mma.sync
    assert "wgmma.mma_async" not in ptx or capability == (9, 0), name


def compile_launches(launch: Callable[[], None], capability: tuple[int, int]) -> None:
    lines = list_launches(*capability, launch)
    assert lines
    for line in lines:
        check_compiled(line, capability)


@pytest.mark.proof
@pytest.mark.parametrize("capability", CAPABILITIES, ids=sm)
@pytest.mark.parametrize("launch", launches.LAUNCHES, ids=sm)
def test_kernels_compile_without_spills(launch: Callable[[], None], capability: tuple[int, int]) -> None:
    compile_launches(launch, capability)


@pytest.mark.proof
@pytest.mark.parametrize("launch", launches.TILED, ids=sm)
def test_kernels_fit_into_the_shared_memory_of_small_gpus(launch: Callable[[], None]) -> None:
    compile_launches(launch, (8, 9))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=sm)
def test_a_small_step_compiles_without_spills(capability: tuple[int, int]) -> None:
    """The subset of `make test`."""
    compile_launches(launches.one_small_step, capability)
