"""The view that one tenant has of a pool: its own requests and blocks, and which blocks others use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from octavo.view.live.messages import SEALED_BIT, Delta, Progress, RequestView, Seals, Snapshot
from octavo.view.live.state import PoolState


class TenantAccess(Protocol):
    """What a viewer may see. Equal objects see the same."""

    @property
    def sees_all(self) -> bool: ...

    def sees(self, name: str) -> bool:
        """Whether the request with this id is visible."""

    def redact(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """An event of a visible request, without the ids of requests that are not visible."""

    def __hash__(self) -> int: ...


class TenantView:
    """A tenant's part of each frame. The frame must have been applied to the state before.

    State words, counts, stats and steps are sums over all tenants, and are visible. Requests, sequences, tables, seals
    and events are visible if they are the tenant's own. A seal is the tenant's own once one of its tables has held the
    block, and as long as the seal lasts: a cached block stays the tenant's.
    """

    def __init__(self, state: PoolState, access: TenantAccess) -> None:
        self._access = access
        self._reset(state)

    def _reset(self, state: PoolState) -> None:
        self._epoch = state.epoch
        self._uids: set[int] = set()
        self._seals = np.zeros(state.num_blocks + 1)  # seal ids as sent; 0: none

    def snapshot(self, state: PoolState) -> Snapshot:
        """Everything that the tenant may see."""
        if state.epoch != self._epoch:
            self._reset(state)
        whole = state.snapshot()
        self._uids = self._visible_uids(state)
        self._new_seals(state)
        is_sealed = state.words & SEALED_BIT != 0
        visible = np.nonzero(is_sealed & (self._seals != 0) & (self._seals == state.seal_ids))[0]
        return msgspec.structs.replace(
            whole,
            seals=_seals(state, visible, visible[:0]),
            requests=self._requests(whole.requests),
            sequences=[view for view in whole.sequences if view.uid in self._uids],
            events=self._events(whole.events, state),
        )

    def delta(self, delta: Delta, state: PoolState) -> Delta:
        """The tenant's part of the next delta. It counts as a frame even if it is empty."""
        before, self._uids = self._uids, self._visible_uids(state)
        events = self._events(delta.events, state)  # before the seals of evictions are replaced
        lost, new = self._lost_seals(delta.seals, state), self._new_seals(state)
        return msgspec.structs.replace(
            delta,
            seals=_seals(state, new, lost) if len(new) + len(lost) else None,
            requests=self._requests(delta.requests),
            sequences=[view for view in delta.sequences if view.uid in self._uids],
            tables=[change for change in delta.tables if change.uid in self._uids],
            progress=_only(delta.progress, self._uids),
            removed=[name for name in delta.removed if self._access.sees(name)],
            removed_sequences=[uid for uid in delta.removed_sequences if uid in before],
            queues={queue: [n for n in names if self._access.sees(n)] for queue, names in delta.queues.items()},
            events=events,
        )

    def has(self, block: int, state: PoolState) -> bool:
        """Whether the tenant may see a block's content: it has the block now, or the block's seal is its own."""
        is_sealed = state.words[block] & SEALED_BIT and state.seal_ids[block]
        if is_sealed and self._seals[block] == state.seal_ids[block]:
            return True
        return bool(np.any(_held(state, self._uids) == block))

    def _visible_uids(self, state: PoolState) -> set[int]:
        visible = (request for request in state.requests.values() if self._access.sees(request.id))
        return {uid for request in visible for uid in request.sequences}

    def _requests(self, requests: Iterable[RequestView]) -> list[RequestView]:
        return [request for request in requests if self._access.sees(request.id)]

    def _events(self, events: list[dict[str, Any]], state: PoolState) -> list[dict[str, Any]]:
        held = set(_held(state, self._uids).tolist()) if any("dst" in event for event in events) else set()
        shown = []
        for event in events:
            if (name := event.get("request_id")) is not None:
                if self._access.sees(name):
                    shown.append(self._access.redact(event))
            elif event["event"] == "evicted":
                if self._seals[event["block_id"]] == event["seal_id"]:
                    shown.append(event)
            elif "dst" in event and event["dst"] in held:
                shown.append(event)
        return shown

    def _lost_seals(self, seals: Seals | None, state: PoolState) -> np.ndarray:
        """Blocks that were the tenant's in the cache, and have another seal by now."""
        changed = np.frombuffer(b"" if seals is None else seals.block_ids, dtype="<u4")
        lost: np.ndarray = changed[(self._seals[changed] != 0) & (self._seals[changed] != state.seal_ids[changed])]
        self._seals[lost] = 0
        return lost

    def _new_seals(self, state: PoolState) -> np.ndarray:
        """The tenant's sealed blocks whose seals were not sent yet; they are sent now."""
        own = _held(state, self._uids)
        known, is_sealed = state.seal_ids[own], state.words[own] & SEALED_BIT != 0
        new: np.ndarray = own[is_sealed & (known != 0) & (known != self._seals[own])]
        self._seals[new] = state.seal_ids[new]
        return new


def _held(state: PoolState, uids: set[int]) -> np.ndarray:
    """The blocks in the tables of these sequences, except swapped ones, whose tables hold host blocks."""
    swapped = {uid for request in state.requests.values() if request.status == "swapped" for uid in request.sequences}
    tables = [state.tables[uid].block_ids for uid in uids - swapped if uid in state.tables]
    blocks = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *tables]))
    held: np.ndarray = blocks[blocks > 0]
    return held


def _seals(state: PoolState, blocks: np.ndarray, lost: np.ndarray) -> Seals:
    """The seals of `blocks`, and seal 0 for `lost` blocks that are not in `blocks`."""
    lost = np.setdiff1d(lost, blocks)
    none = np.zeros(len(lost))
    columns = [blocks, lost], *([of[blocks], none] for of in (state.seal_ids, state.parent_ids, state.groups))
    return Seals.of(*map(np.concatenate, columns))


def _only(progress: Progress | None, uids: set[int]) -> Progress | None:
    if progress is None:
        return None
    columns = [np.frombuffer(c, dtype="<u4") for c in (progress.uids, progress.num_tokens, progress.num_computed)]
    own = np.isin(columns[0], list(uids))
    return Progress(*(column[own].tobytes() for column in columns)) if own.any() else None
