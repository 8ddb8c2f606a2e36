"""An executor in another process: reads encoded plans from stdin, answers with the tokens of the oracle's model.

    python tests/core/plan_worker.py NUM_BLOCKS BLOCK_SIZE NUM_HOST_BLOCKS NUM_ROWS

Each message has four bytes of length in front. It uses the plans alone: no scheduler runs here.
"""

from __future__ import annotations

import struct
import sys
from typing import Any, BinaryIO

from octavo.core.plan import RowSetup, StepPlan, StepResult

VOCAB = 5


def send(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("=I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    size = stream.read(4)
    return stream.read(*struct.unpack("=I", size)) if size else None


class Device:
    """Slots hold a hash of the slot before, the position and the token, as in `tests.proof.oracle`."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, num_rows: int) -> None:
        self.size = block_size
        self.kv: list[list[int]] = [[0] * block_size for _ in range(num_blocks + 1)]
        self.host: list[list[int]] = [[0] * block_size for _ in range(num_host_blocks + 1)]
        self.tables: list[list[int]] = [[] for _ in range(num_rows)]
        self.last, self.done = [0] * num_rows, [False] * num_rows
        self.setup: dict[int, RowSetup] = {}

    def run(self, plan: StepPlan) -> list[list[Any]]:
        for setup in plan.row_setups:
            self.setup[setup.row] = setup
        for row, start, block_ids in plan.table_writes:
            self.tables[row][start : start + len(block_ids)] = block_ids
        for src, dst in plan.swap_outs:
            self.host[dst] = list(self.kv[src])
        for src, dst in plan.swap_ins:
            self.kv[dst] = list(self.host[src])
        for src, dst in plan.copies:
            self.kv[dst] = list(self.kv[src])
        return [self._slice(plan, i) for i in range(len(plan.rows))]

    def _slice(self, plan: StepPlan, i: int) -> list[Any]:
        row, start, num_sampled = plan.rows[i], plan.starts[i], plan.num_sampled[i]
        known, setup, table = plan.host_tokens.get(i), self.setup[plan.rows[i]], self.tables[plan.rows[i]]
        self.done[row] = self.done[row] and known is None
        if self.done[row]:
            return [0] * num_sampled
        end, size, out = start + plan.counts[i], self.size, list[Any]()
        h = self.kv[table[(start - 1) // size]][(start - 1) % size] if start else hash((77, 0))
        for position in range(start, end):
            j = position - start
            h = hash((h, position, known[j] if known is not None and j < len(known) else self.last[row]))
            self.kv[table[position // size]][position % size] = h
            if position < end - num_sampled:
                continue
            indices = range(plan.num_samples[i]) if i in plan.num_samples else (setup.sample_index,)
            out += (sampled := [hash((h, 5, index)) % VOCAB for index in indices])
            self.last[row], self.done[row] = sampled[0], sampled[0] in setup.stop_ids
            if self.done[row]:
                return out + [0] * (end - 1 - position)
        return out


if __name__ == "__main__":
    device = Device(*map(int, sys.argv[1:]))
    while (message := receive(sys.stdin.buffer)) is not None:
        send(sys.stdout.buffer, StepResult(device.run(StepPlan.decode(message))).encode())
