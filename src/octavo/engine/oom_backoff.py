"""Backoff of the step size after a step ran out of device memory."""

from __future__ import annotations

from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepPlan
from octavo.core.scheduler import Scheduler

INITIAL_PATIENCE = 32
"""Successful steps before the step limit doubles again."""
MAX_PATIENCE = 1 << 16


class OOMBackoff:
    """Halves the scheduler's step limit after each out-of-memory step, and doubles it again after successful ones.

    Another process usually holds the missing memory and may free it, so larger steps are tried again. A failed try
    costs every request in flight a recompute. Therefore patience doubles with each failed try, until steps have their
    full size again; recomputation finishes in between.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._patience = INITIAL_PATIENCE
        self._num_successes = 0  # under the current limit
        self._has_grown = False  # the limit has doubled since the last failure

    def smaller_limit(self, step: InFlightStep) -> int:
        """The step limit after this step ran out of memory; 0 if the step cannot be smaller: it had one request, with
        one position per sequence."""
        size = first_pass_size(step.plan)
        if size <= len(step.sequences) and len({seq.request for seq in step.sequences}) <= 1:
            return 0
        if self._has_grown:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._num_successes, self._has_grown = 0, False
        return max(1, min(self._scheduler.max_num_scheduled_tokens, size) // 2)

    def record_success(self) -> None:
        scheduler = self._scheduler
        if scheduler.max_num_scheduled_tokens < scheduler.max_num_batched_tokens:
            self._num_successes += 1
            if self._num_successes >= self._patience:
                self._num_successes, self._has_grown = 0, True
                scheduler.limit_steps(min(2 * scheduler.max_num_scheduled_tokens, scheduler.max_num_batched_tokens))
                if scheduler.max_num_scheduled_tokens == scheduler.max_num_batched_tokens:
                    self.reset()

    def reset(self) -> None:
        """Return to full steps: the request that needed too much has ended, or the memory is free again."""
        self._num_successes, self._patience, self._has_grown = 0, INITIAL_PATIENCE, False
        self._scheduler.limit_steps(self._scheduler.max_num_batched_tokens)


def first_pass_size(plan: StepPlan) -> int:
    """Positions in the first pass of a step, the largest; a decode window computes its other tokens in later passes."""
    return plan.num_tokens - sum(num - 1 for num in plan.num_sampled if num > 1)
