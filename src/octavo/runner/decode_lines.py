"""The lines of a plan's decode passes: one for each slice, and one for each of its drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from octavo.core.plan import StepPlan
from octavo.engine.executor import GrammarBitmask, GrammarDrafts
from octavo.kernels.row_state import RowState
from octavo.runner.drafter import Drafter
from octavo.runner.input_buffers import int64

UNLIMITED = 1 << 40
"""More tokens than any sequence has."""


class DecodeSlices(NamedTuple):
    """The slices of a plan that its decode passes compute.

    slices       index in the plan
    rows, ends   [num_slices] int64; a pass computes no position at `ends` or later
    firsts       [num_slices] int64, the first position that samples, if no draft in flight is wrong
    most         [num_slices] int64, tokens that all passes return at most, from where the row is when the plan begins
    limits       [num_slices] int64, drafts of a pass at most
    passes       [num_slices] int64, passes at most
    """

    slices: Seq[int]
    rows: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray
    most: np.ndarray
    limits: np.ndarray
    passes: np.ndarray

    def select(self, keep: np.ndarray) -> DecodeSlices:
        return DecodeSlices([self.slices[i] for i in keep.tolist()], *(column[keep] for column in self[1:]))

    def lines(self, num_drafts: np.ndarray, null_row: int) -> tuple[Seq[int], np.ndarray]:
        """(slice of each line, [3, num_lines]: rows, depths and ends).

        num_drafts  [num_slices], of each slice; padding where its limit is 0
        """
        if not num_drafts.any():
            return self.slices, np.stack((self.rows, num_drafts, self.ends))
        num_lines = num_drafts + 1
        of_line = np.repeat(np.arange(len(self.rows)), num_lines)  # index of the slice
        first = np.cumsum(num_lines) - num_lines
        depths = np.arange(len(of_line)) - first[of_line]
        rows = np.where((depths > 0) & (self.limits[of_line] == 0), null_row, self.rows[of_line])
        return [self.slices[i] for i in of_line.tolist()], np.stack((rows, depths, self.ends[of_line]))


def decode_slices(plan: StepPlan, *, only_windows: bool) -> DecodeSlices:
    """The slices of a plan's decode passes. only_windows: a prefill pass comes first, and samples one token of each"""
    rows, starts, counts, num_sampled = (int64(x) for x in (plan.rows, plan.starts, plan.counts, plan.num_sampled))
    limits, most, passes, ends = np.zeros_like(rows), num_sampled.copy(), num_sampled.copy(), starts + counts
    for i, drafts in plan.drafts.items():
        passes[i], limits[i] = drafts
    if only_windows:  # the host's tokens say where their rows are, and only the prefill pass tells the device
        most[list(plan.host_tokens)] = UNLIMITED
        passes = (passes - 1).clip(0)
    slices = DecodeSlices(range(len(rows)), rows, ends, ends - num_sampled, most, limits, passes)
    return slices.select(np.flatnonzero(passes)) if only_windows else slices


class DecodeLines:
    """Chooses the lines of each pass before it runs, where the host sees the device's memory: rows that are done have
    none, and the drafter decides how many drafts pay off. Elsewhere all lines are queued with the plan, and the device
    skips those without work.

    head        [3, num_lines]: see `InputBuffers`
    drafter     None: it chooses no drafts
    num_drafts  of each slice, without a drafter; see `DecodeSlices.lines`
    """

    def __init__(
        self, slices: DecodeSlices, head: np.ndarray, state: RowState, drafter: Drafter | None, num_drafts: int = 0
    ) -> None:
        self._slices, self._head, self._state, self._drafter = slices, head, state, drafter
        self._each = num_drafts
        self._begin, self._num_lines, self._num_passes = 0.0, 0, 0

    @property
    def drafts(self) -> bool:
        return self._drafter is not None

    def next(self, bitmask: GrammarBitmask | None = None) -> Seq[int]:
        """The slice of each line of the next pass, whose lines are at the front of the head. bitmask: of the pass"""
        slices, state = self._slices, self._state
        if not len(slices.rows):
            return slices.slices
        live = (state.num_computed.numpy()[slices.rows] < slices.ends) & ~state.done.numpy()[slices.rows]
        live &= self._num_passes < slices.passes
        self._num_passes += 1
        is_changed = not live.all()
        if is_changed:
            slices = self._slices = slices.select(np.flatnonzero(live))
        found = slices.slices
        if self._drafter is not None:
            self._begin = time.thread_time()
            grammars: dict[int, GrammarDrafts] = {}
            if bitmask is not None:
                row_of = dict(zip(slices.slices, slices.rows.tolist(), strict=True))
                grammars = {row_of[i]: bitmask.drafts.get(i, GrammarDrafts()) for i in bitmask.slices if i in row_of}
            num_drafts = self._drafter.choose(slices.rows, slices.ends, slices.limits, grammars)
            is_changed = True
        if is_changed or self._each:
            each = np.full_like(slices.rows, self._each) if self._drafter is None else num_drafts
            found, lines = slices.lines(each, state.null_row)
            self._head[:, : len(found)] = lines
        self._num_lines = len(found)
        return found

    def finish_pass(self) -> None:
        """Record the time of the pass whose lines `next` chose."""
        if self._drafter is not None and self._num_lines:
            self._drafter.record_pass(self._num_lines, time.thread_time() - self._begin)
