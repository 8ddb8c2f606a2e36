"""Statistics of an engine: counters from its event stream, gauges, and health."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal

from octavo.core import events as ev
from octavo.core.cache.kv_stats import KVStats
from octavo.engine.executor import RankPlace


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; subscribe it with `scheduler.events.subscribe(stats)`.

    num_drafted_passes         forward passes of a sequence with drafts: vLLM's `spec_decode_num_drafts`
    num_draft_tokens           drafts of these passes, of which `num_accepted_tokens` were right
    num_accepted_per_position  how often a pass's first draft was right, how often its second one, ...; empty without
                               speculation
    """

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
    num_drafted_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

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

    def record_drafts(self, passes: Sequence[tuple[int, int]]) -> None:
        """Count the drafts of passes: see `StepResult.drafts`. Wrong ones are computed and give no token."""
        for num_drafts, num_right in passes:
            self.num_drafted_passes += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_right
            self.num_tokens_computed += num_drafts - num_right
            for position in range(num_right):
                self.num_accepted_per_position[position] += 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def plus(self, later: EngineStats) -> EngineStats:
        """Combine with the counters of a later engine: totals add up, peaks take the maximum."""
        both: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            combine: Callable[..., Any] = max if name.startswith("peak_") else _add
            both[name] = combine(getattr(self, name), getattr(later, name))
        return EngineStats(**both)


def _add(a: Any, b: Any) -> Any:
    """The sum of two counters, or of two lists of counters by position."""
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)] if isinstance(a, list) else a + b


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
    ranks            where its tensor parallel ranks are, by number; empty for one
    """

    state: Literal["starting", "running", "restarting", "failed"]
    since_s: float
    last_step_age_s: float | None = None
    num_restarts: int = 0
    reason: str = ""
    ranks: tuple[RankPlace, ...] = ()


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
