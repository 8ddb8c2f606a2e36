"""From the device to the host: columns of tokens, read while the device goes on."""

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
from octavo.runner.executor import append
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from octavo.runner.streams import CompletedEvent, DeviceEvent, record_event

UNWRITTEN = -99
"""In a column that the device has not filled; no token, and no mark of `kernels.rows`."""


class ColumnWritten:
    """The point where a column of the ring has been filled, of a piece of work that goes on behind it: seen in the
    column itself. What the work's end says of errors is heeded, too."""

    def __init__(self, column: np.ndarray, end: DeviceEvent) -> None:
        self._column = column
        self._end = end

    def query(self) -> bool:
        return bool((self._column != UNWRITTEN).all()) or self._end.query()

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0)  # others may run, and nobody sleeps: as with CUDA's events


class StepOutput:
    """What comes back of one plan.

    tokens      [num_columns, width] int32, of a ring: filled column by column, see `octavo.kernels.row_state`
    logprobs    [num_columns, width, 2 + 2 * MAX_LOGPROBS] int32, likewise: see `reference.write_logprobs`
    asked       slice -> how many of the likeliest tokens it tells of, where it tells of log-probabilities
    slice_ids   column -> the slice that each of its entries is of
    events      column -> tells when it has landed; at least one, which tells when the plan is done
    """

    def __init__(
        self, num_slices: int, tokens: np.ndarray, logprobs: np.ndarray, asked: Mapping[int, int] | None = None
    ) -> None:
        self.num_slices = num_slices
        self.tokens = tokens
        self.logprobs = logprobs
        self.asked = asked or {}
        self.slice_ids: list[Seq[int]] = []
        self.events: list[DeviceEvent] = []
        self.results: list[StepResult] = []  # of a plan whose tokens came another way, and are here

    @classmethod
    def of(cls, num_slices: int, results: list[StepResult]) -> StepOutput:
        """Of what is on the host already: one result a column."""
        none = np.empty((0, 0), dtype=np.int32)
        landing = cls(num_slices, none, none)
        landing.results = results
        landing.slice_ids = [()] * len(results)
        landing.events = [CompletedEvent()] * max(1, len(results))
        return landing

    @property
    def num_landed(self) -> int:
        count = len(self.events)
        while count and not self.events[count - 1].query():
            count -= 1
        return count

    def leave(self) -> None:
        """Another plan takes its place in the ring, and its events."""
        for event in self.events[-1:]:
            event.synchronize()
        self.tokens, self.events = self.tokens.copy(), [CompletedEvent()] * len(self.events)
        if self.asked:
            self.logprobs = self.logprobs.copy()

    def read(self, first: int, last: int) -> StepResult:
        """Columns [first, last), which have landed."""
        if self.results:
            whole = self.results[first]
            for column in self.results[first + 1 : last]:
                append(whole, column)
            return whole
        every, columns, table = range(self.num_slices), self.slice_ids[first:last], self.tokens[first:last]
        logprobs = self._read_logprobs(first, last) if self.asked else {}
        if all(slice_ids == every for slice_ids in columns):
            tokens = table[:, : self.num_slices].T.tolist()
            if table[:, : self.num_slices].min(initial=0) >= 0:
                return StepResult(tokens, logprobs=logprobs)
        else:
            tokens = [[] for _ in every]
            for slice_ids, column in zip(columns, table, strict=True):
                for i, token in zip(slice_ids, column[: len(slice_ids)].tolist(), strict=True):
                    tokens[i].append(token)
        errors = {i: NO_ALLOWED_TOKEN for i, told in enumerate(tokens) if NO_TOKEN_LEFT in told}
        errors |= {i: NOT_FINITE for i, told in enumerate(tokens) if NOT_FINITE_MARK in told}
        return StepResult([[token for token in told if token >= 0] for told in tokens], errors, logprobs)

    def _read_logprobs(self, first: int, last: int) -> dict[int, list[TokenLogprobs]]:
        """Of the tokens of these columns, and not of the marks beside them."""
        found: dict[int, list[TokenLogprobs]] = {i: [] for i in self.asked}
        for slice_ids, column, table in zip(
            self.slice_ids[first:last], self.tokens[first:last].tolist(), self.logprobs[first:last], strict=True
        ):
            entries = [line for line, i in enumerate(slice_ids) if i in found and column[line] >= 0]
            words = table[entries]
            numbers = words.view(np.float32)
            told = numbers[:, 0], words[:, 1], words[:, 2 : 2 + MAX_LOGPROBS], numbers[:, 2 + MAX_LOGPROBS :]
            for line, logprob, rank, ids, best in zip(entries, *(part.tolist() for part in told), strict=True):
                num = self.asked[slice_ids[line]]
                found[slice_ids[line]].append(TokenLogprobs(logprob, rank, ids[:num], best[:num]))
        return found


class OutputBuffers:
    """Columns of tokens, on the host: the device writes them there by itself.

    columns   [2 * num_columns, width] int32, pinned. Two plans share it by turns: while one fills its half, the other's
              is read. Should somebody still mean to read a half when a third plan comes for it, it waits for that
    logprobs  [2 * num_columns, width, 2 + 2 * MAX_LOGPROBS] int32, likewise
    """

    def __init__(self, num_columns: int, width: int, device: torch.device) -> None:
        self.num_columns = num_columns
        self.columns, self.logprobs = (
            torch.zeros(2 * num_columns, width, *shape, dtype=torch.int32, pin_memory=device.type == "cuda")
            for shape in ((), (2 + 2 * MAX_LOGPROBS,))
        )
        self._turn = 0
        self._events = [record_event(device) for _ in self.columns]  # to make one takes longer than to use it again
        self._landings: list[weakref.ref[StepOutput] | None] = [None, None]

    def begin(self) -> int:
        """The next half's first column."""
        self._turn ^= 1
        last = self._landings[self._turn]
        if last is not None and (landing := last()) is not None:
            landing.leave()
        return self._turn * self.num_columns

    def landing(self, num_slices: int, asked: Mapping[int, int] | None = None) -> StepOutput:
        """Of the plan whose half it is."""
        half = slice(self._turn * self.num_columns, (self._turn + 1) * self.num_columns)
        landing = StepOutput(num_slices, self.columns.numpy()[half], self.logprobs.numpy()[half], asked)
        self._landings[self._turn] = weakref.ref(landing)
        return landing

    def land(self, landing: StepOutput, slice_ids: Seq[int]) -> None:
        """The next column has been filled, or what fills it is queued."""
        event = self._events[self._turn * self.num_columns + len(landing.slice_ids)]
        event.record()
        landing.events.append(event)
        landing.slice_ids.append(slice_ids)

    def land_within(self, landing: StepOutput, slice_ids: Seq[int], queue: Callable[[], None]) -> None:
        """As `queue` and `land`, where what is queued goes on behind what fills the column."""
        event = self._events[self._turn * self.num_columns + len(landing.slice_ids)]
        column = landing.tokens[len(landing.slice_ids), : len(slice_ids)]
        column[:] = UNWRITTEN
        queue()
        event.record()
        landing.events.append(ColumnWritten(column, event))
        landing.slice_ids.append(slice_ids)

    def end(self, landing: StepOutput) -> None:
        """Nothing more comes. A plan without tokens is done, too, when its work is."""
        if not landing.events:
            self.land(landing, ())
