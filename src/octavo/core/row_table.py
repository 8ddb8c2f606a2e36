"""Rows of the device's block tables, assigned to running sequences.

A row's table only grows while one sequence holds the row, and the device mirrors it from `TableWrite`s alone: host cost
is proportional to the change, never to the context length. A newly assigned row starts with a write of its whole table
and with a `RowSetup` for sampling.
"""

from __future__ import annotations

from octavo.core.events import EventStream, TableChanged
from octavo.core.plan import RowSetup, StepPlan, TableWrite
from octavo.core.request import Sequence
from octavo.core.types import BlockId, Row


class RowTable:
    """The free list of `num_rows` rows. Each has `num_lines` lines: a table for each group, and two for its state. The
    first of the two has the blocks that the next slice writes, the second those that it reads.

    A row may be assigned again as soon as it is released, even while a step in flight still uses it: stream order keeps
    the two apart.
    """

    __slots__ = ("_free", "events", "num_lines", "num_rows")

    def __init__(self, num_rows: int, events: EventStream, num_lines: int = 1) -> None:
        self.num_rows = num_rows
        self.num_lines = num_lines
        self.events = events
        self._free: list[Row] = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence, plan: StepPlan, reads: list[BlockId]) -> None:
        """Assign a row to a sequence without one, and plan its setup and its whole table. reads: where its state is."""
        request = sequence.request
        sequence.row = row = self._free.pop()
        sequence.row_has_last = False
        params = request.sampling_params
        history = sequence.token_ids[:] if params.needs_history or request.num_draft_tokens else None
        num_prompt = len(request.prompt_token_ids)
        plan.row_setups.append(
            RowSetup(
                row,
                params,
                request.seed,
                sequence.index,
                request.stop_ids,
                num_prompt,
                history,
                returns_candidates=request.select_beams is not None,
                salt=request.salt if request.num_draft_tokens else b"",
            )
        )
        for group, (block_ids, _) in enumerate(sequence.holdings):
            self.write(sequence, 0, block_ids, plan, group)
        if reads:  # no event: it is no table of the sequence's
            plan.table_writes.append(TableWrite((row + 1) * self.num_lines - 1, 0, tuple(reads)))

    def write(self, sequence: Sequence, start: int, block_ids: list[BlockId], plan: StepPlan, group: int = 0) -> None:
        """Plan the write of a table change to the device. Does nothing for a sequence without a row."""
        if sequence.row < 0:
            return
        write = TableWrite(sequence.row * self.num_lines + group, start, tuple(block_ids))
        plan.table_writes.append(write)
        if self.events.blocks:
            name, index = sequence.request.request_id, sequence.index
            self.events.emit_block(TableChanged(name, index, sequence.row, start, write.block_ids, group))

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row, if it has one."""
        if sequence.row >= 0:
            self._free.append(sequence.row)
            sequence.row = -1
            sequence.row_has_last = False

    def snapshot(self) -> list[Row]:
        return self._free[:]

    def restore(self, free: list[Row]) -> None:
        self._free = list(free)
