"""The seam. Above it nobody knows what computes: a CPU, a GPU, several, a cost model, or the oracle of the tests.

An executor promises stream order (see `octavo.core.plan`): plan k+1 happens after plan k, and inside a plan table
writes, swaps out, swaps in, copies and slices happen in that order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.core.plan import StepPlan, StepResult

if TYPE_CHECKING:  # clients, too, import what imports this
    import numpy as np


class GrammarBitmask(NamedTuple):
    """Which tokens may come next in slices.

    slices   those that have a mask
    bitmask  [len(slices), num_words] int32, contiguous: token t is bit t % 32 of word t // 32. What is past the
             vocabulary, whole words too, means nothing
    """

    slices: Seq[int]
    bitmask: np.ndarray


class StepHandle(Protocol):
    """A plan that was submitted."""

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        """The columns of tokens that have landed since the last call, before the last of them; waits at most that long
        for one. None when there is nothing of the kind: then either nothing has landed, or all has."""

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        """Pass the bitmask that the next column of the plan's `bitmask_slices` waits for.

        Called once for each of the first `num_bitmask_columns` columns, when all earlier tokens of those slices are in,
        and before the next plan is submitted. Slices without an entry, and all with None, sample from all tokens.
        """

    def result(self) -> StepResult:
        """Wait for the rest: all that `poll` has not given yet.

        Raises `octavo.errors.StepError` when the step failed; then everything submitted after it fails too.
        `StepMemoryError` where it took more memory than there was. `DeviceLostError`, which is neither, where nothing
        can be computed any more: then the engine is dead, and so is its process's use of the device.
        """


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a plan behind those submitted before, and return at once."""

    def close(self) -> None:
        """Give back what the device holds. A second call does nothing."""
