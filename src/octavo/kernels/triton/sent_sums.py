"""Sums of two ranks whose messages copy engines send, while this GPU's products run.

Long batches are computed in two parts. Each part's outputs of attention and of the MLP are sent once their product has
ended, while the next product of the other part runs: copies take no multiprocessor. One kernel then waits for the other
rank's message, and adds, normalises and stores.

* A message goes into its slot of the other rank's buffer. Behind it, a copy sets the slot's flag to the number of its
  use. Copies of a stream are done in their order, and each is complete before the next begins.
* Both ranks use a slot equally often, so they agree on the number without telling it. It is on the device: a CUDA
  graph's replay is one more use.
* Slots are used by turns, see `RankSums.send`, also from one pass to the next. So before a rank sends into a slot
  again, it has received a message that the other rank sent after it had read the slot: that of two slots earlier.
* A pass that fails halfway leaves flags behind. The group ends then.
* Two ranks' sum is the same in either order, so both have the same bits.
* The kernel gives up as those of `reduce` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor
from octavo.kernels.triton.norms import weigh
from octavo.kernels.triton.reduce import FLAG_BYTES, PeerBuffers, count_read

COLUMNS_OF_WARP = 1024


class CopyEngine(Protocol):
    """Copies memory of this GPU beside its kernels."""

    def copy(self, copies: Sequence[tuple[Tensor, int]]) -> Any:
        """Copy tensors to addresses, in this order, once the current stream's work is done -> their end."""
        ...

    def wait(self, end: Any) -> None:
        """The current stream's further work waits for the end of copies."""
        ...


@dataclass(frozen=True, slots=True)
class CopiedSum:
    """The sum of two ranks' partial [num_rows, size], sent into `slot`.

    end  of this rank's copies, which read `partial`
    """

    buffers: PeerBuffers
    engine: CopyEngine
    partial: Tensor
    slot: int
    end: Any

    @classmethod
    def send(cls, buffers: PeerBuffers, engine: CopyEngine, partial: Tensor, slot: int) -> CopiedSum:
        """partial: contiguous, of at most `buffers.sends.capacity` bytes"""
        sends = buffers.sends
        assert partial.is_contiguous() and partial.nbytes <= sends.capacity
        address = sends.peer + slot * sends.mine.shape[1]
        copies = [(partial, address + FLAG_BYTES), (sends.counters[slot, :1], address)]
        return cls(buffers, engine, partial, slot, engine.copy(copies))

    def add_rms_norm(self, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`reference.add_rms_norm` of the sum, rounded once, with the residual."""
        self.engine.wait(self.end)
        buffers, x = self.buffers, self.partial
        slot = buffers.sends.mine[self.slot]
        total, normed = torch.empty_like(x), torch.empty_like(x)
        columns = triton.next_power_of_2(x.shape[1])
        _add_sent[(len(x),)](
            *(x, residual.contiguous(), norm, total, normed),
            slot[FLAG_BYTES:].view(x.dtype),
            slot[:FLAG_BYTES].view(torch.int32),
            buffers.sends.counters[self.slot],
            *(buffers.status, buffers.stop, x.shape[1], buffers.spin_limit, eps),
            PADDED_SIZE=columns,
            LOOK_READS=buffers.look_reads,
            num_warps=min(max(columns // COLUMNS_OF_WARP, 8), 16),
            **pdl_options(x.device),
        )
        return normed, total


@triton.jit(do_not_specialize=["spin_limit"])
def _add_sent(
    x,
    residual,
    norm,
    total,
    normed,
    received,
    flag,
    counters,
    status,
    stop,
    row_size,
    spin_limit,
    eps,
    PADDED_SIZE: tl.constexpr,
    LOOK_READS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Receive a row, and normalise its sum."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    wait_for_predecessor(USE_PDL)
    column = tl.arange(0, PADDED_SIZE)
    valid = column < row_size
    offsets = tl.program_id(0).to(tl.int64) * row_size + column
    weight = tl.load(norm + column, mask=valid, other=0.0)
    own = tl.load(x + offsets, mask=valid, other=0.0).to(tl.float32)
    before = tl.load(residual + offsets, mask=valid, other=0.0).to(tl.float32)
    use = tl.load(counters)
    late, reads_left = 2, tl.where(tl.load(status) == 0, spin_limit, 0)  # 2: not read yet
    while (late == 2) | ((late == 1) & (reads_left > 0)):
        late = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") != use).to(tl.int32)
        reads_left = count_read(reads_left, status, stop, LOOK_READS)
    tl.debug_barrier()  # what one thread has acquired, all may read; and all have read the use
    if late != 0:
        tl.atomic_max(status, 1, sem="relaxed")  # LATE
    if tl.atomic_add(counters + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(counters + 1, 0)
        tl.store(counters, use + 1)
    other = tl.load(received + offsets, mask=valid, other=0.0, cache_modifier=".cg")  # L1 may have old data
    rounded = (own + other.to(tl.float32) + before).to(DTYPE)
    tl.store(total + offsets, rounded, mask=valid)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / row_size + eps)
    tl.store(normed + offsets, weigh(wide * scale, weight, DTYPE), mask=valid)
