"""When a column of the output buffers counts as written."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.row_state import NOTHING_SAMPLED
from octavo.runner.output_buffers import ColumnWritten, OutputBuffers, StepOutput
from octavo.runner.platform import CpuPlatform


class ManualEvent:
    """A CUDA event that the test completes."""

    def __init__(self) -> None:
        self.reached = False
        self.error: RuntimeError | None = None

    def record(self) -> None:
        self.reached = False

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.reached

    def synchronize(self) -> None:
        raise NotImplementedError


def unwritten_column(num: int) -> tuple[OutputBuffers, StepOutput, ManualEvent]:
    """A column with `num` samples, not yet written."""
    buffers = OutputBuffers(3, 8, CpuPlatform())
    events = [ManualEvent() for _ in buffers._events]
    buffers._events = list(events)
    buffers.tokens.fill_(5)  # tokens of earlier plans
    output = buffers.new_output(num)
    first = buffers.first_column
    buffers.record_column_of(output, list(range(num)), lambda: None)
    return buffers, output, events[first]


def test_a_column_is_ready_when_all_its_tokens_are_written() -> None:
    buffers, output, event = unwritten_column(4)
    column = buffers.tokens[buffers._turn * buffers.num_columns]
    for i, token in enumerate((0, 7, NOTHING_SAMPLED, 9)):
        assert output.num_ready == 0
        column[i] = token
    assert output.num_ready == 1 and not event.reached
    output.events[0].synchronize()
    assert output.read(0, 1).tokens == [[0], [7], [], [9]]
    assert column[4:].tolist() == [5] * 4  # the rest of the column is unchanged


def test_an_error_later_in_the_graph_is_raised() -> None:
    _, output, event = unwritten_column(2)
    event.error = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        output.events[0].synchronize()


def test_a_column_is_ready_at_the_end_of_its_graph() -> None:
    """Even if some of its entries are never written."""
    event = ManualEvent()
    written = ColumnWritten(np.full(3, -99, dtype=np.int32), event)
    assert not written.query()
    event.reached = True
    assert written.query()
    written.synchronize()
