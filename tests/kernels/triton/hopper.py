"""Compiles kernels for Hopper without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

SHARED_BYTES = 227 * 1024
"""Limit of a program."""
MULTIPROCESSOR_SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor; each program takes one KiB more than it asks for."""
MULTIPROCESSOR_REGISTERS = 65536


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
