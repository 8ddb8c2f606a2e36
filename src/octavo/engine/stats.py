"""What an engine did and does, in numbers: totals read off its event stream, and how it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from octavo.core import events as ev
from octavo.core.kv_cache_manager import KVStats

if TYPE_CHECKING:
    from octavo.engine.engine import Engine


@dataclass(slots=True)
class EngineStats:
    """Subscribe it: `scheduler.events.subscribe(stats)`. Peaks are since the start. `num_bad_messages`: between the
    engine's process and its client, in either direction, that could not be used."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_failed_steps: int = 0
    num_bad_messages: int = 0
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
        """The totals of two engines, one after the other; of peaks the higher."""
        both: dict[str, int] = {}
        for name in (f.name for f in fields(self)):
            unite: Callable[..., int] = max if name.startswith("peak_") else int.__add__
            both[name] = unite(getattr(self, name), getattr(later, name))
        return EngineStats(**both)


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """What an engine did and how full it is, between two steps.

    engine   totals, over all restarts
    kv       the KV cache; its counters begin again with each restart
    waits    reason (`core.events.Waiting`) -> how often a request came to wait for it
    """

    engine: EngineStats
    kv: KVStats | None
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    waits: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine) -> StatsSnapshot:
        scheduler = engine.scheduler
        return cls(
            engine.stats,
            scheduler.stats(),
            len(scheduler.running),
            len(scheduler.waiting),
            len(scheduler.swapped),
            dict(engine.timelines.waits),
        )


@dataclass(frozen=True, slots=True)
class Health:
    """How an engine is.

    state            starting, until it can take its first request; running; restarting, after it died or hung; failed,
                     when it is gone for good
    since_s          how long it has been in that state
    last_step_age_s  since it last got on with its work; None while there is none
    num_restarts     so far
    reason           why it is not running, or was last restarted, in one line
    """

    state: Literal["starting", "running", "restarting", "failed"]
    since_s: float
    last_step_age_s: float | None = None
    num_restarts: int = 0
    reason: str = ""
