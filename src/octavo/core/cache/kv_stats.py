"""Statistics of the KV cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVStats:
    """Statistics of the KV cache, in blocks unless the name states otherwise.

    num_hits, num_misses   prompt blocks found, or not found, in the prefix cache at a request's first admission
    hit_rate               hits / (hits + misses), 0 before the first lookup
    num_saved_by_sharing   block table entries beyond the first of each used block: blocks that copies would take
    num_unfilled_slots     slots of used blocks without a token; fewer than block_size per sequence and group
    num_corrupt            swapped-in blocks whose content had changed on the host; they were recomputed
    num_dropped            released by running sequences because they left the attention window
    num_pinned             kept by pins, or reserved for pins that are being computed
    """

    num_blocks: int
    block_size: int
    num_used: int
    num_cached: int
    num_free: int
    num_hits: int
    num_misses: int
    num_hit_tokens: int
    num_queried_tokens: int
    hit_rate: float
    num_saved_by_sharing: int
    num_unfilled_slots: int
    num_sealed: int
    num_evicted: int
    num_copied: int
    num_dropped: int
    num_swapped_out: int
    num_swapped_in: int
    num_corrupt: int
    num_host_blocks: int
    num_host_used: int
    num_pinned: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
