"""torch's small operations in a recording: sums, products and quotients with a number, copies.

Models call them between the library's operations, and a replay must repeat them. Their native loops give torch's bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.cpu.native import Library, supports

HARMLESS = frozenset({"arange", "empty", "empty_like", "new_empty", "zeros_like", "gt", "all", "is_nonzero"})
"""Memory, constants, and what the plan of attention reads: a replay need not repeat them."""
COPIES = frozenset({"clone", "contiguous", "copy", "flatten", "reshape"})


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, the library records such operations besides its own. torch computes them.

    is_complete   no other operation has written to memory
    """

    def __init__(self, library: Library) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._library = library
        self.is_complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: True would import torch's compiler, which takes over a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        is_view = not func._schema.is_mutable and _shares_memory(out, args)
        if name not in HARMLESS and not is_view:
            self.is_complete &= not kwargs and isinstance(out, Tensor) and self._record(name, out, args)
        return out

    def _record(self, name: str, out: Tensor, args: Any) -> bool:
        """False: the library has no such operation."""
        match name, args:
            case "add", (Tensor() as a, Tensor() as b):
                return self._add(name, out, a, b)
            case (("mul" | "div"), (Tensor() as a, int() | float() as factor)):
                return self._add(name, out, a, a, factor)
            case "copy", (Tensor(), Tensor() as a, *_):
                return self._add("copy", out, a, a)
            case _, (Tensor() as a, *_) if name in COPIES:
                return self._add("copy", out.view(a.shape), a, a)
        return False

    def _add(self, name: str, out: Tensor, a: Tensor, b: Tensor, factor: float = 0.0) -> bool:
        strides = [stride for x in (out, a, b) if (stride := _stride(x, out)) is not None]
        is_mixed = name == "add" and (out.dtype, b.dtype) == (torch.float32, torch.bfloat16)
        if not supports(out) or out.dtype != a.dtype or len(strides) < 3 or (b.dtype != out.dtype and not is_mixed):
            return False
        self._library.record_elementwise("add_bf16" if is_mixed else name, (out, a, b), strides, factor)
        return True


def _shares_memory(out: Any, args: Iterable[Any]) -> bool:
    """True if all tensors of an operation's result are views of its arguments."""
    memory = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    results = [out] if isinstance(out, Tensor) else out if isinstance(out, list | tuple) else []
    return all(x.untyped_storage().data_ptr() in memory for x in results)


def _stride(x: Tensor, out: Tensor) -> int | None:
    """From row to row, where each row of out [num_rows, ...] has one of x, or all have the same; None: they do not."""
    if out.ndim and x.shape == out.shape[1:]:
        return 0 if x.is_contiguous() else None
    return x.stride(0) if out.ndim and x.shape == out.shape and x[0].is_contiguous() else None
