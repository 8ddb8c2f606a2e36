"""An engine process on the oracle: it checks all of memory at every step, starts at once, and fails on demand.

    python tests/proof/oracle_engine.py '{"step_s": 0.01, "die_at": 7}' FD

step_s      duration of each step
slow_at     [step, seconds]: a slow step; busy_at: one that also holds the GIL
raise_in    [hook, number]: a part of the loop (`HOOKS`) raises a bug after that many successful calls
die_at      the step in which the process is killed; stop_at: in which it is stopped (SIGSTOP)
hold        a file: the second step ends only when the file is gone; first steps may be slow
poison      a token that kills the process when a prompt with it is computed
no_answer   queries that fail
fail_in     a phase of the start that raises; die_in: in which the process is killed
needs       a path: no engine starts without it
device      on which it says that it runs
once        a file: the faults happen only if it exists; the process removes it, one of several that start at once
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from octavo.config import KVEventsConfig
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.scheduler import Scheduler
from octavo.engine import query
from octavo.engine.engine import Engine
from octavo.engine.kv_events import KVEventPublisher
from octavo.engine.process.server import EngineServer
from octavo.errors import MemoryBudgetError
from octavo.frontend import engine_main as engine_process
from tests.proof.oracle import Oracle

HOOKS = (
    "scheduler.schedule",
    "scheduler.update",
    "oracle.submit",
    "oracle.finish",
    "engine.step",
    "server._report",
    "server._read_commands",
)
PHASES = ("loading the model", "warming up")
HELD_STEP = 1


class FaultyOracle(Oracle):
    def __init__(self, scheduler: Scheduler, faults: dict[str, Any]) -> None:
        super().__init__(scheduler)
        self.faults = faults

    def submit(self, plan: StepPlan) -> Any:
        faults, step = self.faults, plan.step
        slow_at, slow_s = faults.get("slow_at", (-1, 0))
        time.sleep(slow_s if step == slow_at else faults.get("step_s", 0))
        busy_at, busy_s = faults.get("busy_at", (-1, 0))
        begin = time.monotonic()
        while step == busy_at and time.monotonic() - begin < busy_s:
            sys.setswitchinterval(60)
            sum(range(10**6))
        while step == HELD_STEP and os.path.exists(faults.get("hold", "")):
            time.sleep(0.01)
        if step == faults.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == faults.get("stop_at"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if any(faults.get("poison") in tokens for tokens in plan.host_tokens.values()):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().submit(plan)


def trap(parts: dict[str, Any], hook: str, number: int) -> None:
    """Makes one call of a hook raise."""
    part, _, name = hook.partition(".")
    inner, calls = getattr(parts[part], name), itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError(f"a bug in {hook}")
        return inner(*args, **options)

    setattr(parts[part], name, call)


def has_no_answer(question: query.Query[Any], engine: Engine) -> Any:
    raise RuntimeError("a bug in /home/octavo/inspect.py")


def build(options: dict[str, Any], enter: Callable[[str], None]) -> tuple[Engine, None, dict[str, Any]]:
    faults = json.loads(sys.argv[1])
    once = faults.get("once")
    if once is not None:
        try:
            os.remove(once)
        except FileNotFoundError:
            faults = {"step_s": faults.get("step_s", 0)}
    Path(faults.get("needs", "/")).stat()
    for phase in PHASES:
        enter(phase)
        if phase == faults.get("fail_in"):
            raise MemoryBudgetError("the weights do not fit; use a smaller model")
        if phase == faults.get("die_in"):
            os.kill(os.getpid(), signal.SIGKILL)
    for name in faults.get("no_answer", ()):
        getattr(query, name).answer = has_no_answer
    cache = KVCacheManager(options["num_gpu_blocks_override"], options["block_size"], num_rows=options["max_num_seqs"])
    scheduler = Scheduler(cache)
    engine = Engine(scheduler, FaultyOracle(scheduler, faults), vocab_size=97, max_model_len=256)
    hook, number = faults.get("raise_in", ("", 0))
    if hook:
        trap(
            {"server": EngineServer, "engine": engine, "scheduler": engine.scheduler, "oracle": engine.executor},
            hook,
            number,
        )
    if options["kv_events_config"]:
        engine.on_close.append(KVEventPublisher(cache, KVEventsConfig(**options["kv_events_config"])).close)
    return engine, None, {"device": faults.get("device", "cpu"), "block_size": options["block_size"]}


if __name__ == "__main__":
    engine_process.run(build)
