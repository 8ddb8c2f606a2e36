"""What is told of a pool and its requests: a whole state, then what has changed. See PROTOCOL.md.

Arrays are bytes, little-endian: raw in msgpack, between processes, and base64 in JSON, for browsers and recordings.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

SEALED_BIT, MAX_REFS = 0x8000, 0x7FFF
"""A block's word, 0 if free: bit 15 says that it is sealed, the others are its references, as far as they can."""
MAX_EVENTS = 256
"""Of events and of steps, each, that a frame tells."""
MAX_WAITING = 256
"""Of those that wait, the first in line that are told."""


class Seals(msgspec.Struct, omit_defaults=True):
    """Items of the prefix tree: block, its seal id, and that of the block before it (0: none)."""

    block_ids: bytes = b""  # u32[num]
    seal_ids: bytes = b""  # f64[num]
    parent_ids: bytes = b""  # f64[num]


class Wait(msgspec.Struct, frozen=True):
    """Why a request waits. The numbers are None where it was said before anybody watched."""

    reason: str
    needs: int | None = None
    free: int | None = None
    evictable: int | None = None


class RequestView(msgspec.Struct, frozen=True):
    """`status` is running, swapped, waiting or pinned; `sequences` are uids."""

    id: str
    status: str
    num_prompt: int
    max_tokens: int
    width: int
    priority: int
    num_cached: int
    num_preempted: int
    waits: Wait | None
    sequences: tuple[int, ...]


class SequenceView(msgspec.Struct):
    uid: int
    index: int
    num_tokens: int
    num_computed: int
    block_ids: bytes = b""  # i32[num_entries]


class TableChange(msgspec.Struct):
    """A table's entries from `start` on, up to its end."""

    uid: int
    start: int
    block_ids: bytes  # i32[num_entries - start]


class BlockChange(msgspec.Struct, omit_defaults=True):
    ids: bytes = b""  # u32[num]
    words: bytes = b""  # u16[num]


class Progress(msgspec.Struct, omit_defaults=True):
    uids: bytes = b""  # u32[num]
    num_tokens: bytes = b""  # u32[num]
    num_computed: bytes = b""  # u32[num]


class Counts(msgspec.Struct):
    """Requests in the three lines, and tokens computed since the epoch began."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    tokens: int = 0


class Snapshot(msgspec.Struct, tag_field="kind", tag="snapshot"):
    """Everything. `epoch` names a run of frames, and `frame` counts within it. Sizes have bounds where they are read: a
    file may say anything."""

    epoch: str
    frame: int
    time_s: float
    step: int
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    num_host_blocks: int
    words: bytes  # u16[num_blocks], of block 1 first
    seals: Seals
    requests: list[RequestView]
    sequences: list[SequenceView]
    stats: dict[str, Any]
    counts: Counts
    steps: list[list[int | float]] = []
    events: list[dict[str, Any]] = []
    cost_s: float = 0.0


class Delta(msgspec.Struct, tag_field="kind", tag="delta", omit_defaults=True):
    """What has changed since the frame before. `cost_s` is what the engine spent on making it."""

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
    gone: list[str] = []
    gone_sequences: list[int] = []
    lines: dict[str, list[str]] = {}
    stats: dict[str, Any] = {}
    steps: list[list[int | float]] = []
    events: list[dict[str, Any]] = []
    num_left_out: int = 0
    cost_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Nothing but time has passed."""
        told = (self.blocks, self.seals, self.requests, self.sequences, self.tables, self.progress, self.gone)
        return not any((*told, self.gone_sequences, self.lines, self.stats, self.steps, self.events))


Frame: TypeAlias = Snapshot | Delta
