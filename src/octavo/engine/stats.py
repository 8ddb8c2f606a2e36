"""Statistics of an engine: counters from its event stream, gauges, and health."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from octavo.core import events as ev
from octavo.core.cache.kv_stats import KVStats


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; subscribe it with `scheduler.events.subscribe(stats)`."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_failed_steps: int = 0
    num_corrupt_blocks: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    peak_running: int = 0
    peak_used_blocks: int = 0

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self.num_steps += 1
            self.num_tokens_computed += event.num_tokens
            self.peak_running = max(self.peak_running, event.num_running)
            self.peak_used_blocks = max(self.peak_used_blocks, event.used)
        elif isinstance(event, ev.Preempted):
            self.num_preemptions += 1
            self.num_swap_preemptions += event.how == "swap"
        elif isinstance(event, ev.Corrupt):
            self.num_corrupt_blocks += event.num_blocks
        elif isinstance(event, ev.Finished):
            self.num_finished += 1
            self.num_generation_tokens += event.num_tokens
        elif isinstance(event, ev.Arrived):
            self.num_prompt_tokens += event.num_prompt_tokens

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def plus(self, later: EngineStats) -> EngineStats:
        """Combine with the counters of a later engine: totals add up, peaks take the maximum."""
        both: dict[str, int] = {}
        for name in (f.name for f in fields(self)):
            combine: Callable[..., int] = max if name.startswith("peak_") else int.__add__
            both[name] = combine(getattr(self, name), getattr(later, name))
        return EngineStats(**both)


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """Counters and gauges of an engine between two steps.

    engine       counters, summed over restarts
    kv           the KV cache; its counters restart with the engine
    num_waiting  waiting requests; num_deferred of them wait for an engine, whether or not there is room for them
    wait_counts  wait reason (`core.events.Waiting`) -> how often a request started to wait for it
    """

    engine: EngineStats
    kv: KVStats | None
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    wait_counts: dict[str, int] = field(default_factory=dict)
    num_deferred: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Health of an engine.

    state            "starting" until the first request can be accepted; "running"; "restarting" after a crash or hang;
                     "failed" when there will be no further restart
    since_s          seconds in that state
    last_step_age_s  seconds since the engine last made progress; None while it has no work
    num_restarts     restarts so far
    reason           why it is not running, or was last restarted, in one line
    """

    state: Literal["starting", "running", "restarting", "failed"]
    since_s: float
    last_step_age_s: float | None = None
    num_restarts: int = 0
    reason: str = ""


def sum_kv_stats(parts: Sequence[KVStats]) -> KVStats:
    """The caches of all replicas as one."""
    total = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(KVStats)}
    num_hits, num_lookups = total["num_hits"], total["num_hits"] + total["num_misses"]
    rates = {"block_size": parts[0].block_size, "hit_rate": num_hits / num_lookups if num_lookups else 0.0}
    return KVStats(**(total | rates))


def sum_stats(parts: Sequence[StatsSnapshot]) -> StatsSnapshot:
    """The snapshots of several engines as one."""
    engine, waits = EngineStats(), dict[str, int]()
    for part in parts:
        engine = engine.plus(part.engine)
        for reason, count in part.wait_counts.items():
            waits[reason] = waits.get(reason, 0) + count
    caches = [part.kv for part in parts if part.kv is not None]
    gauges = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("num_running", "num_waiting", "num_swapped", "num_deferred")
    }
    return StatsSnapshot(engine, sum_kv_stats(caches) if caches else None, wait_counts=waits, **gauges)
