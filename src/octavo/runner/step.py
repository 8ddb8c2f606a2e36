"""A step on its way through the device, column by column."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from octavo.core.plan import StepPlan
from octavo.engine.executor import GrammarBitmask
from octavo.runner.decode_lines import DecodeLines
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.passes.pass_shape import Column, Pass


class ColumnSampler(Protocol):
    """How the columns of a plan are sampled: `sampling.device_columns`, `sampling.host_columns`.

    Columns come in order. Each is queued and then sampled, with a bitmask; or it is run.
    """

    def queue(self, column: Column) -> None:
        """Queue the first pass of a column, which waits for its bitmask."""

    def sample(self, column: Column, bitmask: GrammarBitmask | None) -> None:
        """Sample a queued column."""

    def sample_and_queue(self, column: Column, bitmask: GrammarBitmask | None) -> None:
        """Sample a queued decode column, and queue the next one of the same slices."""

    def run(self, column: Column, num_columns: int) -> None:
        """Queue and sample so many columns of the same slices, without bitmasks."""


class Step:
    """A plan whose changes to rows and blocks are queued, and what is left of its passes.

    Prefill passes give the first column together. Decode passes give one column each.

    output        its output so far
    num_bitmasks  columns that still wait for a bitmask
    is_queued     all of it is queued
    """

    def __init__(
        self,
        plan: StepPlan,
        ring: OutputBuffers,
        output: StepOutput,
        sampler: ColumnSampler,
        prefills: Column,
        slices: Seq[int],
        lines: DecodeLines | None,
    ) -> None:
        """slices: of the lines of decode passes. lines: chooses them anew for each pass, where the host can"""
        self.output = output
        self.num_bitmasks = plan.num_bitmask_columns
        self.is_queued = False
        self._num_left = plan.most_passes  # columns that are not queued
        self._ring, self._sampler, self._lines = ring, sampler, lines
        self._prefills, self._slices = prefills, slices
        self._is_late = lines is not None and lines.drafts  # bitmasks bring the drafts of their passes
        self._waiting = self._queue_next() if self.num_bitmasks and not self._is_late else None  # for its bitmask

    @torch.inference_mode()
    def advance(self, bitmask: GrammarBitmask | None) -> None:
        """Sample the column that waits for a bitmask, and queue all up to the next one that does."""
        if self._is_late and self.num_bitmasks:
            self._waiting = self._queue_next(bitmask)
        if (column := self._waiting) is not None:
            self.num_bitmasks -= 1
            if self.num_bitmasks and self._keeps_slices:
                self._num_left -= 1
                self._sampler.sample_and_queue(column, bitmask)
                return
            self._sampler.sample(column, bitmask)
            self._finish_pass(column)
            self._waiting = self._queue_next() if self.num_bitmasks and not self._is_late else None
            if self.num_bitmasks:
                return
        while self._num_left:
            num_columns = self._num_left if self._lines is None and not self._prefills else 1
            column = self._next(num_columns)
            self._sampler.run(column, num_columns)
            self._finish_pass(column)
        self._ring.finish(self.output)
        self.is_queued = True

    @property
    def _keeps_slices(self) -> bool:
        """True if the next column is known to have the slices of the one that waits."""
        assert self._waiting is not None
        return self._lines is None and self._waiting[0].size is None

    def _queue_next(self, bitmask: GrammarBitmask | None = None) -> Column:
        column = self._next(1, bitmask)
        self._sampler.queue(column)
        return column

    def _finish_pass(self, column: Column) -> None:
        if self._lines is not None and column[0].size is None:
            self._lines.finish_pass()

    def _next(self, num_columns: int, bitmask: GrammarBitmask | None = None) -> Column:
        self._num_left -= num_columns
        if self._prefills:
            column, self._prefills = self._prefills, []
            return column
        return [Pass(self._slices if self._lines is None else self._lines.next(bitmask))]
