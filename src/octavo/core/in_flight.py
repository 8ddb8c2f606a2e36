"""The scheduler's side of a step: what it needs to commit the step's result, and to undo the step if it fails.

The executor gets the plan alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Set
from collections.abc import Sequence as Seq

from octavo.core.plan import Drafts, StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.core.snapshot import Roster, State
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
    num_outstanding    tokens that each slice returns at most from now on. None: `plan.num_sampled`, as no part arrived
    num_lost           positions of drafting slices that the plan counts and that gave no token, once its result is in
    num_accepted       drafts that were right, as far as results are in
    """

    __slots__ = (
        "num_accepted",
        "num_lost",
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
        self.num_lost = self.num_accepted = 0

    def __bool__(self) -> bool:
        return bool(self.plan)

    def snapshot(self, roster: Roster) -> State:
        """What the step's result needs. For the host, the plan's work on memory is done."""
        plan = self.plan
        return {
            "step": plan.step,
            "rows": plan.rows.tolist(),
            "starts": plan.starts.tolist(),
            "counts": plan.counts.tolist(),
            "samples": plan.num_sampled.tolist(),
            "draws": list(plan.num_samples.items()),
            "drafts": [(i, *drafts) for i, drafts in plan.drafts.items()],
            "masked": plan.bitmask_slices[:],
            "host_tokens": list(plan.host_tokens),
            "seal_mark": self.seal_mark,
            "outstanding": None if self.num_outstanding is None else self.num_outstanding[:],
            "sequences": roster.indices(self.sequences),
            "swapped": roster.indices(self.swapped_requests),
            "returning": [(block, roster.index(request)) for block, request in self.swap_in_requests.items()],
            "void": sorted(self.void_slices),
        }

    @classmethod
    def restored(cls, state: State, roster: Roster) -> InFlightStep:
        """A step in flight of a snapshot, without its input tokens and its memory operations."""
        plan = StepPlan(state["step"])
        plan.set_slices(state["rows"], state["starts"], state["counts"], state["samples"])
        plan.num_samples, plan.bitmask_slices = dict(state["draws"]), list(state["masked"])
        plan.drafts = {i: Drafts(*numbers) for i, *numbers in state.get("drafts", ())}  # older recordings have none
        plan.host_tokens = {i: array("i") for i in state["host_tokens"]}
        step = cls(plan, state["seal_mark"])
        step.num_outstanding = None if state["outstanding"] is None else list(state["outstanding"])
        step.sequences = roster.sequences_at(state["sequences"])
        step.swapped_requests = roster.requests_at(state["swapped"])
        step.swap_in_requests = {block: roster.requests[i] for block, i in state["returning"]}
        step.void_slices = frozenset(state["void"])
        return step

    @property
    def outstanding(self) -> Seq[int]:
        """Tokens that each slice returns at most from now on."""
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
                seq.num_pending -= left[i]
                seq.num_unverified -= self.plan.num_unverified(i)
                self.void_slices |= {i}

    def settle_drafts(self) -> None:
        """End the time in which the positions of the step's drafts are unverified: its whole result is in."""
        for i in self.plan.drafts:
            if i not in self.void_slices:
                self.sequences[i].num_unverified -= self.plan.num_unverified(i)
