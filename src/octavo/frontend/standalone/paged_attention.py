"""PagedAttention without an engine: the engine's block tables and kernels, for a model of your own.

See docs/paged-attention.md and examples/paged_attention.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.cache.kv_stats import KVStats
from octavo.core.cache.prefix_index import Prefix
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence
from octavo.errors import CapacityError, ParameterError
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import Ops
from octavo.params.sampling_params import SamplingParams


@dataclass(slots=True)
class _Entry:
    """A sequence's block table, and how many of its tokens have K and V in each layer."""

    table: Sequence
    num_tokens: list[int]


class PagedAttention:
    """K and V of sequences in a fixed pool of blocks, and attention over them.

    num_blocks    blocks in the pool. It never grows: `append_kv` raises `CapacityError` when it is full
    block_size    tokens per block
    num_kv_heads  default: num_heads. With fewer, neighbouring query heads share a K/V head
    num_layers    all layers share one block table per sequence
    ops           operations on the pool: `kernels.reference` in any dtype, or `kernels.cpu.ops`, faster on a CPU
    kv            [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], the pool; block 0 is never used
    manager       the engine's own bookkeeping of blocks

    A sequence id is any int. Every method checks its arguments first: a call that raises has changed nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops = reference,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(num_blocks, block_size, num_heads, head_dim, num_kv_heads, num_layers) < 1 or num_heads % num_kv_heads:
            raise ParameterError("sizes are at least 1, and num_heads is a multiple of num_kv_heads")
        self.q_shape, self.kv_shape = (num_heads, head_dim), (num_kv_heads, head_dim)
        self.ops = ops
        self.kv = torch.zeros(
            num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device
        )
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=False)
        self._request = Request("paged_attention", [0], SamplingParams())  # the owner that a block table needs
        self._entries: dict[int, _Entry] = {}
        self._next_id = 0

    def append_kv(self, seq_id: int, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Write K and V of the sequence's next tokens in a layer. An unknown id begins a sequence.

        k, v  [num_kv_heads, head_dim] for one token, or [num_tokens, num_kv_heads, head_dim]
        """
        k, v = (_tokens(x, self.kv_shape).to(self.kv).contiguous() for x in (k, v))  # whatever its strides
        if len(k) != len(v):
            raise ParameterError(f"k has {len(k)} tokens and v has {len(v)}", param="v")
        kv_layer = self._layer(layer)
        entry = self._entries.get(seq_id) or self._new_entry([0] * self.kv.shape[1])
        length, table, pool = entry.num_tokens[layer] + len(k), entry.table, self.manager.pool
        num_new = max(0, length - table.num_computed)  # 0 in every layer but the first to get them
        if num_new and (needed := self.manager.blocks_needed([(table, num_new)])) > pool.num_available:
            raise CapacityError(
                f"sequence {seq_id} needs {needed} more blocks; {pool.num_available} of {pool.num_blocks} are free; "
                "free a sequence, or make a larger pool"
            )
        self._entries[seq_id], self._next_id = entry, max(self._next_id, seq_id + 1)
        if not table.block_ids:
            self.manager.attach(table, Prefix([], [], 0))
        if num_new:
            plan = StepPlan()
            self.manager.grow(table, num_new, plan)
            table.num_computed += num_new
            if plan.copies:
                src_ids, dst_ids = torch.tensor(plan.copies, device=self.kv.device).unbind(1)
                self.ops.block_copy(self.kv, src_ids, dst_ids)  # in all layers
        entry.num_tokens[layer] = length
        slots = self._batch([entry], [len(k)], layer).slot_mapping
        self.ops.kv_write(k, v, kv_layer, slots)

    def compute_attention(self, seq_id: int, q: Tensor, layer: int = 0) -> Tensor:
        """Attention of a sequence's last tokens, whose K and V are appended already -> the shape of q.

        q  [num_heads, head_dim] for the last token, or [num_tokens, num_heads, head_dim]. Each sees the keys up to its
           own
        """
        queries = _tokens(q, self.q_shape)
        return self.compute_batch([seq_id], queries, layer, query_lens=[len(queries)]).view_as(q)

    def compute_batch(
        self, seq_ids: Seq[int], q: Tensor, layer: int = 0, *, query_lens: Seq[int] | None = None
    ) -> Tensor:
        """Attention of several sequences' last tokens in one call -> the shape of q.

        q           [num_tokens, num_heads, head_dim], the sequences one after the other
        query_lens  tokens of each sequence; default: one each
        """
        queries, kv_layer = _tokens(q, self.q_shape), self._layer(layer)
        query_lens = [1] * len(seq_ids) if query_lens is None else list(query_lens)
        entries = [self._entry(seq_id) for seq_id in seq_ids]
        if len(query_lens) != len(entries) or sum(query_lens) != len(queries):
            raise ParameterError(f"q has {len(queries)} tokens, and query_lens {query_lens}", param="q")
        for seq_id, entry, count in zip(seq_ids, entries, query_lens, strict=True):
            if not 0 <= count <= entry.num_tokens[layer]:
                raise ParameterError(
                    f"{count} queries of sequence {seq_id}, which has {entry.num_tokens[layer]} tokens in layer "
                    f"{layer}; append their K and V first",
                    param="q",
                )
        batch = self._batch(entries, query_lens, layer)
        return self.ops.paged_attention(queries, kv_layer, batch, scale=self.q_shape[1] ** -0.5).view_as(q)

    def fork(self, seq_id: int) -> int:
        """Begin a sequence with the same tokens, and return its id. It shares all blocks.

        The first to write into a shared last block gets a copy of it.
        """
        parent = self._entry(seq_id)
        if len(set(parent.num_tokens)) > 1:
            raise ParameterError(f"sequence {seq_id} has {parent.num_tokens} tokens in its layers; append to all first")
        new_id, self._next_id = self._next_id, self._next_id + 1
        child = self._entries[new_id] = self._new_entry(parent.num_tokens[:])
        self.manager.fork(parent.table, child.table)
        return new_id

    def free_sequence(self, seq_id: int) -> None:
        """Give back the blocks that no other sequence shares. Does nothing for an unknown id."""
        if (entry := self._entries.pop(seq_id, None)) is not None:
            self.manager.free(entry.table)

    def stats(self) -> KVStats:
        """Count the blocks: used, free, shared, copied, and slots without a token."""
        return self.manager.stats()

    def _new_entry(self, num_tokens: list[int]) -> _Entry:
        return _Entry(Sequence(self._request, 0, array("i"), 0), num_tokens)

    def _entry(self, seq_id: int) -> _Entry:
        if seq_id not in self._entries:
            raise ParameterError(f"no sequence {seq_id}; append_kv begins one", param="seq_id")
        return self._entries[seq_id]

    def _layer(self, layer: int) -> Tensor:
        if not 0 <= layer < self.kv.shape[1]:
            raise ParameterError(f"layer is {layer}, and num_layers {self.kv.shape[1]}", param="layer")
        return self.kv[:, layer]

    def _batch(self, entries: list[_Entry], query_lens: Seq[int], layer: int) -> RaggedBatch:
        lengths, tables = [entry.num_tokens[layer] for entry in entries], [entry.table.block_ids for entry in entries]
        return RaggedBatch.from_lists(query_lens, lengths, tables, self.manager.block_size, device=self.kv.device)


def _tokens(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """One token's heads or several tokens' -> [num_tokens, *shape]."""
    if x.shape[-2:] != shape or x.dim() > 3:
        raise ParameterError(f"a tensor has shape {list(x.shape)}; expected {list(shape)} or [num_tokens, ...] of it")
    return x.reshape(-1, *shape)
