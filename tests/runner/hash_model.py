"""A model whose slots and logits are hashes, and its executor. `test_oracle_workloads` explains its use."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain
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


def windows_of(world: World) -> tuple[int, ...]:
    """By group; 0: it sees all."""
    return world.cache.attention_window, *world.cache.windows


def in_group(h: int, group: int) -> int:
    return mix(h, group, 0) if group else h


def visible(values: Sequence[int], windows: Sequence[int]) -> list[int]:
    """What the last position's query sees of all positions' values, in all groups."""
    return [in_group(h, group) for group, window in enumerate(windows) for h in values[-window:]]


class HashModel:
    """Writes the hash of each position to its slot as K, and the inverted bits as V. No layer has weights.

    The slot in a window group has a hash of that and of the group.
    """

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows = windows

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        slots = kv.numpy().view(np.uint64)[:, 0, :, 0, :, 0]  # [num_blocks + 1, 2, block_size], the same memory
        size, begins = slots.shape[2], batch.query_start.tolist()
        groups = [batch.group(group) for group in range(len(self.windows))]
        all_tables = zip(*(group.block_tables.tolist() for group in groups), strict=True)
        tokens, positions = token_ids.tolist(), batch.positions.tolist()
        targets = list(zip(*(group.slot_mapping.tolist() for group in groups), strict=True))
        wanted = set(range(len(tokens)) if logits_rows is None else logits_rows.tolist())
        found = dict.fromkeys(wanted, [0.0] * o.VOCAB)
        for tables, begin, end, length in zip(all_tables, begins, begins[1:], batch.seq_lens.tolist(), strict=False):
            for i in range(begin, end if length else begin):
                p = positions[i]
                before = self._read(slots, tables[0], p - 1, p) if p else [0]
                h = mix(before[0], p, tokens[i])
                for group, target in enumerate(targets[i]):
                    own = in_group(h, group)
                    slots[target // size, :, target % size] = own, ~own & WORD
                if i in wanted:
                    firsts = [max(0, p - window + 1) if window else 0 for window in self.windows]
                    read = [self._read(slots, *ends, p + 1) for ends in zip(tables, firsts, strict=True)]
                    found[i] = logits_of(chain.from_iterable(read))
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
    num_rows: int
    max_num_tokens: int
    decode_window: int
    num_speculative_tokens: int
    windows: tuple[int, ...]

    @classmethod
    def of(cls, world: World) -> Sizes:
        cache, scheduler = world.cache, world.scheduler
        num_blocks = cache.pool.num_blocks, cache.swap_space.num_blocks
        budget = scheduler.max_num_batched_tokens
        decode = scheduler.decode_window, scheduler.num_speculative_tokens
        return cls(*num_blocks, cache.block_size, world.rows, budget, *decode, windows_of(world))


class HashExecutor:
    """The real executor of a `HashModel`. Plans, bitmasks and results pass through their bytes."""

    def __init__(self, sizes: Sizes, platform: Platform, *, graphs: bool = False) -> None:
        shape = 1, 2, 1, sizes.block_size, 2  # one layer; a head of two float32 holds 64 bits
        self.kv = torch.zeros(sizes.num_blocks + 1, *shape)
        self.host_kv = torch.zeros(sizes.num_host_blocks + 1, *shape)
        runner = ModelRunner(
            HashModel(sizes.windows),
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
            num_groups=len(sizes.windows),
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
