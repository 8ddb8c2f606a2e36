"""Memory that several GPUs of a host share, and the collectives of tensor parallelism over it."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear.skinny import make_normed_residual
from octavo.kernels.triton.reduce import (
    NO_LIMIT,
    PeerBuffers,
    buffer_shape,
    push_add,
    push_gather,
    push_reduce,
)

logger = logging.getLogger("octavo")
MAX_PUSHED_BYTES = 1 << 20
"""Larger messages take NCCL: a pushed word is twice as long as its number."""


class PeerReducer:
    """Sums and gathers over the ranks of a group, each with a GPU of the same host. All methods are collective.

    Small messages are pushed through peer memory, see `reduce`; the others take the group's NCCL, and so do all where a
    GPU cannot reach another's memory. CUDA graphs can capture both.

    buffers  None: all messages take NCCL
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        max_bytes: int = MAX_PUSHED_BYTES,
        *,
        spin_limit: int = NO_LIMIT,
    ) -> None:
        self.group, self.size = group, group.size()
        self.buffers = open_buffers(group, device, max_bytes, spin_limit)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in x's memory if that is contiguous: the same bits on all ranks."""
        x = x.contiguous()
        if self.buffers is not None and x.numel() and self.buffers.fits(1, x.nbytes):
            return push_reduce(self.buffers, x)
        dist.all_reduce(x, group=self.group)
        return x

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
        """residual + the sum of all ranks' partial [num_tokens, size], with the next norm's weight, norm [size]."""
        num_tokens, size = partial.shape
        if self.buffers is not None and self.buffers.fits(num_tokens, size * partial.itemsize):
            return push_add(self.buffers, residual, partial, norm)
        return make_normed_residual(residual.x + self.all_reduce(partial), norm)

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, m] of each rank -> [n, size * m], rank r's columns from r * m on."""
        x, (n, m) = x.contiguous(), x.shape
        if self.buffers is not None and n and self.buffers.fits(n, m * x.itemsize):
            return push_gather(self.buffers, x)
        parts = x.new_empty(self.size * n, m)
        dist.all_gather_into_tensor(parts, x, group=self.group)
        return parts.view(self.size, n, m).transpose(0, 1).reshape(n, self.size * m)

    def gave_up(self) -> bool:
        """True once a kernel has waited longer than the spin limit: its results are wrong. Waits for the device."""
        return self.buffers is not None and bool(self.buffers.status.item())


def open_buffers(
    group: dist.ProcessGroup, device: torch.device, max_bytes: int, spin_limit: int = NO_LIMIT
) -> PeerBuffers | None:
    """Allocate this rank's buffer and map the others'; None on every rank if one cannot."""
    from torch.distributed import _symmetric_memory as symmetric_memory  # private to torch: an engine must start

    rank, size = group.rank(), group.size()
    devices: list[int] = [0] * size
    dist.all_gather_object(devices, device.index, group=group)
    reachable = all(other == device.index or torch.cuda.can_device_access_peer(device, other) for other in devices)
    if not _on_all(reachable, group, device):
        logger.info("%s: sums over ranks take NCCL: a GPU cannot access another's memory", device)
        return None
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # unused, and it needs rights that containers lack
    mine, addresses, problem = None, [0] * size, ""
    try:
        mine = symmetric_memory.empty(*buffer_shape(size, max_bytes), dtype=torch.int64, device=device).zero_()
        torch.cuda.synchronize(device)  # no rank writes before all are zero: `_on_all` is a barrier
        addresses = list(symmetric_memory.rendezvous(mine, group).buffer_ptrs)
    except (RuntimeError, AttributeError) as error:
        problem = " ".join(str(error).split())[:200]
    if not _on_all(not problem, group, device) or mine is None:
        logger.warning("%s: sums over ranks take NCCL: %s", device, problem or "another rank has no peer memory")
        return None
    return PeerBuffers(
        rank,
        size,
        mine,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(mine.shape[2], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        spin_limit,
    )


def _on_all(condition: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the condition holds on all ranks."""
    flag = torch.tensor([condition], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
