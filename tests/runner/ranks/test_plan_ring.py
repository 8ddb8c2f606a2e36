"""The ring: every reader gets every message, in order; faults that are planted in its memory are noticed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import DeviceLostError
from octavo.runner.ranks import plan_ring
from octavo.runner.ranks.plan_ring import LINE, PlanReader, PlanRing, PlanWriter, RingError
from octavo.runner.ranks.shared_memory import SharedMemory, make_file

CAPACITY = 1000
ROOT = Path(__file__).parents[3]


class Ring:
    """A ring in this process, with a writer and readers."""

    def __init__(self, num_readers: int = 2, capacity: int = CAPACITY) -> None:
        self.fd = make_file()
        self.memory = SharedMemory(self.fd, PlanRing.num_bytes(num_readers, capacity))
        self.ring = PlanRing(self.memory, num_readers, capacity=capacity)
        self.pipes = [os.pipe() for _ in range(num_readers)]
        self.writer = PlanWriter(self.ring, [pipe[1] for pipe in self.pipes])
        self.readers = [PlanReader(self.ring, i, pipe[0]) for i, pipe in enumerate(self.pipes, 1)]

    def close(self) -> None:
        self.ring.release()
        self.memory.close()
        for fd in (self.fd, *(fd for pipe in self.pipes for fd in pipe)):
            os.close(fd)


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    ring.close()


def test_readers_get_every_message_in_order_whatever_its_size(ring: Ring) -> None:
    rng = random.Random(0)
    messages = [rng.randbytes(rng.choice([0, 1, 30, 200, 999, 5000])) for _ in range(300)]
    got: list[list[bytes | None]] = [[], []]

    def read(reader: int) -> None:
        for i in range(len(messages)):
            got[reader].append(ring.readers[reader].receive(10.0))
            if i % 50 == reader:
                time.sleep(0.005)  # the writer waits for the slowest one

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        ring.writer.send(message)
    for thread in threads:
        thread.join()
    assert got == [messages, messages]


def test_a_reader_without_messages_returns_at_its_timeout(ring: Ring) -> None:
    begin = time.perf_counter()
    assert ring.readers[0].receive(0.01) is None
    assert time.perf_counter() - begin >= 0.01


def test_an_idle_reader_sleeps_and_a_message_wakes_it(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_ring, "WAKE_S", 30.0)  # only the pipe can wake it
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(ring.readers[1].receive()))
    thread.start()
    while not ring.ring.numbers[2 * LINE + 1]:
        time.sleep(0.001)
    used = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.1  # of one core
    ring.writer.send(b"wake")
    thread.join(5.0)
    assert got == [b"wake"]


def fill(ring: Ring, **options: float) -> None:
    """Write more than the ring holds, which reader 1 alone reads."""
    for _ in range(20):
        ring.writer.send(b"b" * 100, **options)
        ring.readers[0].receive()


def test_the_writer_waits_a_bounded_time_for_the_slowest_reader(ring: Ring) -> None:
    ring.writer.send(b"a" * 100)
    assert ring.readers[0].receive() == b"a" * 100
    with pytest.raises(RingError, match=r"rank 2 has read no plan for 0.05 s"):
        fill(ring, timeout_s=0.05)


def test_a_waiting_writer_hears_that_a_reader_is_gone(ring: Ring) -> None:
    def check() -> None:
        raise DeviceLostError("rank 2 was killed")

    ring.writer._check = check
    with pytest.raises(DeviceLostError, match="rank 2 was killed"):
        fill(ring)


def test_a_reader_that_is_gone_does_not_stop_the_others(ring: Ring) -> None:
    ring.ring.numbers[LINE + 1] = 1  # reader 1 is asleep
    os.close(ring.pipes[0][0])
    ring.pipes[0] = (os.dup(ring.fd), ring.pipes[0][1])  # closed at the end
    ring.writer.send(b"one")
    assert ring.readers[1].receive() == b"one"


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", range(0, 8 * (20 + 11), 7))
def test_a_flipped_bit_is_noticed_anywhere_in_a_piece(ring: Ring, bit: int) -> None:
    ring.writer.send(b"first")
    for reader in ring.readers:
        assert reader.receive() == b"first"
    begin = ring.writer._written
    ring.writer.send(b"hello world")
    ring.ring.bytes[begin + bit // 8] ^= 1 << bit % 8
    for reader in ring.readers:
        with pytest.raises(RingError):
            reader.receive()


def test_a_lost_message_is_noticed(ring: Ring) -> None:
    ring.writer.send(b"one")
    ring.readers[0]._read = ring.ring.numbers[0]
    ring.writer.send(b"two")
    with pytest.raises(RingError, match="piece 1 of the ring came in place of piece 0"):
        ring.readers[0].receive()
    assert [ring.readers[1].receive() for _ in range(2)] == [b"one", b"two"]


def test_a_repeated_message_is_noticed(ring: Ring) -> None:
    ring.writer.send(b"one")
    assert ring.readers[0].receive() == b"one"
    ring.readers[0]._read = 0
    with pytest.raises(RingError, match="piece 0 of the ring came in place of piece 1"):
        ring.readers[0].receive()


def test_an_overrun_is_noticed(ring: Ring) -> None:
    """A writer that does not wait overwrites what was not read."""
    ring.writer._positions = lambda: [ring.writer._written]  # type: ignore[method-assign]
    for _ in range(20):
        ring.writer.send(b"x" * 100)
    with pytest.raises(RingError, match="unread bytes"):
        ring.readers[0].receive()


def test_a_position_that_runs_backwards_is_noticed(ring: Ring) -> None:
    ring.writer.send(b"one")
    assert ring.readers[0].receive() == b"one"
    ring.ring.numbers[0] = 0
    with pytest.raises(RingError, match="unread bytes"):
        ring.readers[0].receive()


def test_a_message_whose_rest_is_anothers_is_noticed(ring: Ring) -> None:
    ring.writer._write(memoryview(b"begin"), 7)
    ring.writer._write(memoryview(b"other"), 0)
    with pytest.raises(RingError, match="belongs to another message"):
        ring.readers[0].receive()


CHILD = """
import sys
from octavo.runner.ranks.plan_ring import PlanReader, PlanRing
from octavo.runner.ranks.shared_memory import SharedMemory
ring = PlanRing(SharedMemory(int(sys.argv[1])), 1, capacity=int(sys.argv[3]))
reader, total = PlanReader(ring, 1, int(sys.argv[2])), 0
while message := reader.receive():
    total = (total * 31 + sum(message)) % 1000003
print(total)
"""


def test_another_process_reads_what_was_written() -> None:
    ring = Ring(1, 10_000)
    fds = [ring.fd, ring.pipes[0][0]]
    command = [sys.executable, "-c", CHILD, *map(str, fds), "10000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=fds, cwd=ROOT)
    rng, total = random.Random(1), 0
    for i in range(2000):
        message = rng.randbytes(rng.randrange(1, 4000))
        total = (total * 31 + sum(message)) % 1000003
        ring.writer.send(message)
        if i % 500 == 0:
            time.sleep(0.01)  # the reader falls asleep
    ring.writer.send(b"")
    assert child.communicate(timeout=60)[0] == f"{total}\n"
    ring.close()
