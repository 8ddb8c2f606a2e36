"""Outputs of a plan: the device writes sampled tokens to pinned host memory, and the host reads them meanwhile."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import compress

import numpy as np
import torch

from octavo.core.plan import StepResult, TokenLogprobs
from octavo.kernels.row_state import MAX_LOGPROBS, NO_TOKEN_LEFT, REJECTED
from octavo.kernels.row_state import NOT_FINITE as NOT_FINITE_MARK
from octavo.runner.checksums import NO_SWAP_IN_CHECK
from octavo.runner.platform import Platform
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from octavo.runner.streams import CompletedEvent, DeviceEvent

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

    Another thread may read it meanwhile.

    tokens        [num_columns, width] int32, filled column by column; see `octavo.kernels.row_state` for its marks
    logprobs      [num_columns, width, 2 + 2 * MAX_LOGPROBS] int32, likewise; see `reference.write_logprobs`
    num_logprobs  slice -> number of its top log-probabilities; absent for slices without log-probabilities
    slice_ids     column -> the slice of each of its entries
    events        column -> the event that it is full. At least one; the last one is the end of the plan
    results       column -> its result, of a plan that the host samples
    on_drafts     called with the number of right drafts of each slice of a column. None: a slice has one entry a column
    swap_in_check of the plan's swaps
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
        self.results: list[StepResult] = []
        self.on_drafts: Callable[[list[int]], None] | None = None
        self.swap_in_check = NO_SWAP_IN_CHECK
        self._lock = threading.Lock()  # of `tokens` and `logprobs`, which `detach` replaces

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
        with self._lock:
            self.tokens, self.events = self.tokens.copy(), [CompletedEvent()] * len(self.events)
            if self.num_logprobs:
                self.logprobs = self.logprobs.copy()

    def read(self, first: int, last: int) -> StepResult:
        """Columns [first, last), which must be full."""
        if not self.results:
            with self._lock:
                return self._read_columns(first, last)
        result = StepResult([[] for _ in range(self.num_slices)])
        for column in self.results[first:last]:
            append_columns(result, column)
        return result

    def _read_columns(self, first: int, last: int) -> StepResult:
        all_slices, columns, table = range(self.num_slices), self.slice_ids[first:last], self.tokens[first:last]
        logprobs = self._read_logprobs(first, last) if self.num_logprobs else {}
        drafts: dict[int, list[tuple[int, int]]] = {}
        if all(slice_ids == all_slices for slice_ids in columns):
            tokens = table[:, : self.num_slices].T.tolist()
            if table[:, : self.num_slices].min(initial=0) >= 0:
                return StepResult(tokens, logprobs=logprobs)
        else:
            tokens = [[] for _ in all_slices]
            for slice_ids, column in zip(columns, table, strict=True):
                for i, token in zip(slice_ids, column[: len(slice_ids)].tolist(), strict=True):
                    tokens[i].append(token)
                if self.on_drafts is not None:
                    self.on_drafts(self._add_drafts(drafts, slice_ids, column))
        errors = {i: NO_ALLOWED_TOKEN for i, entries in enumerate(tokens) if NO_TOKEN_LEFT in entries}
        errors |= {i: NOT_FINITE for i, entries in enumerate(tokens) if NOT_FINITE_MARK in entries}
        found = [[token for token in entries if token >= 0] for entries in tokens]
        return StepResult(found, errors, logprobs, drafts=drafts)

    def _add_drafts(
        self, drafts: dict[int, list[tuple[int, int]]], slice_ids: Seq[int], column: np.ndarray
    ) -> list[int]:
        """Add what became of the drafts of a column -> the number of right ones of each slice."""
        marks = column[: len(slice_ids)]
        num_right = Counter(compress(slice_ids, marks >= 0))
        num_computed = num_right + Counter(compress(slice_ids, marks == REJECTED))
        for i, num in num_computed.items():
            if num > 1:
                drafts.setdefault(i, []).append((num - 1, num_right[i] - 1))
        return [num - 1 for num in num_right.values()]

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

    on_column   called after each column is recorded
    """

    def __init__(self, num_columns: int, width: int, platform: Platform) -> None:
        self.num_columns = num_columns
        self.tokens, self.logprobs = (
            platform.empty_host((2 * num_columns, width, *shape), torch.int32)
            for shape in ((), (2 + 2 * MAX_LOGPROBS,))
        )
        self.on_column: Callable[[], None] = lambda: None
        self._turn = 0
        self._events = [platform.record_event() for _ in self.tokens]  # reused: making an event takes longer
        self._outputs: list[weakref.ref[StepOutput] | None] = [None, None]

    @property
    def first_column(self) -> int:
        """The first column of the current half."""
        return self._turn * self.num_columns

    def new_output(self, num_slices: int, num_logprobs: Mapping[int, int] | None = None) -> StepOutput:
        """Switch to the other half -> the output of the plan that fills it."""
        self._turn ^= 1
        last = self._outputs[self._turn]
        if last is not None and (output := last()) is not None:
            output.detach()
        half = slice(self._turn * self.num_columns, (self._turn + 1) * self.num_columns)
        output = StepOutput(num_slices, self.tokens.numpy()[half], self.logprobs.numpy()[half], num_logprobs)
        self._outputs[self._turn] = weakref.ref(output)
        return output

    def record_column(self, output: StepOutput, slice_ids: Seq[int]) -> None:
        """Record the event of the next column, after its kernels were queued."""
        event = self._events[self._turn * self.num_columns + len(output.slice_ids)]
        event.record()
        self._add_column(output, slice_ids, event)

    def record_result(self, output: StepOutput, result: StepResult) -> None:
        """Record the result of a column, or of a part of one, that the host has sampled."""
        output.results.append(result)
        self._add_column(output, (), CompletedEvent())

    def record_column_of(self, output: StepOutput, slice_ids: Seq[int], replay: Callable[[], object]) -> None:
        """Call `replay` and record the next column, which its CUDA graph fills before its end."""
        event = self._events[self._turn * self.num_columns + len(output.slice_ids)]
        column = output.tokens[len(output.slice_ids), : len(slice_ids)]
        column[:] = UNWRITTEN
        replay()
        event.record()
        self._add_column(output, slice_ids, ColumnWritten(column, event))

    def _add_column(self, output: StepOutput, slice_ids: Seq[int], event: DeviceEvent) -> None:
        output.slice_ids.append(slice_ids)
        output.events.append(event)  # last: readers count events
        self.on_column()

    def finish(self, output: StepOutput) -> None:
        """Mark the end of the plan. A plan without tokens gets one event, after its other work."""
        if not output.events:
            self.record_column(output, ())


def append_columns(result: StepResult, column: StepResult) -> None:
    """Append later columns of the same step to a result, whose tokens are lists."""
    for tokens, more in zip(result.tokens, column.tokens, strict=True):
        tokens += more  # type: ignore[operator]
    result.errors |= column.errors
    for i, logprobs in column.logprobs.items():
        result.logprobs.setdefault(i, []).extend(logprobs)
    for i, passes in column.drafts.items():
        result.drafts.setdefault(i, []).extend(passes)
    for i, (position, entries) in column.prompt_logprobs.items():
        result.prompt_logprobs.setdefault(i, (position, []))[1].extend(entries)
