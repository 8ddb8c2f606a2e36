"""From the device to the host: columns of tokens, read while the device goes on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import nullcontext

import torch
from torch import Tensor

from octavo.core.plan import StepResult
from octavo.kernels.rows import NO_TOKEN_LEFT
from octavo.kernels.rows import NOT_FINITE as NOT_FINITE_MARK
from octavo.runner.executor import append
from octavo.runner.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from octavo.runner.streams import Event, SideStream, mark


class Landing:
    """What comes back of one plan.

    tokens      [num_columns, width] int32 on the host, pinned: filled column by column, see `octavo.kernels.rows`
    slice_ids   column -> the slice that each of its entries is of
    events      column -> tells when it has landed; at least one, which tells when the plan is done
    """

    def __init__(self, num_slices: int, tokens: Tensor) -> None:
        self.num_slices = num_slices
        self.tokens = tokens
        self.slice_ids: list[Seq[int]] = []
        self.events: list[Event] = []
        self.results: list[StepResult] = []  # of a plan whose tokens came another way, and are here

    @classmethod
    def of(cls, num_slices: int, results: list[StepResult]) -> Landing:
        """Of what is on the host already: one result a column."""
        landing = cls(num_slices, torch.empty(0, 0, dtype=torch.int32))
        landing.results = results
        landing.slice_ids = [()] * len(results)
        landing.events = [mark(torch.device("cpu"))] * max(1, len(results))
        return landing

    @property
    def num_landed(self) -> int:
        count = len(self.events)
        while count and not self.events[count - 1].query():
            count -= 1
        return count

    def read(self, first: int, last: int) -> StepResult:
        """Columns [first, last), which have landed."""
        if self.results:
            whole = self.results[first]
            for column in self.results[first + 1 : last]:
                append(whole, column)
            return whole
        every, columns, table = range(self.num_slices), self.slice_ids[first:last], self.tokens.numpy()[first:last]
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
    """Columns of tokens on the device, and their way to the host on a stream of their own.

    columns   [2 * num_columns, width] int32. Two plans share it by turns: while one fills its half, the other's half is
              still being copied. A third waits for the first's copies
    """

    def __init__(self, num_columns: int, width: int, device: torch.device) -> None:
        self.device = device
        self.num_columns = num_columns
        self.width = width
        self.columns = torch.zeros(2 * num_columns, width, dtype=torch.int32, device=device)
        self._side = SideStream(device)
        self._turn = 0
        self._copied = [mark(device), mark(device)]  # of each half, the last

    def begin(self) -> int:
        """The next half's first column."""
        self._turn ^= 1
        self._copied[self._turn].wait()
        return self._turn * self.num_columns

    def landing(self, num_slices: int, num_columns: int) -> Landing:
        pinned = self.device.type == "cuda"
        return Landing(num_slices, torch.empty(num_columns, self.width, dtype=torch.int32, pin_memory=pinned))

    def land(self, landing: Landing, slice_ids: Seq[int], *, aside: bool = True) -> None:
        """Send the column that has just been filled, or queued to be, on its way; aside, where passes follow that need
        not wait for it."""
        number, count = len(landing.slice_ids), len(slice_ids)
        landing.slice_ids.append(slice_ids)
        column = self.columns[self._turn * self.num_columns + number, :count]
        with self._side if aside else nullcontext():
            landing.tokens[number, :count].copy_(column, non_blocking=True)
            self._copied[self._turn] = mark(self.device)
        landing.events.append(self._copied[self._turn])

    def end(self, landing: Landing) -> None:
        """Nothing more comes. A plan without tokens is done, too, when its work is."""
        if not landing.events:
            landing.events.append(mark(self.device))
