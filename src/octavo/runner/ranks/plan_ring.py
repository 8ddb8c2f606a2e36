"""A ring of messages in shared memory: one process writes, several read, and every reader gets every message.

    numbers   | written | read by 1, asleep | read by 2, asleep | ...        one cache line each
    bytes     | piece | piece | ...                                          a piece is a header and a part of a message

Positions count bytes from the start and never wrap. The writer waits until the slowest reader has made room. A reader
first spins, since the next plan mostly comes soon. Then it sleeps on a pipe, and the writer wakes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Sequence

from octavo.errors import PlanError
from octavo.runner.ranks.shared_memory import SharedMemory, fence

LINE = 8
"""Numbers of a cache line."""
CAPACITY = 4 << 20
"""Bytes of the ring. The largest plans, of long prompts, have some hundred KB."""
SPIN_S = 1e-3
"""How long a reader spins before it sleeps."""
WAKE_S = 0.05
"""Longest sleep of a reader, should a wake-up be lost."""
TORN_S = 1e-3
"""How long a piece may look torn: a processor may show its bytes later than its position."""
WRITE_TIMEOUT_S = 60.0
PAUSE_S = 2e-5

_HEADER = struct.Struct("=Q3I")  # number of the piece, its bytes, bytes of the message that follow it, CRC


class RingError(PlanError):
    """The messages of a ring are not those that were written, or cannot be written."""


class PlanRing:
    """Its memory, as writer and readers see it. `PlanWriter` and `PlanReader` use it.

    first  index of the ring's first byte in the memory, a multiple of 64
    """

    def __init__(self, memory: SharedMemory, num_readers: int, first: int = 0, capacity: int = CAPACITY) -> None:
        num_lines = 1 + num_readers
        self.num_readers, self.capacity = num_readers, capacity
        self.numbers = memory.numbers[first // 8 : first // 8 + num_lines * LINE]
        begin = first + 8 * LINE * num_lines
        self.bytes = memory.bytes[begin : begin + capacity]

    @staticmethod
    def num_bytes(num_readers: int, capacity: int = CAPACITY) -> int:
        return 8 * LINE * (1 + num_readers) + capacity

    def copy_in(self, position: int, data: bytes | memoryview) -> None:
        start = position % self.capacity
        first = min(len(data), self.capacity - start)
        self.bytes[start : start + first] = data[:first]
        self.bytes[: len(data) - first] = data[first:]

    def copy_out(self, position: int, size: int) -> bytes:
        start = position % self.capacity
        first = min(size, self.capacity - start)
        return bytes(self.bytes[start : start + first]) + bytes(self.bytes[: size - first])

    def release(self) -> None:
        self.numbers.release()
        self.bytes.release()


def checksum(header: bytes, part: bytes | memoryview) -> int:
    """Of a piece; header: with 0 in place of the checksum."""
    return zlib.crc32(part, zlib.crc32(header))


class PlanWriter:
    """The writing end.

    wake   of each reader: the descriptor of its pipe
    check  called while the writer waits; it raises if no reader will read any more
    """

    def __init__(self, ring: PlanRing, wake: Sequence[int], check: Callable[[], None] = lambda: None) -> None:
        self._ring, self._wake, self._check = ring, wake, check
        self._written = self._number = 0
        self._most = ring.capacity // 4 - _HEADER.size  # of a piece: readers work on one while the next is written

    def send(self, message: bytes, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Write a message. Raises `RingError` if a reader makes no room in time."""
        deadline, rest = time.monotonic() + timeout_s, memoryview(message)
        while True:
            part, rest = rest[: self._most], rest[self._most :]
            self._wait_for_room(_HEADER.size + len(part), deadline, timeout_s)
            self._write(part, len(rest))
            if not rest:
                return

    def _write(self, part: memoryview, num_following: int) -> None:
        ring, header = self._ring, (self._number, len(part), num_following)
        crc = checksum(_HEADER.pack(*header, 0), part)
        ring.copy_in(self._written, _HEADER.pack(*header, crc))
        ring.copy_in(self._written + _HEADER.size, part)
        self._number += 1
        self._written += _HEADER.size + len(part)
        fence()
        ring.numbers[0] = self._written
        fence()
        for reader, fd in enumerate(self._wake, 1):
            if ring.numbers[reader * LINE + 1]:
                ring.numbers[reader * LINE + 1] = 0
                with contextlib.suppress(OSError):  # of a reader that is gone, as others notice
                    os.write(fd, b"\0")

    def _wait_for_room(self, size: int, deadline: float, timeout_s: float) -> None:
        ring = self._ring
        while self._written + size - min(positions := self._positions()) > ring.capacity:
            self._check()
            if time.monotonic() > deadline:
                slowest = positions.index(min(positions)) + 1
                raise RingError(f"rank {slowest} has read no plan for {timeout_s:g} s; it hangs")
            time.sleep(PAUSE_S)

    def _positions(self) -> list[int]:
        return [self._ring.numbers[reader * LINE] for reader in range(1, self._ring.num_readers + 1)]


class PlanReader:
    """A reading end.

    reader  its number, from 1 on
    wake    the descriptor of its pipe
    """

    def __init__(self, ring: PlanRing, reader: int, wake: int) -> None:
        self._ring, self._line, self._wake = ring, reader * LINE, wake
        self._read = self._number = 0
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None after `timeout_s` without one. None: waits for ever.

        Raises `RingError` if a message is lost, repeated or torn: its plans cannot be trusted any more.
        """
        parts: list[bytes] = []
        num_following = -1
        while num_following:
            if not self._wait(None if parts else timeout_s):
                return None
            part, left = self._next_piece()
            if parts and left + len(part) != num_following:
                raise RingError(
                    f"piece {self._number - 1} of the ring belongs to another message; its bytes are damaged"
                )
            parts.append(part)
            num_following = left
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait for the next piece. Returns False after `timeout_s`."""
        numbers, begin = self._ring.numbers, time.perf_counter()
        while numbers[0] == self._read:
            waited = time.perf_counter() - begin
            if timeout_s is not None and waited >= timeout_s:
                return False
            if waited < SPIN_S:
                os.sched_yield()
                continue
            numbers[self._line + 1] = 1
            fence()
            if numbers[0] == self._read:
                sleep_s = WAKE_S if timeout_s is None else min(WAKE_S, timeout_s - waited)
                if self._poll.poll(1000 * sleep_s):
                    os.read(self._wake, 64)
            numbers[self._line + 1] = 0
        return True

    def _next_piece(self) -> tuple[bytes, int]:
        """Returns a part of a message, and the bytes of the message that follow it."""
        deadline = time.perf_counter() + TORN_S
        while True:
            try:
                part, num_following = self._check_piece()
                break
            except RingError:
                if time.perf_counter() > deadline:
                    raise
        self._number += 1
        self._read += _HEADER.size + len(part)
        fence()
        self._ring.numbers[self._line] = self._read
        return part, num_following

    def _check_piece(self) -> tuple[bytes, int]:
        ring = self._ring
        num_unread = ring.numbers[0] - self._read
        if not _HEADER.size <= num_unread <= ring.capacity:
            raise RingError(f"the ring has {num_unread} unread bytes, and a capacity of {ring.capacity}; it is damaged")
        number, size, num_following, crc = _HEADER.unpack(ring.copy_out(self._read, _HEADER.size))
        if number != self._number:
            raise RingError(
                f"piece {number} of the ring came in place of piece {self._number}; plans are lost or repeated"
            )
        if size > num_unread - _HEADER.size:
            raise RingError(
                f"piece {number} of the ring has {size} bytes, more than were written; its bytes are damaged"
            )
        part = ring.copy_out(self._read + _HEADER.size, size)
        if checksum(_HEADER.pack(number, size, num_following, 0), part) != crc:
            raise RingError(f"piece {number} of the ring has another checksum; its bytes are damaged")
        return part, num_following
