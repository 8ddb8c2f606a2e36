"""Every platform's module of operations has every operation of `kernels.ops.Ops`, with its signature."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from octavo.kernels.ops import Ops

OPERATIONS = {name: f for name, f in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")}
MODULES = [
    "octavo.kernels.reference",
    "octavo.kernels.cpu.ops",
    "octavo.kernels.cpu.invariant_ops",
    "octavo.kernels.triton.ops",
    "octavo.kernels.triton.invariant_ops",
]


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


def difference(function: Callable[..., Any], operation: Callable[..., Any]) -> str:
    """How the signatures differ; "" if they are the same. A function may have more keyword arguments with defaults."""
    wanted = parameters(operation)
    names = {p.name for p in wanted}
    more = [p for p in parameters(function) if p.name not in names]
    found = [p for p in parameters(function) if p.name in names]
    if needed := [p.name for p in more if p.kind is not p.KEYWORD_ONLY or p.default is p.empty]:
        return f"needs {needed}"
    if found != wanted:
        return f"{list(map(str, found))} instead of {list(map(str, wanted))}"
    results = inspect.signature(function).return_annotation, inspect.signature(operation).return_annotation
    return "" if results[0] == results[1] or results[0] == f"{results[1]} | tuple[Tensor, Tensor]" else f"{results}"


def check(module: Any) -> None:
    for name, operation in OPERATIONS.items():
        assert not (found := difference(getattr(module, name), operation)), f"{module.__name__}.{name} {found}"


def test_every_platform_has_every_operation_with_the_same_signature() -> None:
    """In a process of its own: the test suite may replace Triton by its interpreter."""
    source = "import importlib, tests.kernels.test_ops as t; [t.check(importlib.import_module(m)) for m in t.MODULES]"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert not found.returncode, found.stderr


def test_other_signatures_are_noticed() -> None:
    def operation(self: Any, x: int, y: int = 0) -> int: ...

    def same(x: int, y: int = 0, *, tuning: int | None = None) -> int: ...

    def other_default(x: int, y: int = 1) -> int: ...

    def other_order(y: int, x: int = 0) -> int: ...

    def other_name(x: int, z: int = 0) -> int: ...

    def other_result(x: int, y: int = 0) -> float: ...

    def more(x: int, y: int = 0, z: int = 0) -> int: ...

    assert difference(same, operation) == ""
    for function in (other_default, other_order, other_name, other_result, more):
        assert difference(function, operation), function
    assert len(OPERATIONS) > 25 and importlib.import_module(MODULES[0])
