"""When a column of the ring counts as landed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels.row_state import NOTHING_SAMPLED
from octavo.runner.output_buffers import ColumnWritten, OutputBuffers, StepOutput


class DeviceEvent:
    """An event that is reached when somebody says so."""

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


def record_column_of(num: int) -> tuple[OutputBuffers, StepOutput, DeviceEvent]:
    """A column of so many draws, which nobody has filled yet."""
    ring = OutputBuffers(3, 8, torch.device("cpu"))
    points = [DeviceEvent() for _ in ring._events]
    ring._events = list(points)
    ring.tokens.fill_(5)  # of earlier plans
    first = ring.next_half()
    output = ring.new_output(num)
    ring.record_column_of(output, list(range(num)), lambda: None)
    return ring, output, points[first]


def test_a_column_is_seen_when_all_of_it_is_there() -> None:
    ring, output, point = record_column_of(4)
    column = ring.tokens[ring._turn * ring.num_columns]
    for i, token in enumerate((0, 7, NOTHING_SAMPLED, 9)):
        assert output.num_ready == 0
        column[i] = token
    assert output.num_ready == 1 and not point.reached
    output.events[0].synchronize()
    assert output.read(0, 1).tokens == [[0], [7], [], [9]]
    assert column[4:].tolist() == [5] * 4  # what is behind it is nobody's


def test_what_goes_on_behind_a_column_may_break() -> None:
    _, output, point = record_column_of(2)
    point.error = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        output.events[0].synchronize()


def test_whoever_has_come_to_the_end_has_filled_it() -> None:
    """Should a column hold what nobody writes."""
    point = DeviceEvent()
    seen = ColumnWritten(np.full(3, -99, dtype=np.int32), point)
    assert not seen.query()
    point.reached = True
    assert seen.query()
    seen.synchronize()
