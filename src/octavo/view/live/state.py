"""The receiving end of a `Publisher`: applies its frames. A viewer that comes late gets a snapshot of this state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.errors import EngineError
from octavo.view.live.messages import (
    MAX_EVENTS,
    MAX_REFS,
    SEALED_BIT,
    BlockChange,
    Counts,
    Delta,
    Frame,
    Progress,
    RequestView,
    Seals,
    SequenceView,
    Snapshot,
)

MAX_SEALS = 65_536
"""Nodes of the prefix tree in a snapshot, at most: twenty bytes each, and more than a viewer looks at."""


class FrameLostError(EngineError):
    """A delta does not follow the frame before it; a new snapshot is needed."""


@dataclass(slots=True)
class Table:
    """A sequence's block table. `entries` stay encoded: they change with every frame and are rarely read."""

    index: int
    num_tokens: int
    num_computed: int
    entries: bytes
    group: int = 0

    @property
    def block_ids(self) -> np.ndarray:
        """i32[num_entries]"""
        return np.frombuffer(self.entries, dtype="<i4")


class PoolState:
    """The state of a pool and its requests after the frames so far, of which the first is a snapshot."""

    epoch: str
    frame: int
    counts: Counts

    def __init__(self, snapshot: Snapshot) -> None:
        self._reset(snapshot)

    def apply(self, frame: Frame) -> None:
        """Apply the next frame. Raises `FrameLostError` for a delta out of order, and then changes nothing."""
        if isinstance(frame, Snapshot):
            self._reset(frame)
            return
        if (frame.epoch, frame.frame) != (self.epoch, self.frame + 1):
            raise FrameLostError(
                f"frame {frame.frame} of {frame.epoch} does not follow {self.frame} of {self.epoch}; take a snapshot"
            )
        self.frame, self.time_s, self.step, self.counts = frame.frame, frame.time_s, frame.step, frame.counts
        self._update_blocks(frame.blocks, frame.seals)
        for request_id in frame.removed:
            for uid in self.requests.pop(request_id).sequences:
                self.tables.pop(uid, None)
        for uid in frame.removed_sequences:
            self.tables.pop(uid, None)
        for request in frame.requests:
            self.requests[request.id] = request
        self._update_sequences(frame)
        self.queues |= frame.queues
        self.stats |= frame.stats
        self.steps += frame.steps
        self.events += frame.events

    def _reset(self, snapshot: Snapshot) -> None:
        self.epoch, self.frame = snapshot.epoch, snapshot.frame
        self.time_s, self.step = snapshot.time_s, snapshot.step
        self.num_blocks, self.block_size = snapshot.num_blocks, snapshot.block_size
        self.num_host_blocks = snapshot.num_host_blocks
        self.words = np.zeros(snapshot.num_blocks + 1, dtype=np.uint16)  # the null block's word is 0
        self.words[1:] = np.frombuffer(snapshot.words, dtype="<u2")
        self.seal_ids = np.zeros(snapshot.num_blocks + 1)
        self.parent_ids = np.zeros(snapshot.num_blocks + 1)
        self.groups = np.zeros(snapshot.num_blocks + 1, dtype=np.uint8)  # of sealed blocks
        self.windows, self.state_blocks = snapshot.windows, snapshot.state_blocks
        self._update_blocks(None, snapshot.seals)
        self.requests: dict[str, RequestView] = {request.id: request for request in snapshot.requests}
        self.tables: dict[int, Table] = {view.uid: _table(view) for view in snapshot.sequences}
        self.queues: dict[str, list[str]] = {
            status: [r.id for r in snapshot.requests if r.status == status]
            for status in ("running", "swapped", "waiting")
        }
        self.stats: dict[str, Any] = dict(snapshot.stats)
        self.counts = snapshot.counts
        self.steps: deque[list[int | float]] = deque(snapshot.steps, maxlen=MAX_EVENTS)
        self.events: deque[dict[str, Any]] = deque(snapshot.events, maxlen=MAX_EVENTS)

    def _update_blocks(self, blocks: BlockChange | None, seals: Seals | None) -> None:
        if blocks is not None:
            self.words[np.frombuffer(blocks.ids, dtype="<u4")] = np.frombuffer(blocks.words, dtype="<u2")
        if seals is not None:
            ids = np.frombuffer(seals.block_ids, dtype="<u4")
            self.seal_ids[ids] = np.frombuffer(seals.seal_ids, dtype="<f8")
            self.parent_ids[ids] = np.frombuffer(seals.parent_ids, dtype="<f8")
            self.groups[ids] = np.frombuffer(seals.groups, dtype="u1") if seals.groups else 0

    def _update_sequences(self, delta: Delta) -> None:
        for view in delta.sequences:
            self.tables[view.uid] = _table(view)
        for change in delta.tables:
            table = self.tables[change.uid]
            table.entries = table.entries[: 4 * change.start] + change.block_ids
        if delta.progress is not None:
            for uid, num_tokens, num_computed in zip(*_columns(delta.progress), strict=True):
                self.tables[uid].num_tokens, self.tables[uid].num_computed = num_tokens, num_computed

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A snapshot for a new viewer: the next frames follow it."""
        sealed = np.nonzero((self.words & SEALED_BIT != 0) & (self.seal_ids != 0))[0]
        if len(sealed) > MAX_SEALS:  # blocks in use first
            sealed = np.sort(sealed[np.argsort(self.words[sealed] == SEALED_BIT, kind="stable")[:MAX_SEALS]])
        queued = [name for status in ("running", "swapped", "waiting") for name in self.queues[status]]
        names = dict.fromkeys([name for name in queued if name in self.requests]) | dict.fromkeys(self.requests)
        place = self.epoch, self.frame, self.time_s, self.step
        sizes = self.num_blocks, self.block_size, self.num_host_blocks
        words = self.words[1:].astype("<u2").tobytes()
        seals = Seals.of(sealed, self.seal_ids[sealed], self.parent_ids[sealed], self.groups[sealed])
        requests = [self.requests[name] for name in names]
        tables = [
            SequenceView(uid, t.index, t.num_tokens, t.num_computed, t.entries, t.group)
            for uid, t in self.tables.items()
        ]
        stats, steps, events = dict(self.stats), list(self.steps), list(self.events)
        snapshot = Snapshot(*place, *sizes, words, seals, requests, tables, stats, self.counts, steps, events)
        snapshot.windows, snapshot.state_blocks = self.windows, self.state_blocks
        return snapshot

    @property
    def num_used(self) -> int:
        return int(np.count_nonzero(self.words & MAX_REFS))

    @property
    def num_cached(self) -> int:
        return int(np.count_nonzero(self.words == SEALED_BIT))

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used - self.num_cached

    def block(self, block: int) -> dict[str, Any]:
        """One block in detail, without its content: plain data, as in PROTOCOL.md."""
        owners, num_filled, group = [], 0, int(self.groups[block])
        for request in self.requests.values():
            if request.status == "swapped":
                continue
            for uid in request.sequences:
                table = self.tables[uid]
                for entry in np.nonzero(table.block_ids == block)[0].tolist():
                    owners.append({"request_id": request.id, "index": table.index, "entry": entry})
                    filled = min(max(table.num_computed - entry * self.block_size, 0), self.block_size)
                    whole = table.group > len(self.windows)  # a state's
                    num_filled, group = max(num_filled, self.block_size if whole else filled), table.group
        sealed = bool(self.words[block] & SEALED_BIT)
        return {
            "id": block,
            "references": int(self.words[block] & MAX_REFS),
            "sealed": sealed,
            "seal_id": int(self.seal_ids[block]) if sealed else 0,
            "parent_id": int(self.parent_ids[block]) if sealed else 0,
            "group": group,
            "name": None,
            "owners": owners,
            "num_filled": self.block_size if sealed else num_filled,
            "token_ids": None,
            "text": None,
        }


def _table(view: SequenceView) -> Table:
    return Table(view.index, view.num_tokens, view.num_computed, view.block_ids, view.group)


def _columns(progress: Progress) -> list[list[int]]:
    return [np.frombuffer(c, dtype="<u4").tolist() for c in (progress.uids, progress.num_tokens, progress.num_computed)]
