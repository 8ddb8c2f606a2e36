"""Compiles kernels before they are needed, several at a time.

Triton compiles a kernel at its first launch: a third of a second each, one after another, because the compiler holds
Python's lock. When a model has not run on this machine before, a dry run of its forward passes lists their kernels,
processes compile them in parallel into Triton's cache on disk, and the real passes find them there. A failure here only
costs time: a kernel that was not precompiled is compiled when it is launched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from octavo.integers import cdiv
from octavo.kernels.triton.launch import dry_run

logger = logging.getLogger("octavo")

MAX_PROCESSES = 12
COMPILE_TIMEOUT_S = 120.0
"""Limit for one kernel, start of the process included; after that, the kernel is compiled when it is launched."""
ForwardPass = Callable[[], object]
_ATEN = torch.ops.aten
UNINITIALISED = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


class Ranks(Protocol):
    """This process among those that run the same passes."""

    rank: int
    size: int

    def least(self, number: int) -> int:
        """The least number of all ranks. No rank returns before all have called."""
        ...


class Precompiler:
    """Compiles the kernels of forward passes, unless this was done before for the same key.

    `key` stands for everything that selects kernels besides the code, the libraries and the device. Use it as a context
    manager: a clean exit leaves a marker file, so that the next start with this key compiles nothing.

    ranks  Ranks compile a part of the kernels each. All or none do: passes are collective. None: there is one
    """

    def __init__(self, key: str, device: torch.device, ranks: Ranks | None = None) -> None:
        parts = [key, _source_digest(), torch.__version__, triton.__version__, torch.cuda.get_device_name(device)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        self._marker, self._ranks = Path(knobs.cache.dir) / f"octavo-{digest}", ranks
        num_processes, is_done = min(MAX_PROCESSES, len(os.sched_getaffinity(0))), self._marker.exists()
        if ranks is not None:
            num_processes, is_done = cdiv(num_processes, ranks.size), bool(ranks.least(is_done))
        self._compilers = None if is_done else CompilerPool(num_processes)

    def precompile(self, *passes: ForwardPass) -> None:
        """Run the passes without launching any kernel, and compile the kernels that they would launch.

        Nothing in a pass may depend on what a kernel writes.
        """
        if self._compilers is None:
            return
        passed = False
        try:
            lines = list_kernels(*passes)
            passed = True
            self._compilers.compile([*filter(self._is_mine, lines)])
        except Exception as error:  # an error of the passes themselves is raised again by the real run
            logger.debug("kernels are not precompiled: %s", error)
        # Then the others' kernels are compiled, too. Where one's passes have failed, collectives no longer match.
        if self._ranks is not None and self._ranks.least(passed) < passed:
            raise RuntimeError("another rank failed in its longest passes")

    def _is_mine(self, line: str) -> bool:
        """The same rank's on all ranks. What it does not launch itself is compiled when another launches it."""
        return self._ranks is None or zlib.crc32(line.encode()) % self._ranks.size == self._ranks.rank

    def __enter__(self) -> Precompiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._compilers is None:
            return
        self._compilers.close()
        if error is None:
            with contextlib.suppress(OSError):
                self._marker.touch()


@functools.cache
def _source_digest() -> str:
    """SHA-256 of all source files of this package: any of them may change which kernels a pass launches."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New tensors are zeros: no kernel writes them, and torch may be given them as indices."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in UNINITIALISED else out


def list_kernels(*passes: ForwardPass) -> list[str]:
    """The kernels that the passes would launch and that are not in memory yet, one line for `compile_kernel` each.

    This thread launches nothing meanwhile; launches of other threads, such as another engine's, go on.
    """
    target = triton.runtime.driver.active.get_current_target()
    lines: dict[str, None] = {}

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if not dry_run.is_on:
            return False
        kernel = [fn.module, fn.name, compile["specialization_data"], target.backend, target.arch, target.warp_size]
        lines[json.dumps(kernel)] = None
        return True  # do not compile it now

    def run_dry(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=warmup or dry_run.is_on, **kwargs)

    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook, JITFunction.run, dry_run.is_on = record, run_dry, True
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            for forward_pass in passes:
                forward_pass()
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook, dry_run.is_on = run, hook, False
    return list(lines)


class CompilerPool:
    """Processes that compile kernels. The constructor starts them and does not wait until they are ready."""

    def __init__(self, num: int) -> None:
        command = [sys.executable, "-P", "-m", __name__]  # -P: import nothing from the current folder
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._processes = [subprocess.Popen(command, **pipes) for _ in range(num)]
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def compile(self, lines: list[str]) -> int:
        """Compile the kernels of `list_kernels`; returns how many succeeded."""
        with ThreadPoolExecutor(len(self._processes)) as threads:
            num = sum(threads.map(self._compile, lines))
        logger.debug("%d of %d kernels precompiled", num, len(lines))
        return num

    def _compile(self, line: str) -> bool:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if not wait([process.stdout.fileno()], COMPILE_TIMEOUT_S):
                process.kill()
            return process.stdout.readline() == "done\n"
        except OSError:  # the process has died
            return False
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


def compile_kernel(line: str) -> Any:
    """Compile one kernel of `list_kernels` into the cache on disk, and return it. Needs no GPU."""
    from triton.compiler import ASTSource  # partly private to Triton: an engine must start without them

    module, name, data, *target = json.loads(line)
    function = getattr(importlib.import_module(module), name)
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    spec = json.loads(data)
    constants = dict(zip(map(tuple, spec["constant_keys"]), spec["constant_vals"], strict=True))
    attributes = dict(zip(map(tuple, spec["attrs_keys"]), spec["attrs_vals"], strict=True))
    # JSON turned tuples, such as a parameter that is several tensors, into lists.
    signature, options = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in spec[part].items()}
        for part in ("signature", "options")
    )
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)


def main() -> None:
    """Read one kernel a line from stdin; write "done" or the error, one line each."""
    for line in sys.stdin:
        try:
            compile_kernel(line)
            print("done", flush=True)
        except Exception as error:
            print(" ".join(repr(error).split()), flush=True)


if __name__ == "__main__":
    main()
