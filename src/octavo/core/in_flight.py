"""The scheduler's side of a step: what it needs to commit the step's result, and to undo the step if it fails.

The executor gets the plan alone.
"""

from __future__ import annotations

from collections.abc import Container, Set
from collections.abc import Sequence as Seq

from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.core.types import HostBlockId, SealId

NO_SLICES: frozenset[int] = frozenset()


class InFlightStep:
    """A planned step without a whole result yet. False if its plan is empty.

    plan               the step's plan, for the executor
    sequences          the slice's sequence: results go to it, never to the row's present owner
    swapped_requests   requests that the plan swaps out or in
    swap_in_requests   host block of `plan.swap_ins` -> its request
    void_slices        slices whose results are dropped, because they were computed from corrupt blocks
    seal_mark          seal ids above it were issued by this plan or later; a failed step removes them
    num_outstanding    tokens that each slice still returns. None: `plan.num_sampled`, no part has arrived yet
    """

    __slots__ = (
        "num_outstanding",
        "plan",
        "seal_mark",
        "sequences",
        "swap_in_requests",
        "swapped_requests",
        "void_slices",
    )

    def __init__(self, plan: StepPlan, seal_mark: SealId = 0) -> None:
        self.plan = plan
        self.seal_mark = seal_mark
        self.sequences: list[Sequence] = []
        self.swapped_requests: list[Request] = []
        self.swap_in_requests: dict[HostBlockId, Request] = {}
        self.void_slices: Set[int] = NO_SLICES
        self.num_outstanding: list[int] | None = None

    def __bool__(self) -> bool:
        return bool(self.plan)

    @property
    def outstanding(self) -> Seq[int]:
        """Tokens that each slice still returns."""
        return self.plan.num_sampled if self.num_outstanding is None else self.num_outstanding

    def count_partial(self, result: StepResult) -> None:
        """Count a part of the step's result as arrived."""
        if self.num_outstanding is None:
            self.num_outstanding = self.plan.num_sampled.tolist()
        for i, tokens in enumerate(result.tokens):
            self.num_outstanding[i] -= min(1, len(tokens)) if i in self.plan.num_samples else len(tokens)

    def drop(self, requests: Container[Request]) -> None:
        """Make the slices of these requests void: no more results are expected of them."""
        left = self.outstanding
        for i, seq in enumerate(self.sequences):
            if seq.request in requests and i not in self.void_slices:
                self.void_slices |= {i}
                seq.num_pending -= left[i]
