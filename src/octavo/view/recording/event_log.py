"""The latest events, kept in case somebody asks what has just happened (`view.flight` can run it again)."""

from __future__ import annotations

from collections import deque

from octavo.core.events import Event


class Recorder:
    """Subscribe it: `events.subscribe(recorder)`, with `blocks=True` for blocks' events too."""

    def __init__(self, capacity: int = 65_536) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)
        self._append = self.events.append

    def __call__(self, event: Event) -> None:
        self._append(event)
