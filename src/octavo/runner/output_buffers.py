"""Outputs of a plan: the device writes sampled tokens to pinned host memory, and the host reads them meanwhile."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.core.plan import StepResult, TokenLogprobs
from octavo.kernels.row_state import MAX_LOGPROBS, NO_TOKEN_LEFT
from octavo.kernels.row_state import NOT_FINITE as NOT_FINITE_MARK
from octavo.runner.executor import append_columns
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from octavo.runner.streams import CompletedEvent, DeviceEvent, record_event

UNWRITTEN = -99
"""Initial value of a column that is polled: neither a token nor a mark of `kernels.row_state`."""


class ColumnWritten:
    """The event that a column is full, for a column that a CUDA graph fills before its end. Polls the column itself.

    The end of the graph counts too: `query` then raises the errors of its kernels.
    """

    def __init__(self, column: np.ndarray, end: DeviceEvent) -> None:
        self._column = column
        self._end = end

    def query(self) -> bool:
        return bool((self._column != UNWRITTEN).all()) or self._end.query()

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0)  # spin as CUDA's events do, but let other threads run


class StepOutput:
    """Sampled tokens of one plan, copied to pinned host memory as they are produced.

    tokens        [num_columns, width] int32, filled column by column; see `octavo.kernels.row_state` for its marks
    logprobs      [num_columns, width, 2 + 2 * MAX_LOGPROBS] int32, likewise; see `reference.write_logprobs`
    num_logprobs  slice -> number of its top log-probabilities; absent for slices without log-probabilities
    slice_ids     column -> the slice of each of its entries
    events        column -> the event that it is full. At least one; the last one is the end of the plan
    """

    def __init__(
        self, num_slices: int, tokens: np.ndarray, logprobs: np.ndarray, num_logprobs: Mapping[int, int] | None = None
    ) -> None:
        self.num_slices = num_slices
        self.tokens = tokens
        self.logprobs = logprobs
        self.num_logprobs = num_logprobs or {}
        self.slice_ids: list[Seq[int]] = []
        self.events: list[DeviceEvent] = []
        self.results: list[StepResult] = []  # of a plan that was sampled on the host

    @classmethod
    def from_results(cls, num_slices: int, results: list[StepResult]) -> StepOutput:
        """The output of a plan that was sampled on the host: one result a column."""
        none = np.empty((0, 0), dtype=np.int32)
        output = cls(num_slices, none, none)
        output.results = results
        output.slice_ids = [()] * len(results)
        output.events = [CompletedEvent()] * max(1, len(results))
        return output

    @property
    def num_ready(self) -> int:
        """Columns that are full."""
        count = len(self.events)
        while count and not self.events[count - 1].query():
            count -= 1
        return count

    def detach(self) -> None:
        """Wait for the plan and copy its output, before another plan reuses its buffers and events."""
        for event in self.events[-1:]:
            event.synchronize()
        self.tokens, self.events = self.tokens.copy(), [CompletedEvent()] * len(self.events)
        if self.num_logprobs:
            self.logprobs = self.logprobs.copy()

    def read(self, first: int, last: int) -> StepResult:
        """Columns [first, last), which must be full."""
        if self.results:
            result = self.results[first]
            for column in self.results[first + 1 : last]:
                append_columns(result, column)
            return result
        all_slices, columns, table = range(self.num_slices), self.slice_ids[first:last], self.tokens[first:last]
        logprobs = self._read_logprobs(first, last) if self.num_logprobs else {}
        if all(slice_ids == all_slices for slice_ids in columns):
            tokens = table[:, : self.num_slices].T.tolist()
            if table[:, : self.num_slices].min(initial=0) >= 0:
                return StepResult(tokens, logprobs=logprobs)
        else:
            tokens = [[] for _ in all_slices]
            for slice_ids, column in zip(columns, table, strict=True):
                for i, token in zip(slice_ids, column[: len(slice_ids)].tolist(), strict=True):
                    tokens[i].append(token)
        errors = {i: NO_ALLOWED_TOKEN for i, entries in enumerate(tokens) if NO_TOKEN_LEFT in entries}
        errors |= {i: NOT_FINITE for i, entries in enumerate(tokens) if NOT_FINITE_MARK in entries}
        return StepResult([[token for token in entries if token >= 0] for entries in tokens], errors, logprobs)

    def _read_logprobs(self, first: int, last: int) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the tokens of these columns, without entries for marks."""
        found: dict[int, list[TokenLogprobs]] = {i: [] for i in self.num_logprobs}
        for slice_ids, column, table in zip(
            self.slice_ids[first:last], self.tokens[first:last].tolist(), self.logprobs[first:last], strict=True
        ):
            lines = [line for line, i in enumerate(slice_ids) if i in found and column[line] >= 0]
            ints = table[lines]
            floats = ints.view(np.float32)
            fields = floats[:, 0], ints[:, 1], ints[:, 2 : 2 + MAX_LOGPROBS], floats[:, 2 + MAX_LOGPROBS :]
            for line, logprob, rank, ids, top in zip(lines, *(field.tolist() for field in fields), strict=True):
                num = self.num_logprobs[slice_ids[line]]
                found[slice_ids[line]].append(TokenLogprobs(logprob, rank, ids[:num], top[:num]))
        return found


class OutputBuffers:
    """Pinned host memory that the device writes sampled tokens to. Two plans use one half each, by turns.

    While one plan fills its half, the host reads the other. A third plan waits if its half is still to be read.

    tokens    [2 * num_columns, width] int32
    logprobs  [2 * num_columns, width, 2 + 2 * MAX_LOGPROBS] int32
    """

    def __init__(self, num_columns: int, width: int, device: torch.device) -> None:
        self.num_columns = num_columns
        self.tokens, self.logprobs = (
            torch.zeros(2 * num_columns, width, *shape, dtype=torch.int32, pin_memory=device.type == "cuda")
            for shape in ((), (2 + 2 * MAX_LOGPROBS,))
        )
        self._turn = 0
        self._events = [record_event(device) for _ in self.tokens]  # reused: making an event takes longer
        self._outputs: list[weakref.ref[StepOutput] | None] = [None, None]

    def next_half(self) -> int:
        """Switch to the other half. Returns its first column."""
        self._turn ^= 1
        last = self._outputs[self._turn]
        if last is not None and (output := last()) is not None:
            output.detach()
        return self._turn * self.num_columns

    def new_output(self, num_slices: int, num_logprobs: Mapping[int, int] | None = None) -> StepOutput:
        """The output of the plan that fills the current half."""
        half = slice(self._turn * self.num_columns, (self._turn + 1) * self.num_columns)
        output = StepOutput(num_slices, self.tokens.numpy()[half], self.logprobs.numpy()[half], num_logprobs)
        self._outputs[self._turn] = weakref.ref(output)
        return output

    def record_column(self, output: StepOutput, slice_ids: Seq[int]) -> None:
        """Record the event of the next column, after its kernels were queued."""
        event = self._events[self._turn * self.num_columns + len(output.slice_ids)]
        event.record()
        output.events.append(event)
        output.slice_ids.append(slice_ids)

    def record_column_of(self, output: StepOutput, slice_ids: Seq[int], replay: Callable[[], None]) -> None:
        """Call `replay` and record the next column, which its CUDA graph fills before its end."""
        event = self._events[self._turn * self.num_columns + len(output.slice_ids)]
        column = output.tokens[len(output.slice_ids), : len(slice_ids)]
        column[:] = UNWRITTEN
        replay()
        event.record()
        output.events.append(ColumnWritten(column, event))
        output.slice_ids.append(slice_ids)

    def finish(self, output: StepOutput) -> None:
        """Mark the end of the plan. A plan without tokens gets one event, after its other work."""
        if not output.events:
            self.record_column(output, ())
