"""The frames of a pool and its requests: a snapshot, then deltas. See PROTOCOL.md.

Arrays are bytes, little-endian: raw in msgpack, between processes, and base64 in JSON, for browsers and recordings.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike

SEALED_BIT, MAX_REFS = 0x8000, 0x7FFF
"""A block's state word, 0 if free: bit 15 is set if it is sealed, the other bits are its reference count, capped."""
MAX_EVENTS = 256
"""Events of a frame, and steps of a frame, at most."""
MAX_WAITING = 256
"""Waiting requests in a frame, at most: the first in the queue."""
RENAMED = {"removed": "gone", "removed_sequences": "gone_sequences", "queues": "lines", "num_omitted": "num_left_out"}
"""Attributes of a `Delta` whose names in the protocol differ."""


class Seals(msgspec.Struct, omit_defaults=True):
    """Nodes of the prefix tree: a block, its seal id, and the seal id of the block before it (0: none).

    A window group's block is below the full block over the same positions, and so is the head of a checkpoint; each
    further block of that state is below the one before. `groups` is empty if all are full ones."""

    block_ids: bytes = b""  # u32[num]
    seal_ids: bytes = b""  # f64[num]
    parent_ids: bytes = b""  # f64[num]
    groups: bytes = b""  # u8[num]

    @classmethod
    def of(cls, blocks: ArrayLike, seals: ArrayLike, parents: ArrayLike, groups: ArrayLike = ()) -> Seals:
        block_ids, seal_ids, parent_ids = (
            np.asarray(blocks, "<u4"),
            np.asarray(seals, "<f8"),
            np.asarray(parents, "<f8"),
        )
        numbers = np.asarray(groups, "u1")
        groups_of = numbers.tobytes() if numbers.any() else b""
        return cls(block_ids.tobytes(), seal_ids.tobytes(), parent_ids.tobytes(), groups_of)


class Wait(msgspec.Struct, frozen=True):
    """Why a request waits. The numbers are None if the reason was given before the first viewer came."""

    reason: str
    needs: int | None = None
    free: int | None = None
    evictable: int | None = None
    in_windows: int = 0
    in_states: int = 0


class RequestView(msgspec.Struct, frozen=True, rename={"wait": "waits"}):
    """`status` is running, swapped, waiting or pinned; `sequences` are uids, each followed by those of its lanes."""

    id: str
    status: str
    num_prompt: int
    max_tokens: int
    width: int
    priority: int
    num_cached: int
    num_preempted: int
    wait: Wait | None
    sequences: tuple[int, ...]


class SequenceView(msgspec.Struct, omit_defaults=True):
    """A sequence and its block table, or a lane: its table of a window group, or its state. 0 is the full group."""

    uid: int
    index: int
    num_tokens: int
    num_computed: int
    block_ids: bytes = b""  # i32[num_entries]
    group: int = 0


class TableChange(msgspec.Struct):
    """A block table's entries from `start` to its end."""

    uid: int
    start: int
    block_ids: bytes  # i32[num_entries - start]


class BlockChange(msgspec.Struct, omit_defaults=True):
    """Blocks whose state words have changed."""

    ids: bytes = b""  # u32[num]
    words: bytes = b""  # u16[num]


class Progress(msgspec.Struct, omit_defaults=True):
    """Sequences that have grown."""

    uids: bytes = b""  # u32[num]
    num_tokens: bytes = b""  # u32[num]
    num_computed: bytes = b""  # u32[num]


class Counts(msgspec.Struct):
    """Requests in each queue, and tokens computed since the epoch began."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    tokens: int = 0


class Snapshot(msgspec.Struct, tag_field="kind", tag="snapshot"):
    """The whole state. `epoch` identifies a series of frames, and `frame` counts within it. Sizes are bounded when they
    are decoded, since a file may hold anything.

    windows       of each window group, in tokens
    state_blocks  of a sequence's state, whose group is the one after those with windows
    """

    epoch: str
    frame: int
    time_s: float
    step: int
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    num_host_blocks: int
    words: bytes  # u16[num_blocks], from block 1 on
    seals: Seals
    requests: list[RequestView]
    sequences: list[SequenceView]
    stats: dict[str, Any]
    counts: Counts
    steps: list[list[int | float]] = []
    events: list[dict[str, Any]] = []
    cost_s: float = 0.0
    windows: list[int] = []
    state_blocks: int = 0


class Delta(msgspec.Struct, tag_field="kind", tag="delta", omit_defaults=True, rename=RENAMED):
    """The changes since the frame before. `cost_s` is the time the engine spent on making it."""

    epoch: str
    frame: int
    time_s: float
    step: int
    counts: Counts
    blocks: BlockChange | None = None
    seals: Seals | None = None
    requests: list[RequestView] = []
    sequences: list[SequenceView] = []
    tables: list[TableChange] = []
    progress: Progress | None = None
    removed: list[str] = []
    removed_sequences: list[int] = []
    queues: dict[str, list[str]] = {}
    stats: dict[str, Any] = {}
    steps: list[list[int | float]] = []
    events: list[dict[str, Any]] = []
    num_omitted: int = 0
    cost_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether only time has passed."""
        changes = (self.blocks, self.seals, self.requests, self.sequences, self.tables, self.progress, self.removed)
        return not any((*changes, self.removed_sequences, self.queues, self.stats, self.steps, self.events))


Frame: TypeAlias = Snapshot | Delta
