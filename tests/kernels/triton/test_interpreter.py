"""Runs the kernels' tests without a GPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.conftest import is_interpreted

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PARTS = {
    "attention": ["attention"],
    "sampling": ["sampling"],
    "experts": ["experts"],
    "recurrent": ["recurrent"],
    "others": ["linear", "kv", *(path.name for path in HERE.glob("test_*.py") if is_interpreted(path.name))],
}


@pytest.mark.proof
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (the gpu extra)")
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_tritons_interpreter(part: str) -> None:
    """In a process of its own: whether a kernel is interpreted is decided when its module is imported."""
    command = [sys.executable, "-m", "pytest", *(str(HERE / path) for path in PARTS[part]), "-p", "no:cacheprovider"]
    command += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]  # Triton's own, of numpy
    # Without other installed plugins: some warn where xdist is in use, and warnings are errors.
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-1000:]


def test_the_cpu_never_imports_triton() -> None:
    code = "import sys, octavo.kernels.cpu.ops, octavo.kernels.reference; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
