"""The one event stream. Viewer, metrics, recorder and "why is my request slow?" only read it.

Requests' and steps' events are always built while anybody listens; blocks' events only while somebody asked for them,
because there are many. Counters belong to `KVCacheManager`; a `Step` event carries how much they grew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from octavo.core.types import BlockId, Row, SealId

# -- requests ---------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    width: int
    priority: int


class Admitted(NamedTuple):
    """From waiting to running. `num_cached_tokens` of it were found in the prefix cache."""

    request_id: str
    num_cached_tokens: int
    num_tokens: int


class Waiting(NamedTuple):
    """Why a request does not run; emitted when the reason changes, not once a step. `reason` is one of

    blocks                    `needs` blocks; there are `free` and `evictable` ones (less the watermark)
    rows                      `needs` rows; `free` are left
    budget                    `needs` tokens of a step's budget; `free` are left
    in flight                 `needs` results of it are still on the device
    prefix in flight          a step being planned writes the block that it would look up next
    long prefill              another long prompt of its tenant computes; `needs` positions are due. Short ones pass it
    behind a swapped request  nobody new comes in before all that was swapped out is back
    """

    request_id: str
    reason: str
    needs: int
    free: int
    evictable: int


class Preempted(NamedTuple):
    """Taken off the device, by `how` ("recompute" or "swap"), because `for_request` needed blocks.

    why         of `how`: "forced"; "cheaper" than the other; "rule", the paper's; "no host room" to swap; a "pin",
                which is not swapped
    num_blocks  go with it: to the host and back, or to be computed again, with `num_positions` in them
    """

    request_id: str
    how: str
    for_request: str
    needs: int
    free: int
    evictable: int
    why: str
    num_blocks: int
    num_positions: int


class SwappedIn(NamedTuple):
    request_id: str
    num_copied: int
    num_kept: int


class SwapLost(NamedTuple):
    """A block that a swapped request had left behind was evicted meanwhile: it gives up its copy and is recomputed."""

    request_id: str


class Corrupt(NamedTuple):
    """Blocks of a swapped request came back with another content than they left with. It is recomputed."""

    request_id: str
    num_blocks: int


class Pinned(NamedTuple):
    """A prompt is computed, and its blocks are kept for those that begin with it."""

    request_id: str
    num_tokens: int
    num_blocks: int


class Unpinned(NamedTuple):
    request_id: str
    num_blocks: int


class Recomputed(NamedTuple):
    """What this request had in a step and after it is computed again.

    why   "failed": the step did; "out of memory": it had `num_tokens`, and those from now on have at most `limit`;
          "corrupt": this request, or one whose blocks it may have begun with, came back to it with corrupt blocks;
          "confined": it was in no failed step, and waits while those that were are tried
    """

    request_id: str
    step: int
    why: str = "failed"
    num_tokens: int = 0
    limit: int = 0


class Finished(NamedTuple):
    """For a `reason` that is the `finish_reason` of what lived last.

    num_tokens  generated, prompts not counted, over all sequences but those that a beam search gave up on its way; one
                whose tokens reached it only when it was over counts with them
    """

    request_id: str
    reason: str
    num_tokens: int


# -- steps ------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A plan was made. The last seven count what it did to blocks, and what was looked up, since the `Step` before."""

    step: int
    num_slices: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_swapped: int
    used: int
    cached: int
    free: int
    hits: int
    misses: int
    evicted: int
    copied: int
    swapped_out: int
    swapped_in: int
    sealed: int


# -- blocks: only for those who ask -----------------------------------------------------------------------------------


class Allocated(NamedTuple):
    block_id: BlockId


class Shared(NamedTuple):
    block_id: BlockId
    refs: int


class Released(NamedTuple):
    """One reference fewer. At 0 the block is cached if it is sealed, else free."""

    block_id: BlockId
    refs: int
    cached: bool


class Copied(NamedTuple):
    src: BlockId
    dst: BlockId


class Sealed(NamedTuple):
    block_id: BlockId
    seal_id: SealId
    parent_id: SealId
    """0 for a first block."""
    token_ids: bytes
    """int32, native byte order."""


class Evicted(NamedTuple):
    """A block is not found any more.

    why         "room": no block is free, and this was used longest ago; "reset": the cache is told to forget; "void":
                it does not hold what it was to hold (a step or a request failed)
    num_cached  blocks that are still kept for whoever comes
    """

    block_id: BlockId
    seal_id: SealId
    why: str
    num_cached: int


class TableChanged(NamedTuple):
    """A row's table was written from `start` on (see `plan.TableWrite`), for this sequence of this request."""

    request_id: str
    sequence_index: int
    row: Row
    start: int
    block_ids: tuple[BlockId, ...]


RequestEvent: TypeAlias = (
    Arrived
    | Admitted
    | Waiting
    | Preempted
    | SwappedIn
    | SwapLost
    | Corrupt
    | Pinned
    | Unpinned
    | Recomputed
    | Finished
)
BlockEvent: TypeAlias = Allocated | Shared | Released | Copied | Sealed | Evicted | TableChanged
Event: TypeAlias = RequestEvent | Step | BlockEvent
Listener: TypeAlias = Callable[[Event], None]


class EventStream:
    """Calls its listeners, in the order in which they came, for each event.

    `active` and `blocks` say whether anybody listens at all, and to blocks: ask before building an event. A listener
    must not raise and must not call back into the core.
    """

    __slots__ = ("_block_listeners", "_listeners", "active", "blocks")

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._block_listeners: list[Listener] = []
        self.active = False
        self.blocks = False

    def subscribe(self, listener: Listener, *, blocks: bool = False) -> Callable[[], None]:
        """Start to listen; `blocks` asks for blocks' events too. Returns a function that ends it."""
        self._listeners.append(listener)
        if blocks:
            self._block_listeners.append(listener)
        self._count()

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if listener in self._block_listeners:
                self._block_listeners.remove(listener)
            self._count()

        return unsubscribe

    def _count(self) -> None:
        self.active, self.blocks = bool(self._listeners), bool(self._block_listeners)

    def emit(self, event: RequestEvent | Step) -> None:
        for listener in self._listeners:
            listener(event)

    def emit_block(self, event: BlockEvent) -> None:
        for listener in self._block_listeners:
            listener(event)
