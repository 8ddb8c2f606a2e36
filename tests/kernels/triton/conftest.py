"""Collects the kernel tests that this process can run.

Whether Triton interprets or compiles a kernel is decided when its module is imported. So the tests of kernels run in
processes that test_interpreter.py starts, and on a GPU by tests/gpu/test_triton.py. Every other process runs the tests
in `HOST_TESTS` and in test_*_compiled.py, which compile kernels or use none.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch

HOST_TESTS = ("test_interpreter.py", "test_precompile.py")
HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_interpreted(name: str) -> bool:
    """True for test files that run kernels; Triton's interpreter can run these."""
    return name not in HOST_TESTS and not name.endswith("_compiled.py")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    name = collection_path.name
    if not name.startswith("test_") or (name == "test_interpreter.py" and not HAS_TRITON):
        return None
    if not HAS_TRITON:  # test_interpreter.py reports that as a skip
        return True
    from tests.kernels.triton.device import INTERPRETED

    return True if is_interpreted(name) != INTERPRETED else None


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
