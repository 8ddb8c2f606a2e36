"""Compiles kernels for GPUs that are not there: the launches of a pass for any capability, or one kernel for Hopper."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import triton
from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from octavo.kernels.triton import capability, launch, precompile

SHARED_BYTES = 227 * 1024
"""Limit of a program on Hopper."""
MULTIPROCESSOR_SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor; each program takes one KiB more than it asks for."""
MULTIPROCESSOR_REGISTERS = 65536


class FakeDriver:
    """The driver of a GPU that compiles kernels and runs none."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._arch = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Its own number for each kind of GPU: Triton keeps the options of a kernel, such as `arch`, by device."""
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def fake_gpu(major: int, minor: int) -> Iterator[None]:
    """Inside, every tensor is on a GPU of this capability with 132 multiprocessors. Kernels cannot be launched."""
    cached = (capability.kernels_for, capability.num_multiprocessors, launch.pdl_options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", FakeDriver((major, minor)))
        patch.setattr(capability, "compute_capability", lambda device: (major, minor))
        patch.setattr(capability, "count_multiprocessors", lambda device: 132)
        for function in cached:
            function.cache_clear()
        try:
            yield
        finally:
            for function in cached:
                function.cache_clear()


def list_launches(major: int, minor: int, *passes: Callable[[], object]) -> list[str]:
    """What the passes launch on a GPU of this capability: a line for `precompile.compile_kernel` each."""
    with fake_gpu(major, minor):
        return precompile.list_kernels(*passes)


def record_launches(patch: pytest.MonkeyPatch, module: ModuleType, kernel: str) -> dict[str, Any]:
    """The arguments by name, and the grid, of the latest launch of a kernel that is launched no more."""
    args: dict[str, Any] = {}
    names = getattr(module, kernel).arg_names

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *positional, **options: args.update(
                {"grid": grid} | dict(zip(names, positional, strict=False)) | options
            )

    patch.setattr(module, kernel, Kernel())
    return args


def compile_for_hopper(kernel: Any, constants: dict[str, Any], types: dict[str, str], **options: int) -> Any:
    """Compile a kernel for sm_90a.

    types  of parameters, in Triton's notation; i32 for all others. Pointers are aligned, as torch's are, and strides
           are multiples of 16, except that of block tables
    """
    types = types | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = [
        types.get(name, "").startswith("*") or (name.endswith("_stride") and name != "table_stride") for name in names
    ]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(
        kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, even in enumerate(aligned) if even},
    )
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})


def register_usage(kernel: Any) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills to the stack)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])
