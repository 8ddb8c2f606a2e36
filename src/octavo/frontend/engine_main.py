"""The engine process: `python -m octavo.frontend.engine_main FD`. Only `engine.process.supervisor` starts it.

FD is the lifeline (see `engine.process.ipc`), over which the launch options arrive. The process ends with its parent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from octavo import log_setup as logs
from octavo.engine.process.heartbeat import HeartbeatSender
from octavo.engine.process.ipc import Channel, EngineFailed, Hello, Launch, Lifeline, Placement
from octavo.engine.process.server import EngineServer
from octavo.engine.text_processor import TextProcessor
from octavo.runner.memory.budget import limit_free_memory
from octavo.utils.signals import ignore_signals
from octavo.view.live.queries import ServedQuery

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

PR_SET_PDEATHSIG = 1

Build = Callable[[dict[str, Any], Callable[[str], None]], "tuple[Engine, TextProcessor | None, dict[str, Any]]"]
"""Builds an engine, its text processor and a summary for people, from options and a callback for each phase."""


def build(options: dict[str, Any], enter: Callable[[str], None]) -> tuple[Engine, TextProcessor | None, dict[str, Any]]:
    enter("importing torch")
    from octavo.config import EngineArgs
    from octavo.frontend.build import build
    from octavo.frontend.input_processor import InputProcessor

    enter("loading the model")
    built = build(EngineArgs(**options))
    config = built.config
    names = ("device", "dtype", "max_model_len", "num_blocks", "num_host_blocks", "kv_bytes", "weight_bytes")
    summary = {name: getattr(config, name) for name in names} | {"block_size": config.args.block_size}
    return built.engine, InputProcessor(built.tokenizer, built.engine.limits.vocab_size), summary


def main(fd: int, build: Build = build) -> int:
    """Run an engine until the client closes it; returns the exit status."""
    ignore_signals()
    lifeline = Lifeline.inherited(fd)
    os.set_inheritable(fd, False)
    data = lifeline.receive()
    if not data:
        return 1  # the parent died before it sent the options
    launch = msgspec.msgpack.decode(data, type=Launch)
    if launch.logs is not None:
        logs.set_up(launch.logs)
    if launch.placement is not None:
        _take_place(launch.placement)
    directory = os.path.dirname(launch.endpoint.removeprefix("ipc://"))

    def orphaned() -> None:
        shutil.rmtree(directory, ignore_errors=True)  # unless the parent removed it
        os._exit(1)  # at once, without waiting for other threads

    heartbeats = HeartbeatSender(lifeline, orphaned)
    channel = Channel(connect=launch.endpoint)
    channel.send(Hello())
    try:
        die_with_parent()  # only now: a parent that dies earlier leaves the directory to `orphaned`
        engine, text, summary = build(launch.options, heartbeats.enter)
        reports_cache = launch.placement is not None and launch.placement.reports_cache
        EngineServer(engine, channel, heartbeats, text, summary, ServedQuery, reports_cache=reports_cache).serve()
    except Exception as error:
        logging.getLogger("octavo").debug("the engine process ends", exc_info=True)
        channel.send(EngineFailed(type(error).__name__, str(error) or type(error).__name__))
        channel.close(linger_s=1.0)
        return 1
    channel.close(linger_s=1.0)
    return 0


def _take_place(placement: Placement) -> None:
    """Keep to this engine's part of the machine. Call it before torch is imported, which counts the processors."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, placement.cpus)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if gpus is None else gpus.split(",")
    first, last = placement.gpu, placement.gpu + placement.num_gpus
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, last)))
    elif visible != [""]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first:last])
    limit_free_memory(placement.host_bytes)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; on Linux only, and not if the parent is dead already.

    Otherwise only the lifeline is watched. To the kernel, the parent is the thread that started this process: that of
    an event loop, which outlives the engine.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(build: Build = build) -> None:
    """Run `main` and exit at once: device threads and their clean-up at exit cannot delay it. Never returns."""
    code = main(int(sys.argv[-1]), build)
    logs.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
