"""The executor interface, between the engine and whatever computes its plans: a CPU, GPUs, a cost model, a test oracle.

An executor keeps stream order (see `octavo.core.plan`): plan k+1 runs after plan k. Within a plan the order is block
table writes, swaps out, swaps in, copies, slices.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.core.plan import StepPlan, StepResult
from octavo.errors import DeviceLostError, PlanError, StepError, StepMemoryError

if TYPE_CHECKING:  # engine clients import this module, too, and need no numpy
    import numpy as np


class GrammarDrafts(NamedTuple):
    """Guesses of a sequence's next tokens within its grammar.

    tokens       the drafts
    num_matched  of each: length of the earlier match that it continues, and NEXT_KIND times its kind more; 0: the
                 grammar allows no other bytes
    """

    tokens: Seq[int] = ()
    num_matched: Seq[int] = ()


NO_DRAFTS: Mapping[int, GrammarDrafts] = {}


class GrammarBitmask(NamedTuple):
    """Allowed tokens of constrained slices.

    slices   indices of the slices that have a mask
    bitmask  [num_masks, num_words] int32, contiguous: token t is bit t % 32 of word t // 32. Bits beyond the
             vocabulary, whole words included, are undefined. A slice with drafts has a mask more after each of them
    drafts   of each slice with drafts
    """

    slices: Seq[int]
    bitmask: np.ndarray
    drafts: Mapping[int, GrammarDrafts] = NO_DRAFTS

    def first_masks(self) -> dict[int, int]:
        """Slice -> its first mask. Those after its drafts follow."""
        nums = (1 + len(self.drafts[i].tokens) if i in self.drafts else 1 for i in self.slices)
        return dict(zip(self.slices, accumulate(nums, initial=0), strict=False))

    def encode(self) -> bytes:
        """Return it as bytes, for an executor in another process: shape, slice and draft of each mask, words."""
        import numpy as np

        lines: list[tuple[int, int, int]] = []
        for i in self.slices:
            drafts = self.drafts.get(i, GrammarDrafts())
            lines += [(i, -1, 0), *((i, *draft) for draft in zip(*drafts, strict=True))]
        return struct.pack("=2I", *self.bitmask.shape) + np.array(lines, np.int32).tobytes() + self.bitmask.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> GrammarBitmask:
        """The inverse of `encode`. Raises `PlanError` for other bytes."""
        import numpy as np

        num_masks, num_words = struct.unpack("=2I", data[:8]) if len(data) >= 8 else (0, 0)
        if len(data) != 8 + 4 * num_masks * (3 + num_words):
            raise PlanError(f"{len(data)} bytes are no bitmask of {num_masks} lines; they are damaged")
        numbers = np.frombuffer(data, np.int32, offset=8).copy()  # torch wants writable memory
        lines = numbers[: 3 * num_masks].reshape(num_masks, 3)
        found: dict[int, tuple[list[int], list[int]]] = {}
        for i, token, num_matched in lines[lines[:, 1] >= 0].tolist():
            for column, number in zip(found.setdefault(i, ([], [])), (token, num_matched), strict=True):
                column.append(number)
        slices = lines[lines[:, 1] < 0, 0].tolist()
        drafts = {i: GrammarDrafts(*columns) for i, columns in found.items()}
        return cls(slices, numbers[3 * num_masks :].reshape(num_masks, num_words), drafts)


ERRORS = (StepError, StepMemoryError, DeviceLostError)


def encode_error(error: StepError | DeviceLostError) -> bytes:
    """The error of a step as bytes: its kind, and its message."""
    return bytes((ERRORS.index(type(error)),)) + str(error).encode("utf-8", "backslashreplace")


def decode_error(data: bytes) -> StepError | DeviceLostError:
    """The inverse of `encode_error`. Raises `PlanError` for other bytes."""
    try:
        return ERRORS[data[0]](data[1:].decode())
    except (IndexError, UnicodeDecodeError):
        raise PlanError(f"{len(data)} bytes are no error of a step; its bytes are damaged") from None


CAPACITY = struct.Struct("=2I2d")
MAX_DECODE_WINDOW = 4
"""Most passes of a decode window whose length is measured."""
HOST_STEP_S = 1e-3
"""Time of the device that a step leaves the host: single passes of 0.7 and 0.8 ms lose 1 %, longer ones nothing
(docs/gpu-engine.md)."""


class Capacity(NamedTuple):
    """What an executor has once it has started.

    num_blocks       of the KV pool
    num_host_blocks  of the swap space
    move_s           seconds that a block takes to swap, measured; 0 without a swap space
    pass_s           seconds of the shortest decode pass, measured; 0: not known
    """

    num_blocks: int
    num_host_blocks: int
    move_s: float
    pass_s: float = 0.0

    @property
    def decode_window(self) -> int:
        """The fewest passes of a step that hide the host's time. A request that arrives waits for two steps."""
        return min(MAX_DECODE_WINDOW, math.ceil(HOST_STEP_S / self.pass_s)) if self.pass_s else MAX_DECODE_WINDOW

    def encode(self) -> bytes:
        """Return it as bytes, for an executor in another process."""
        return CAPACITY.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Capacity:
        """The inverse of `encode`. Raises `PlanError` for other bytes."""
        if len(data) != CAPACITY.size:
            raise PlanError(f"{len(data)} bytes are no capacity; its bytes are damaged")
        return cls(*CAPACITY.unpack(data))


class RankPlace(NamedTuple):
    """Where a tensor parallel rank is.

    plan        plans that it has begun           collective  collectives that it has entered
    is_inside   it is in a collective             age_s       seconds since it last moved on
    is_behind   others are further, and it has not moved for a second
    """

    plan: int
    collective: int
    is_inside: bool
    age_s: float
    is_behind: bool


class StepHandle(Protocol):
    """A submitted plan."""

    @property
    def done(self) -> bool:
        """True if `result` would not block."""

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        """Columns of tokens that arrived since the last call, without the last column; waits up to `timeout_s` for one.
        None: either no column has arrived yet, or only `result` is left."""

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        """Provide the bitmask that the plan's `bitmask_slices` wait for before they sample.

        Call it once for each of the plan's first `num_bitmask_columns` columns, in order: after all earlier tokens of
        those slices are known, and before the next plan is submitted. Slices without a mask sample from all tokens;
        with None all slices do. The executor may compute any of a slice's drafts, the first ones, or none.
        """

    def result(self) -> StepResult:
        """Wait for the rest of the result, without the columns that `poll` returned.

        Raises `octavo.errors.StepError` if the step failed, `StepMemoryError` if it ran out of memory; then every plan
        submitted after it fails, too. Raises `DeviceLostError`, a subclass of neither, if the device cannot compute any
        more: then the engine, and its process's use of the device, are lost.
        """


class Executor(Protocol):
    def start(self) -> Capacity:
        """Get ready for plans. Call it once, before the first plan: it may overwrite blocks."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a plan after those submitted before; returns at once."""

    def close(self) -> None:
        """Free the device's memory. A second call does nothing."""
