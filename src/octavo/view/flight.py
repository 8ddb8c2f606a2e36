"""What arrived in the last minutes, kept so that it can be simulated: "why was it slow, and would this have helped?"

The dump is a trace for `octavo simulate`, in Mooncake's words: times, lengths, and names of the prompts' blocks, from
which it shows who shared what with whom. There is no text in it: names are digests under a key that nobody keeps.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.core import events as ev
from octavo.core.ids import block_names
from octavo.core.scheduler import Scheduler

KEEP_S = 600.0
MOST_KEPT = 100_000
MOST_NAMES = (1 << 30) - 16
"""Names are numbers below this: what a trace can hold."""


@dataclass(slots=True)
class _Arrival:
    time_s: float
    num_prompt: int
    hash_ids: list[int]
    n: int
    num_output: int | None = None  # of each sample; None: it runs


class FlightRecorder:
    """Keeps the arrivals of the last `keep_s` seconds, and those older ones that still run.

    An arrival costs a digest for each block of its prompt, and a number for it as long as it is kept; a step nothing.
    """

    def __init__(
        self, scheduler: Scheduler, *, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.keep_s = keep_s
        self.block_size = scheduler.cache.block_size
        self._scheduler = scheduler
        self._clock = clock
        self._key = secrets.token_bytes(16)
        self._ended: deque[_Arrival] = deque(maxlen=MOST_KEPT)
        self._running: dict[str, _Arrival] = {}
        self.detach = scheduler.events.subscribe(self._listen)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Arrived):
            request = self._scheduler.requests[event.request_id]
            names = block_names(request.prompt_token_ids, self.block_size, salt=self._key + request.salt)
            ids = [int.from_bytes(name[:8], "little") % MOST_NAMES for name in names]
            if event.num_prompt_tokens % self.block_size:
                ids.append(secrets.randbelow(MOST_NAMES))  # a part of a block is shared with nobody
            self._running[event.request_id] = _Arrival(self._clock(), event.num_prompt_tokens, ids, event.width)
        elif isinstance(event, ev.Finished):
            arrival = self._running.pop(event.request_id, None)
            if arrival is not None:
                arrival.num_output = -(-event.num_tokens // arrival.n)
                self._ended.append(arrival)
                self._forget()

    def _forget(self) -> None:
        before = self._clock() - self.keep_s
        while self._ended and self._ended[0].time_s < before:
            self._ended.popleft()

    def __len__(self) -> int:
        """Arrivals that a dump would tell of."""
        self._forget()
        return len(self._ended) + len(self._running)

    def dump(self, path: Path) -> int:
        """Write the trace, in order of arrival; returns how many there are. What runs yet counts as far as it is."""
        self._forget()
        running = [(arrival, self._so_far(name)) for name, arrival in self._running.items()]
        rows = [*((arrival, arrival.num_output or 0) for arrival in self._ended), *running]
        rows.sort(key=lambda row: row[0].time_s)
        with path.open("w", encoding="utf-8") as file:
            for arrival, num_output in rows:
                row = {
                    "timestamp": round(1e3 * (arrival.time_s - rows[0][0].time_s), 3),
                    "input_length": arrival.num_prompt,
                    "output_length": max(1, num_output),
                    "hash_ids": arrival.hash_ids,
                    "hash_tokens": self.block_size,
                    "n": arrival.n,
                }
                file.write(json.dumps(row) + "\n")
        return len(rows)

    def _so_far(self, request_id: str) -> int:
        request = self._scheduler.requests.get(request_id)
        lengths = [len(s.token_ids) for s in (*request.sequences, *request.done)] if request is not None else []
        return max(lengths, default=0) - (len(request.prompt_token_ids) if request is not None else 0)
