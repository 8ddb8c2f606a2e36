"""Other processors, as far as this one can show them: what packs and multiplies a weight, by name.

native       compiled for this processor, and for the older ones in `MARCHES` that it can be
oneDNN       no compiler
blocks       no compiler, and nothing fast in oneDNN
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from octavo.kernels.cpu import native
from octavo.kernels.cpu import packed_linear as packed

MARCHES = {
    "x86-64": "sse2",
    "x86-64-v3": "avx2",  # no VNNI
    "skylake-avx512": "avx512bw",  # no VNNI
    "cascadelake": "avx512_vnni",  # no bfloat16
}
INSTRUCTIONS = {
    "x86-64": {"bfloat16": "float32, 128 bits", "int8": "int16, 128 bits"},
    "x86-64-v3": {"bfloat16": "float32, 256 bits", "int8": "int16, 256 bits"},
    "skylake-avx512": {"bfloat16": "float32, 512 bits", "int8": "int16, 512 bits"},
    "cascadelake": {"bfloat16": "float32, 512 bits", "int8": "vpdpbusd, 512 bits"},
}
"""What a library for each multiplies with."""
WAYS = ["native", *MARCHES, "oneDNN", "blocks"]


@functools.cache
def _built(march: str) -> native.Library | None:
    """Compiled in a hurry, once a process."""
    compiler = shutil.which("c++") or shutil.which("g++")
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or MARCHES[march] not in flags:
        return None
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in native.FLAGS))
        path = Path(folder) / f"{march}.so"
        native._compile(compiler, march, path)
        return native.Library(path)


def become(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process compute as one of `WAYS`; skips where it cannot."""
    if way in MARCHES or way == "native":
        library = native.library() if way == "native" else _built(way)
        if library is None:
            pytest.skip(f"this processor is no {way}, or there is no C++ compiler")
        monkeypatch.setattr(native, "library", lambda: library)
        return
    monkeypatch.setattr(native, "library", lambda: None)
    if way == "blocks":
        monkeypatch.setattr(packed, "has_bfloat16", lambda: False)
        monkeypatch.setattr(packed, "has_int8", lambda: False)


def way_of(way: str, quantization: packed.Quantization | None) -> str:
    """Which of `packed`'s ways that is, on this machine."""
    if way == "native" or way in MARCHES:
        return "native and oneDNN" if packed.has_amx() and packed.this_machine(quantization).onednn else "native"
    if way == "oneDNN" and not packed.this_machine(quantization).onednn:
        return "blocks"
    return way
