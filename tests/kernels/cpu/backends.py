"""Runs the CPU's linear layers with another backend, or with the instructions of another processor.

native       native.cpp compiled for this processor, or for an older one of `MARCHES`
EMULATED     the same with Intel's matrix unit, whose instructions are emulated
oneDNN       no compiler
blocks       no compiler, and no fast product in oneDNN
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from octavo.kernels.cpu import native
from octavo.kernels.cpu import packed_linear as packed

MARCHES = {
    "x86-64": "sse2",
    "x86-64-v2": "ssse3",
    "x86-64-v3": "avx2",  # no VNNI
    "skylake-avx512": "avx512bw",  # no VNNI
    "cascadelake": "avx512_vnni",  # no bfloat16
}
INSTRUCTIONS = {
    "x86-64": {"bfloat16": "float32, 128 bits", "int8": "int16, 128 bits"},
    "x86-64-v2": {"bfloat16": "float32, 128 bits", "int8": "pmaddubsw, 128 bits"},
    "x86-64-v3": {"bfloat16": "float32, 256 bits", "int8": "pmaddubsw, 256 bits"},
    "skylake-avx512": {"bfloat16": "float32, 512 bits", "int8": "pmaddubsw, 512 bits"},
    "cascadelake": {"bfloat16": "float32, 512 bits", "int8": "vpdpbusd, 512 bits"},
}
"""`Library.instructions` of a library for each."""
EMULATED, EMULATION = "emulated matrix unit", Path(__file__).with_name("emulated_unit.h")
BACKENDS = ["native", *MARCHES, "oneDNN", "blocks"]


@functools.cache
def compile_for(name: str) -> Path | None:
    """native.cpp for one of `MARCHES` or EMULATED, with -O1, kept on disk; None where this processor cannot run it."""
    march = "cascadelake" if name == EMULATED else name
    compiler = shutil.which("c++") or shutil.which("g++")
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or MARCHES[march] not in flags:
        return None
    fast_compile = tuple("-O1" if flag == "-O3" else flag for flag in native.FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", fast_compile)
        if name == EMULATED:
            patch.setattr(native, "FLAGS", (*fast_compile, "-include", str(EMULATION)))
            patch.setattr(native, "SOURCES", (*native.SOURCES, EMULATION))
        return native.build(compiler, march)


@functools.cache
def _compiled(name: str) -> native.Library | None:
    path = compile_for(name)
    return None if path is None else native.Library(path)


def use_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process use one of `BACKENDS`; skips the test if it cannot."""
    if name in MARCHES or name in ("native", EMULATED):
        library = native.library() if name == "native" else _compiled(name)
        if library is None:
            pytest.skip(f"this processor is no {name}, or there is no C++ compiler")
        monkeypatch.setattr(native, "library", lambda: library)
        return
    monkeypatch.setattr(native, "library", lambda: None)
    if name == "blocks":
        monkeypatch.setattr(packed, "has_onednn_bfloat16", lambda: False)


def expected_backend(name: str) -> str:
    """The `MatmulBackend` that one of `BACKENDS` results in on this machine."""
    if name == "native" or name in MARCHES:
        shares = packed.has_amx() and packed.has_onednn_bfloat16()
        return "native and oneDNN" if shares else "native"
    return name if packed.has_onednn_bfloat16() else "blocks"
