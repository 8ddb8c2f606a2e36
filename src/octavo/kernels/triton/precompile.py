"""Kernels compiled before they are needed, many at a time.

Triton compiles a kernel when it is first launched, a third of a second each, and one after the other: its compiler
holds Python's lock. Where a model has not run before, a rehearsal of its passes lists what they will launch, processes
compile that side by side into Triton's cache on disk, and the passes find it there. Whatever goes wrong here costs
time, and nothing else: what was not compiled is compiled when it is launched.
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
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

logger = logging.getLogger("octavo")

MOST_PROCESSES = 12
COMPILE_S = 120.0
"""How long a kernel may take, and a process to start; then it is compiled when it is launched."""
Work = Callable[[], object]


class Ahead:
    """Compiles ahead what `rehearse` is given, where `key`, which stands for all that it depends on beside the code and
    the libraries, has not been seen before. To be left as a context, which remembers that it has been seen now."""

    def __init__(self, key: str, device: torch.device) -> None:
        parts = [key, _code(), torch.__version__, triton.__version__, torch.cuda.get_device_name(device)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        self._seen = Path(knobs.cache.dir) / f"octavo-{digest}"
        self._compilers = None if self._seen.exists() else Compilers(min(MOST_PROCESSES, len(os.sched_getaffinity(0))))

    def rehearse(self, *works: Work) -> None:
        """Do all that without launching any kernel, and compile what it would have launched: nothing in it may depend
        on what a kernel writes."""
        if self._compilers is None:
            return
        try:
            self._compilers.compile(listed(*works))
        except Exception as error:  # what is wrong with the passes themselves, they will say
            logger.debug("kernels are not compiled ahead: %s", error)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._compilers is None:
            return
        self._compilers.close()
        if error is None:
            with contextlib.suppress(OSError):
                self._seen.touch()


@functools.cache
def _code() -> str:
    """Of all that decides which kernels there are."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def listed(*works: Work) -> list[str]:
    """What they launch and is not in memory yet: a line for `compile_line` each. Nothing is launched by this thread;
    those of other engines go on."""
    target = triton.runtime.driver.active.get_current_target()
    lines: dict[str, None] = {}
    own = threading.get_ident()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != own:
            return False
        told = [fn.module, fn.name, compile["specialization_data"], target.backend, target.arch, target.warp_size]
        lines[json.dumps(told)] = None
        return True  # do not compile it now

    def rehearsed(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=warmup or threading.get_ident() == own, **kwargs)

    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook, JITFunction.run = note, rehearsed
    try:
        for work in works:
            work()
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
    return list(lines)


class Compilers:
    """Processes that compile kernels. They start when they are made, and nobody waits for that."""

    def __init__(self, num: int) -> None:
        command = [sys.executable, "-P", "-m", __name__]  # -P: the current folder is no place to import from
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._processes = [subprocess.Popen(command, **pipes) for _ in range(num)]
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def compile(self, lines: list[str]) -> int:
        """How many of them are compiled now."""
        with ThreadPoolExecutor(len(self._processes)) as threads:
            num = sum(threads.map(self._compile, lines))
        logger.debug("%d of %d kernels compiled ahead", num, len(lines))
        return num

    def _compile(self, line: str) -> bool:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if not wait([process.stdout.fileno()], COMPILE_S):
                process.kill()
            return process.stdout.readline() == "done\n"
        except OSError:  # it is gone
            return False
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


def compile_line(line: str) -> None:
    """Compile one kernel, as `listed` wrote it down, for the cache on disk. Takes no GPU."""
    from triton.compiler import ASTSource  # private to triton, in part: an engine starts without them
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name, data, *target = json.loads(line)
    function = getattr(importlib.import_module(module), name)
    told = json.loads(data)
    constants = dict(zip(map(tuple, told["constant_keys"]), told["constant_vals"], strict=True))
    attributes = dict(zip(map(tuple, told["attrs_keys"]), told["attrs_vals"], strict=True))
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, told["signature"], constants, attributes)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in told["options"].items()}
    triton.compile(source, target=GPUTarget(*target), options=options)


def main() -> None:
    """Lines in, a word a line out."""
    for line in sys.stdin:
        try:
            compile_line(line)
            print("done", flush=True)
        except Exception as error:
            print(" ".join(repr(error).split()), flush=True)


if __name__ == "__main__":
    main()
