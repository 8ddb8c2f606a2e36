"""How large steps may be, once one has taken more memory than the device had."""

from __future__ import annotations

from octavo.core.plan import StepPlan
from octavo.core.scheduler import Scheduler

FIRST_PATIENCE = 32
"""Steps that must go well before they are allowed to be twice as large again."""
MOST_PATIENCE = 1 << 16


class OOMBackoff:
    """Halves what a step computes each time that one was too large, and lets it grow again while none is.

    Whoever took the memory (another process, as a rule) may give it back; so one tries. A try that fails costs
    everybody in flight a recompute: after each such failure one waits for twice as long, until steps have their full
    size again, so that whatever is recomputed gets done in between.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._patience = FIRST_PATIENCE
        self._calm = 0  # steps that went well under this limit
        self._tried = False  # it is a larger one than that after the last failure

    def below(self, plan: StepPlan) -> int:
        """The limit after this step was too large; 0 when no smaller one is possible: one request was alone in it, with
        one position a sequence."""
        size = pass_size(plan)
        if size <= len(plan.rows) and len({seq.request for seq in plan.sequences}) <= 1:
            return 0
        if self._tried:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._calm, self._tried = 0, False
        return max(1, min(self._scheduler.max_num_scheduled_tokens, size) // 2)

    def went_well(self) -> None:
        scheduler = self._scheduler
        if scheduler.max_num_scheduled_tokens < scheduler.max_num_batched_tokens:
            self._calm += 1
            if self._calm >= self._patience:
                self._calm, self._tried = 0, True
                scheduler.max_num_scheduled_tokens = min(
                    2 * scheduler.max_num_scheduled_tokens, scheduler.max_num_batched_tokens
                )
                if scheduler.max_num_scheduled_tokens == scheduler.max_num_batched_tokens:
                    self.lift()

    def lift(self) -> None:
        """Who needed too much is gone, or the memory is back."""
        self._calm, self._patience, self._tried = 0, FIRST_PATIENCE, False
        self._scheduler.max_num_scheduled_tokens = self._scheduler.max_num_batched_tokens


def pass_size(plan: StepPlan) -> int:
    """Positions of a step's largest pass, the first: what a window decodes after its first token comes later."""
    return plan.num_tokens - sum(num - 1 for num in plan.num_sampled if num > 1)
