"""Anonymous memory that a process shares with its children through a file descriptor."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading

_order = threading.Lock()


def fence() -> None:
    """Order memory accesses before it and after it: a processor may reorder a write and a later read."""
    with _order:
        pass


def make_file() -> int:
    """The descriptor of an empty file without a name, which no other process can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-ranks", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="octavo-")
    os.unlink(path)
    return fd


class SharedMemory:
    """Memory of a file, as bytes and as numbers of 64 bits. Zeros at first.

    num_bytes  a multiple of 8. None: as large as the file is
    """

    def __init__(self, fd: int, num_bytes: int | None = None) -> None:
        if num_bytes is not None:
            os.ftruncate(fd, num_bytes)
        self._map = mmap.mmap(fd, num_bytes or os.fstat(fd).st_size)
        self.bytes = memoryview(self._map)
        self.numbers = self.bytes.cast("Q")  # aligned, so a number is written at once

    def close(self) -> None:
        """A second call does nothing."""
        self.numbers.release()
        self.bytes.release()
        self._map.close()
