"""The operations on blocks that an action consists of, for the page to animate."""

from __future__ import annotations

from collections import deque

import msgspec

from octavo.core import events as ev
from octavo.view.playground.core_lines import LineTrace
from octavo.view.playground.pool import RefusedError, count_of

MAX_WORK = 200_000
"""Block operations and tokens of a history, at most. Opening a link runs its history, and links come from anywhere."""
MAX_PHASES = 200


class Phase(msgspec.Struct, frozen=True, rename={"text": "says"}):
    """One operation on a block. `from_block_id` is the block that was copied, or that the table pointed to before.
    `lines` are places in `core_lines.LINES` that ran since the phase before."""

    kind: str
    text: str
    sequence: str | None = None
    block_id: int | None = None
    from_block_id: int | None = None
    lines: list[int] = []


class Phases:
    """The phases of the last action, and the work of all. A listener of block events."""

    def __init__(self) -> None:
        self.latest: deque[Phase] = deque(maxlen=MAX_PHASES)
        self.trace = LineTrace()
        self._work = 0

    def add(
        self, kind: str, text: str, sequence: str | None = None, block: int | None = None, source: int | None = None
    ) -> None:
        self.spend(1)
        self.latest.append(Phase(kind, text, sequence, block, source, self.trace.take()))

    def spend(self, amount: int) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise RefusedError(
                f"This history takes more than {MAX_WORK:,} block operations and tokens, the limit.",
                "Reset the pool, or use a smaller one.",
            )

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.Allocated(block):
                self.add("allocate", f"block {block} is allocated", block=block)
            case ev.Shared(block, refs):
                self.add("share", f"block {block} has {count_of(refs, 'reference')}", block=block)
            case ev.Released(block, refs, is_cached):
                left, place = count_of(refs, "reference"), "the prefix cache" if is_cached else "the free blocks"
                kind, text = ("decrement", f"has {left} left") if refs else ("release", f"returns to {place}")
                self.add(kind, f"block {block} {text}", block=block)
            case ev.Copied(src, dst):
                # The pool decrements the count before the device copies; the other order explains it better.
                released = self.latest.pop()
                self.add("copy", f"block {src} is copied to {dst}", block=dst, source=src)
                self.latest.append(released)
            case ev.Sealed(block):
                self.add("seal", f"block {block} is full and sealed: it can be found", block=block)
            case ev.Evicted(block):
                self.add("evict", f"block {block} is evicted from the prefix cache", block=block)
