"""Totals of what an engine did, read off its event stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from octavo.core import events as ev


@dataclass(slots=True)
class EngineStats:
    """Subscribe it: `scheduler.events.subscribe(stats)`. Peaks are since the start or the last `reset_peaks`."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_failed_steps: int = 0
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
        elif isinstance(event, ev.Finished):
            self.num_finished += 1
            self.num_generation_tokens += event.num_tokens
        elif isinstance(event, ev.Arrived):
            self.num_prompt_tokens += event.num_prompt_tokens

    def reset_peaks(self) -> None:
        self.peak_running = self.peak_used_blocks = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
