"""From the device to the host: columns of tokens, read while the device goes on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.core.plan import StepResult
from octavo.kernels.rows import NO_TOKEN_LEFT
from octavo.kernels.rows import NOT_FINITE as NOT_FINITE_MARK
from octavo.runner.executor import append
from octavo.runner.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from octavo.runner.streams import Point, Reached, mark

NOT_YET = -99
"""In a column that the device has not filled; no token, and no mark of `kernels.rows`."""


class Seen:
    """The point where a column of the ring has been filled, of a piece of work that goes on behind it: seen in the
    column itself. What the work's end says of errors is heeded, too."""

    def __init__(self, column: np.ndarray, end: Point) -> None:
        self._column = column
        self._end = end

    def query(self) -> bool:
        return bool((self._column != NOT_YET).all()) or self._end.query()

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0)  # others may run, and nobody sleeps: as with CUDA's events


class Landing:
    """What comes back of one plan.

    tokens      [num_columns, width] int32, of a ring: filled column by column, see `octavo.kernels.rows`
    slice_ids   column -> the slice that each of its entries is of
    events      column -> tells when it has landed; at least one, which tells when the plan is done
    """

    def __init__(self, num_slices: int, tokens: np.ndarray) -> None:
        self.num_slices = num_slices
        self.tokens = tokens
        self.slice_ids: list[Seq[int]] = []
        self.events: list[Point] = []
        self.results: list[StepResult] = []  # of a plan whose tokens came another way, and are here

    @classmethod
    def of(cls, num_slices: int, results: list[StepResult]) -> Landing:
        """Of what is on the host already: one result a column."""
        landing = cls(num_slices, np.empty((0, 0), dtype=np.int32))
        landing.results = results
        landing.slice_ids = [()] * len(results)
        landing.events = [Reached()] * max(1, len(results))
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
        self.tokens, self.events = self.tokens.copy(), [Reached()] * len(self.events)

    def read(self, first: int, last: int) -> StepResult:
        """Columns [first, last), which have landed."""
        if self.results:
            whole = self.results[first]
            for column in self.results[first + 1 : last]:
                append(whole, column)
            return whole
        every, columns, table = range(self.num_slices), self.slice_ids[first:last], self.tokens[first:last]
        if all(slice_ids == every for slice_ids in columns):
            tokens = table[:, : self.num_slices].T.tolist()
            if table[:, : self.num_slices].min(initial=0) >= 0:
                return StepResult(tokens)
        else:
            tokens = [[] for _ in every]
            for slice_ids, column in zip(columns, table, strict=True):
                for i, token in zip(slice_ids, column[: len(slice_ids)].tolist(), strict=True):
                    tokens[i].append(token)
        errors = {i: NO_ALLOWED_TOKEN for i, told in enumerate(tokens) if NO_TOKEN_LEFT in told}
        errors |= {i: NOT_FINITE for i, told in enumerate(tokens) if NOT_FINITE_MARK in told}
        return StepResult([[token for token in told if token >= 0] for told in tokens], errors)


class Ring:
    """Columns of tokens, on the host: the device writes them there by itself.

    columns   [2 * num_columns, width] int32, pinned. Two plans share it by turns: while one fills its half, the other's
              is read. Should somebody still mean to read a half when a third plan comes for it, it waits for that
    """

    def __init__(self, num_columns: int, width: int, device: torch.device) -> None:
        self.num_columns = num_columns
        self.columns = torch.zeros(2 * num_columns, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._turn = 0
        self._events = [mark(device) for _ in self.columns]  # to make one takes longer than to use it again
        self._landings: list[weakref.ref[Landing] | None] = [None, None]

    def begin(self) -> int:
        """The next half's first column."""
        self._turn ^= 1
        last = self._landings[self._turn]
        if last is not None and (landing := last()) is not None:
            landing.leave()
        return self._turn * self.num_columns

    def landing(self, num_slices: int) -> Landing:
        """Of the plan whose half it is."""
        first = self._turn * self.num_columns
        landing = Landing(num_slices, self.columns.numpy()[first : first + self.num_columns])
        self._landings[self._turn] = weakref.ref(landing)
        return landing

    def land(self, landing: Landing, slice_ids: Seq[int]) -> None:
        """The next column has been filled, or what fills it is queued."""
        event = self._events[self._turn * self.num_columns + len(landing.slice_ids)]
        event.record()
        landing.events.append(event)
        landing.slice_ids.append(slice_ids)

    def land_within(self, landing: Landing, slice_ids: Seq[int], queue: Callable[[], None]) -> None:
        """As `queue` and `land`, where what is queued goes on behind what fills the column."""
        event = self._events[self._turn * self.num_columns + len(landing.slice_ids)]
        column = landing.tokens[len(landing.slice_ids), : len(slice_ids)]
        column[:] = NOT_YET
        queue()
        event.record()
        landing.events.append(Seen(column, event))
        landing.slice_ids.append(slice_ids)

    def end(self, landing: Landing) -> None:
        """Nothing more comes. A plan without tokens is done, too, when its work is."""
        if not landing.events:
            self.land(landing, ())
