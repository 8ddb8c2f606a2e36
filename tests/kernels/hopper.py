"""Gluon kernels compiled for Hopper where there is none."""

from __future__ import annotations

from typing import Any

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

SHARED_BYTES = 227 * 1024
"""That a program may have."""


def compile_for_hopper(kernel: Any, constants: dict[str, Any], types: dict[str, str], **options: int) -> Any:
    """types: of parameters, as Triton spells them; what has none is an i32. Pointers are aligned, as torch's are."""
    types = types | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"},
    )
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
