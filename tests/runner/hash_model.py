"""A model whose slots and logits are hashes, and its executor. `test_oracle_workloads` explains its use."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import Capacity, GrammarBitmask
from octavo.kernels.metadata import RaggedBatch
from octavo.runner.executor import StepHandle, make_executor
from octavo.runner.model_runner import ModelRunner
from octavo.runner.platform import Platform
from tests.proof import oracle as o
from tests.proof.workloads import World

MAX_LEN = 128
WORD = (1 << 64) - 1


def mix(before: int, position: int, token: int) -> int:
    x = (before * 0x2545F4914F6CDD1D + position * 0x5851F42D4C957F2D + token * 0x369DEA0F31A53F85 + 77) & WORD
    return x ^ (x >> 29)


def logits_of(visible: Iterable[int]) -> list[float]:
    """Logits of the position whose query attends to these values. No two are equal: top tokens have one order."""
    h = mix(sum(visible), 0, 0)
    return [(h >> 8 * token & 0xFF) / 64 + token / 1024 for token in range(o.VOCAB)]


class HashModel:
    """Writes the hash of each position to its slot as K, and the inverted bits as V. No layer has weights."""

    def __init__(self, attention_window: int) -> None:
        self.attention_window = attention_window

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        slots = kv.numpy().view(np.uint64)[:, 0, :, 0, :, 0]  # [num_blocks + 1, 2, block_size], the same memory
        size, tables, begins = slots.shape[2], batch.block_tables.tolist(), batch.query_start.tolist()
        tokens, positions, targets = token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
        wanted = set(range(len(tokens)) if logits_rows is None else logits_rows.tolist())
        found = dict.fromkeys(wanted, [0.0] * o.VOCAB)
        for table, begin, end, length in zip(tables, begins, begins[1:], batch.seq_lens.tolist(), strict=False):
            for i in range(begin, end if length else begin):
                p = positions[i]
                before = self._read(slots, table, p - 1, p) if p else [0]
                slots[targets[i] // size, :, targets[i] % size] = (h := mix(before[0], p, tokens[i])), ~h & WORD
                if i in wanted:
                    first = p - self.attention_window + 1 if self.attention_window else 0
                    found[i] = logits_of(self._read(slots, table, max(0, first), p + 1))
        lines = range(len(tokens)) if logits_rows is None else logits_rows.tolist()
        return torch.tensor([found[i] for i in lines]).view(-1, o.VOCAB)

    def _read(self, slots: np.ndarray, table: list[int], begin: int, end: int) -> list[int]:
        size = slots.shape[2]
        both = [slots[table[p // size], :, p % size].tolist() for p in range(begin, end)]
        return [k if k == ~v & WORD else k ^ v for k, v in both]


class Sizes(NamedTuple):
    num_blocks: int
    num_host_blocks: int
    block_size: int
    attention_window: int
    num_rows: int
    max_num_tokens: int
    decode_window: int
    num_speculative_tokens: int

    @classmethod
    def of(cls, world: World) -> Sizes:
        cache, scheduler = world.cache, world.scheduler
        num_blocks = cache.pool.num_blocks, cache.swap_space.num_blocks
        budget = scheduler.max_num_batched_tokens
        decode = scheduler.decode_window, scheduler.num_speculative_tokens
        return cls(*num_blocks, cache.block_size, cache.attention_window, world.rows, budget, *decode)


class HashExecutor:
    """The real executor of a `HashModel`. Plans, bitmasks and results pass through their bytes."""

    def __init__(self, sizes: Sizes, platform: Platform, *, graphs: bool = False) -> None:
        shape = 1, 2, 1, sizes.block_size, 2  # one layer; a head of two float32 holds 64 bits
        self.kv = torch.zeros(sizes.num_blocks + 1, *shape)
        self.host_kv = torch.zeros(sizes.num_host_blocks + 1, *shape)
        runner = ModelRunner(
            HashModel(sizes.attention_window),
            self.kv,
            self.host_kv,
            platform,
            num_rows=sizes.num_rows,
            max_model_len=MAX_LEN,
            max_num_tokens=sizes.max_num_tokens,
            max_decode_steps=sizes.decode_window,
            vocab_size=o.VOCAB,
            graphs=graphs,
            num_speculative_tokens=sizes.num_speculative_tokens,
        )
        self.runner = runner
        self.inner = make_executor(runner)
        self._submitted: list[StepHandle] = []
        self.close = self.inner.close

    def start(self) -> Capacity:
        return Capacity.decode(self.inner.start().encode())

    def submit(self, plan: StepPlan) -> HandleOfBytes:
        handle = self.inner.submit(StepPlan.decode(plan.encode()))
        self._submitted.append(handle)
        return HandleOfBytes(plan, handle)

    def flip_bit(self, block: int, chance: random.Random) -> None:
        """Flip a bit of a host block that has its checksum."""
        for handle in self._submitted:
            self.inner.wait_for_end(handle)
        self.inner.runner.state.swapper.checksums._thread.submit(int).result()  # the blocks before it are done
        self.host_kv[block].view(torch.uint8).view(-1)[chance.randrange(self.host_kv[block].nbytes)] ^= 4

    def spoil(self, plan: StepPlan) -> None:
        """Spoil the blocks that a plan moved."""
        for blocks, moves in ((self.kv, [*plan.swap_ins, *plan.copies]), (self.host_kv, plan.swap_outs)):
            for _, dst in moves:
                blocks[dst] = 6e6


class HandleOfBytes:
    def __init__(self, plan: StepPlan, inner: StepHandle) -> None:
        self.plan, self.inner = plan, inner

    @property
    def done(self) -> bool:
        return self.inner.done

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        self.inner.put_bitmask(None if masks is None else GrammarBitmask.decode(masks.encode()))

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        part = self.inner.poll(timeout_s)
        return None if part is None else StepResult.decode(part.encode())

    def result(self) -> StepResult:
        return StepResult.decode(self.inner.result().encode())
