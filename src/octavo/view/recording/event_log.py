"""Keeps the latest events in memory (`view.recording.recorder` keeps what is needed to replay them)."""

from __future__ import annotations

from collections import deque

from octavo.core.events import Event


class EventLog:
    """A subscriber: `events.subscribe(log)`, with `blocks=True` for the events of blocks too."""

    def __init__(self, capacity: int = 65_536) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)
        self._append = self.events.append

    def __call__(self, event: Event) -> None:
        self._append(event)
