"""Mutants: bugs to plant in the runner. `scripts/mutants.py` checks that tests/runner notices each, within a time limit."""

# One line per mutant, to be read as a table.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from tests.proof.planting import Mutant

RUNNER_MUTANTS = [
    # -- captures --------------------------------------------------------------------------------------------------------
    Mutant("rows are live while a pass is captured", "Passes._harmless", "self.inputs.ends.zero_()"),
    Mutant("a capture keeps the last bitmask", "Passes._harmless", "self.pipeline.bitmask.clear()"),
    Mutant("a captured sampling finds the lines of the last pass", "Passes._harmless", "self.run(PassShape(shape.size, 'logits'))"),
    Mutant("a pass is queued before its sampling is captured", "DeviceColumns.queue", "self._passes.prepare(...); self._lines = ...", "self._lines = self._passes.logits(p); self._passes.prepare(p, self._variant, parts)"),
    Mutant("a graph gets the inputs of its capture", "Passes.run", "if packed is not None: ..."),
    Mutant("all passes take the largest graph", "Passes.shape", "sizes[bisect_left(sizes, num_slices)]", "sizes[-1]"),
    # -- columns ---------------------------------------------------------------------------------------------------------
    Mutant("a column that is sampled with the next pass is not counted", "Step.advance", "self._num_left -= 1"),
    Mutant("a column and the next pass are two launches", "DeviceColumns.sample_and_queue", "not self._passes.graphs.whole_passes", "True"),
    Mutant("a chunk without samples is not computed", "Pass.has_work", "bool(self.slices) or ...", "bool(self.slices)"),
    Mutant("only the last of several passes commits its tokens", "HostColumns.sample", "continued.append(tokens)", "continued[:] = [tokens]"),
    Mutant("the host does not read which rows are done", "HostColumns.__init__", "host.refresh_done(plan)", "pass"),
    # -- sampling and commits --------------------------------------------------------------------------------------------
    Mutant("a bitmask replaces penalties", "Pipeline.sample", "if shape.logits_processors: ...\nelse: ...", "if shape.logits_processors and not masked: ...\nelse: ..."),
    Mutant("samples before a fork are counted", "Pipeline.sample", "(lines.indices < 0) & ...", "..."),
    Mutant("a row with a new token stays done", "DeviceState.apply", "rows.done.index_fill_(0, token_rows, False)"),
    # -- outputs ---------------------------------------------------------------------------------------------------------
    Mutant("a plan overwrites unread output", "OutputBuffers.new_output", "output.detach()", "pass"),
    Mutant("a step at its end keeps its tensors", "Executor._end", "handle.step = None"),
]
