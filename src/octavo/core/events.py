"""Events of the core, for the live view, metrics, the flight recorder and request timelines.

Events of requests and steps are built while there is a listener; events of blocks only while a listener subscribed to
them, because they are many. `KVCacheManager` keeps the counters; a `Step` event carries their increase.
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
    """A waiting request runs. `num_cached_tokens` of its tokens were found in the prefix cache."""

    request_id: str
    num_cached_tokens: int
    num_tokens: int


class Waiting(NamedTuple):
    """The reason why a request does not run, emitted when it changes and not once per step. `reason` is one of

    blocks                    it needs `needs` blocks; `free` and `evictable` ones are available (less the watermark).
                              At admission, `in_windows` of them are for window groups, `in_states` for its state
    rows                      it needs `needs` rows; `free` are left
    budget                    it needs `needs` tokens of a step's budget; `free` are left
    in flight                 `needs` of its results are still on the device
    prefix in flight          the step being planned computes the next block of its prefix
    long prefill              other long prefills of its tenant run; `needs` positions are due. Short ones pass it
    behind a swapped request  no request is admitted while another one is swapped
    """

    request_id: str
    reason: str
    needs: int
    free: int
    evictable: int
    in_windows: int = 0
    in_states: int = 0


class Preempted(NamedTuple):
    """A request was preempted because `for_request` needed blocks, or rows of the tenant with most of them.

    how         "recompute" or "swap"
    why         reason for `how`: "forced"; "cheaper" than the other; "rule" of the paper; "no host room" to swap;
                "pin", which is never swapped; "share" if it gives way to another tenant
    num_blocks  blocks that are swapped or recomputed, with `num_positions` in them
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
    """A request is back on the device: `num_copied` blocks from the host and `num_kept` ones shared on the device."""

    request_id: str
    num_copied: int
    num_kept: int


class SwapLost(NamedTuple):
    """A block that a swapped request shared on the device was evicted. Its host copy is dropped; it is recomputed."""

    request_id: str


class Corrupt(NamedTuple):
    """The content of `num_blocks` swapped blocks of a request had changed on the host. It is recomputed."""

    request_id: str
    num_blocks: int


class Pinned(NamedTuple):
    """A prompt is computed, and its blocks are kept for requests that begin with it."""

    request_id: str
    num_tokens: int
    num_blocks: int


class Unpinned(NamedTuple):
    request_id: str
    num_blocks: int


class Recomputed(NamedTuple):
    """A request is recomputed from `step` on.

    why   "failed": the step failed; "out of memory": the step had `num_tokens`, later ones have at most `limit`;
          "corrupt": swapped-in blocks of this request, or of one whose blocks it may have begun with, were corrupt;
          "confined": it was in no failed step, and waits while the requests of that step are retried
    """

    request_id: str
    step: int
    why: str = "failed"
    num_tokens: int = 0
    limit: int = 0


class Finished(NamedTuple):
    """A request finished. `reason` is the `finish_reason` of its last sequence.

    num_tokens  output tokens of all sequences except pruned beams. A sequence whose tokens arrive after the end of a
                beam search counts too
    """

    request_id: str
    reason: str
    num_tokens: int


# -- steps ------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A plan was made. The last seven fields are increases of the cache's counters since the previous `Step`."""

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


# -- blocks: only for listeners that subscribe to them -----------------------------------------------------------------


class Allocated(NamedTuple):
    block_id: BlockId


class Shared(NamedTuple):
    block_id: BlockId
    refs: int


class Released(NamedTuple):
    """A reference was removed. At 0 references a sealed block is cached and any other block is free."""

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
    """A block left the index.

    why         "room": no block was free, and this was the least recently used; "reset": the prefix cache was reset;
                "void": its content is invalid, because a step or a request failed
    num_cached  cached blocks that remain
    """

    block_id: BlockId
    seal_id: SealId
    why: str
    num_cached: int


class TableChanged(NamedTuple):
    """A row's table was written from `start` on, for this sequence of this request. See `plan.TableWrite`.

    group  0: the full one; then the window groups
    """

    request_id: str
    sequence_index: int
    row: Row
    start: int
    block_ids: tuple[BlockId, ...]
    group: int = 0


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
    """Calls its listeners for each event, in order of subscription.

    Check `active` (any listener) or `blocks` (a listener of block events) before building an event. A listener must not
    raise and must not call back into the core.
    """

    __slots__ = ("_block_listeners", "_listeners", "active", "blocks")

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._block_listeners: list[Listener] = []
        self.active = False
        self.blocks = False

    def subscribe(self, listener: Listener, *, blocks: bool = False) -> Callable[[], None]:
        """Add a listener, with `blocks` also to block events. Returns a function that removes it."""
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
