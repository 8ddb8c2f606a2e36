"""The engine process: `python -m octavo.frontend.engine_main FD`. Only `engine.process.supervisor` starts it.

FD is a lifeline (see `engine.process.ipc`) that carries the launch arguments. The process ends with its parent.
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
from octavo.engine.process.ipc import Channel, EngineFailed, Hello, Launch, Lifeline
from octavo.engine.process.server import EngineServer, HeartbeatSender, Text
from octavo.view.live import publisher

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

PR_SET_PDEATHSIG = 1

Build = Callable[[dict[str, Any], Callable[[str], None]], "tuple[Engine, Text | None, dict[str, Any]]"]
"""From options, and a function to be told of each phase, to an engine, its text side, and a summary for people."""


def build(options: dict[str, Any], enter: Callable[[str], None]) -> tuple[Engine, Text | None, dict[str, Any]]:
    enter("importing torch")
    from octavo.config import EngineArgs
    from octavo.frontend.build import build
    from octavo.frontend.input_processor import InputProcessor

    enter("loading the model")
    built = build(EngineArgs(**options))
    config = built.config
    names = ("device", "dtype", "max_model_len", "num_blocks", "num_host_blocks", "kv_bytes", "weight_bytes")
    summary = {name: getattr(config, name) for name in names} | {"block_size": config.args.block_size}
    return built.engine, InputProcessor(built.tokenizer, built.engine.vocab_size), summary


def main(fd: int, build: Build = build) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which lets its requests come to an end
        signal.signal(number, signal.SIG_IGN)
    lifeline = Lifeline.inherited(fd)
    os.set_inheritable(fd, False)
    told = lifeline.receive()
    if not told:
        return 1  # the parent has gone, and said nothing
    launch = msgspec.msgpack.decode(told, type=Launch)
    if launch.logs is not None:
        logs.set_up(launch.logs)
    directory = os.path.dirname(launch.endpoint.removeprefix("ipc://"))

    def orphaned() -> None:
        shutil.rmtree(directory, ignore_errors=True)  # if the parent has not come to it
        os._exit(1)  # whatever the other threads do: nobody waits for it any more

    pulse = HeartbeatSender(lifeline, orphaned)
    channel = Channel(connect=launch.endpoint)
    channel.send(Hello())
    try:
        _die_with_parent()  # not before there is nothing left to tidy up
        engine, text, summary = build(launch.options, pulse.enter)
        EngineServer(engine, channel, pulse, text, summary, publisher.view_rpc_methods()).serve()
    except Exception as error:
        logging.getLogger("octavo").debug("the engine process ends", exc_info=True)
        channel.send(EngineFailed(type(error).__name__, str(error) or type(error).__name__))
        channel.close(linger_s=1.0)
        return 1
    channel.close(linger_s=1.0)
    return 0


def _die_with_parent() -> None:
    """On Linux; elsewhere, and if the parent is dead already, the lifeline alone is watched. The kernel means by parent
    the thread that started this process: it is that of an event loop, and outlives the engine."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(build: Build = build) -> None:
    """Never returns: neither threads of a device nor their clean-up at exit hold up the end of the process."""
    code = main(int(sys.argv[-1]), build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
