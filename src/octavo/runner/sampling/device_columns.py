"""Sampling of a plan on the device: with or without grammar bitmasks, the host does not wait."""

from __future__ import annotations

from functools import partial

from octavo.engine.executor import GrammarBitmask
from octavo.runner.drafter import PassTimers
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.passes.pass_shape import Column, Part, Pass, PassShape
from octavo.runner.passes.passes import Passes
from octavo.runner.sampling.pipeline import Lines


class DeviceColumns:
    """Samples the columns of a plan on the device. Each column has one pass.

    variant  what the shapes of the plan's passes have in common
    fuses    some decode columns are sampled together with the next pass, in one graph: launched apart, the device would
             wait for the second launch
    timers   measure decode passes
    """

    def __init__(
        self,
        passes: Passes,
        ring: OutputBuffers,
        output: StepOutput,
        variant: PassShape,
        *,
        fuses: bool,
        timers: PassTimers,
    ) -> None:
        self._passes, self._ring, self._output = passes, ring, output
        self._variant, self._fuses, self._timers = variant, fuses, timers
        self._lines: Lines | None = None  # of the column that waits for its bitmask

    def queue(self, column: Column) -> None:
        (p,) = column
        if p.has_work:
            parts: tuple[Part, ...] = ("sample and logits", "sample") if self._fuses and p.size is None else ("sample",)
            self._passes.prepare(p, self._variant, parts)
            self._lines = self._passes.logits(p, self._variant.num_drafts)

    def sample(self, column: Column, bitmask: GrammarBitmask | None) -> None:
        (p,) = column
        drafts = None if self._lines is None else self._lines.drafts
        self._passes.pipeline.bitmask.fill(bitmask, p.slices, None if drafts is None else drafts.depths.numpy())
        if self._lines is not None:
            self._passes.sample(p, self._variant, self._lines)
        self._lines = None
        self._ring.record_column(self._output, p.slices)

    def sample_and_queue(self, column: Column, bitmask: GrammarBitmask | None) -> None:
        if not self._passes.graphs.whole_passes:
            self.sample(column, bitmask)
            self.queue(column)
            return
        (p,) = column
        self._passes.pipeline.bitmask.fill(bitmask, p.slices, None)
        self._ring.record_column_of(self._output, p.slices, partial(self._passes.sample_and_logits, p, self._variant))

    def run(self, column: Column, num_columns: int) -> None:
        (p,) = column
        shape = self._passes.shape(p, "pass", self._variant)
        if isinstance(shape.size, int) and p.has_work:
            self._passes.prepare(p, self._variant, ("pass",))  # a capture is not to be measured
            with self._timers.measure(shape.size, shape.num_drafts, num_columns):
                self._run(p, shape, num_columns)
        else:
            self._run(p, shape, num_columns)

    def _run(self, p: Pass, shape: PassShape, num_columns: int) -> None:
        for _ in range(num_columns):
            if p.has_work:
                self._passes.run(shape, p.packed)
            if p.slices or p.size is None:
                self._ring.record_column(self._output, p.slices)
