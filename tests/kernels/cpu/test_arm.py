"""native.cpp on ARM: it compiles with the flags of `native.py`, and its vector products are right in an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.kernels.cpu import native

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs aarch64-linux-gnu-g++")
ROOT = "/usr/aarch64-linux-gnu"


def compile_for(march: str, source: Path, out: Path, flags: tuple[str, ...]) -> None:
    command = [str(COMPILER), *flags, f"-march={march}", f"-I{native.SOURCE.parent}", str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


def test_the_library_compiles(tmp_path: Path) -> None:
    compile_for("armv8.6-a", native.SOURCE, tmp_path / "native.so", native.FLAGS)


@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize(("march", "instructions"), [("armv8-a", "int16"), ("armv8.6-a", "usdot")])
def test_products_are_right(march: str, instructions: str, tmp_path: Path) -> None:
    flags = tuple(flag for flag in native.FLAGS if flag not in ("-shared", "-O3"))
    compile_for(march, Path(__file__).with_name("check_products.cpp"), tmp_path / "check", (*flags, "-O1"))
    command = [str(EMULATOR), "-cpu", "max", "-L", ROOT, str(tmp_path / "check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == f"{instructions}: products right, halves right\n", done.stderr
