"""A tensor parallel rank other than 0: `python -m octavo.frontend.ranks.rank_main FD`. Only `RankGroup` starts it.

FD is the lifeline, over which the engine's options arrive. The process ends with rank 0, the engine.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from octavo import log_setup as logs
from octavo.config import EngineArgs
from octavo.engine.process.ipc import Lifeline
from octavo.frontend.engine_main import die_with_parent
from octavo.utils.signals import ignore_signals


def main(fd: int) -> NoReturn:
    """Follow rank 0 until it ends, then exit."""
    ignore_signals()
    die_with_parent()
    os.set_inheritable(fd, False)
    import torch

    from octavo.frontend.build import build_rank
    from octavo.runner.ranks.rank_group import RankMember
    from octavo.runner.ranks.ranked_executor import follow

    member = RankMember(Lifeline.inherited(fd), on_end=lambda: os._exit(1))  # at once: others wait for nothing here
    launch = member.launch
    if launch.logs is not None:
        logs.set_up(launch.logs)
    logging.getLogger("octavo").setLevel(logging.ERROR)  # rank 0 says the rest
    try:
        args = EngineArgs(**launch.options)
        if args.device != "cpu" and member.rank < torch.cuda.device_count():
            torch.cuda.set_device(member.rank)
        executor = build_rank(args, member)
        with torch.inference_mode():
            follow(executor, member.reader, member.board)
        executor.runner.platform.synchronize()  # rank 0's device may wait for the last sums
        member.end()
        code = 0
    except Exception as error:
        logging.getLogger("octavo").debug("rank %d ends", member.rank, exc_info=True)
        member.fail(error)
        code = 1
    logs.flush()
    sys.stderr.flush()
    os._exit(code)  # while the executor lives: no clean-up of the device, of NCCL or of threads can delay it


def run() -> NoReturn:
    main(int(sys.argv[-1]))


if __name__ == "__main__":
    run()
