"""Collectives of the ranks of one model: torch.distributed, without its global group, which belongs to the program."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from octavo.errors import EngineError
from octavo.models.linear import TensorParallel
from octavo.runner.ranks.status_board import StatusBoard

if TYPE_CHECKING:
    from octavo.kernels.triton.reduce import PeerBuffers

dist: Any = torch.distributed  # its types lack much of what it has
CONNECT_TIMEOUT_S = 60
COLLECTIVE_TIMEOUT_S = 1800
"""Of one collective: others may load their weights meanwhile. A supervisor ends a step that hangs far earlier."""


class Communicator:
    """One rank's end. All ranks call the same methods in the same order. Raises `EngineError` if some do not come.

    store_fd  an empty file without a name, the same for all ranks, through which they find each other

    Gloo connects the processes over the loopback. NCCL connects the GPUs, where there are some.
    """

    def __init__(self, board: StatusBoard, rank: int, size: int, store_fd: int, device: torch.device) -> None:
        self.rank, self.size, self._board = rank, size, board
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads, options._timeout = 1, timedelta(seconds=CONNECT_TIMEOUT_S)
        try:
            store = dist.FileStore(f"/proc/self/fd/{store_fd}", size)
            self._control: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
            self._group = self._control
            if device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
                self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl)
                self._group.allreduce([torch.zeros(1, device=device)]).wait()
        except RuntimeError as error:
            text = f"rank {rank} could not reach the others within {CONNECT_TIMEOUT_S} s"
            raise EngineError(f"{text}: {' '.join(str(error).split())[:200]}") from error
        self._control._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._device, self._is_host = device, device.type == "cpu"
        self._buffers: PeerBuffers | None = None

    def make_tensor_parallel(self, max_num_tokens: int, row_bytes: int) -> TensorParallel:
        """What a model sums with; called once.

        max_num_tokens  of a pass that may be computed in parts; 0: none is    row_bytes  of a token in a layer's output
        """
        if not self._is_host:
            from octavo.kernels.triton.peer_memory import make_reducer  # triton is not on every host

            group = self.rank, self.size, self._device, self.exchange, self.all_reduce, self.all_gather
            peers = make_reducer(*group, max_num_tokens, row_bytes)
            if peers is not None:
                self._buffers = peers.buffers
                return TensorParallel(self.rank, self.size, peers.all_reduce, peers.all_gather, peers)
        return TensorParallel(self.rank, self.size, self.all_reduce, self.all_gather)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, with equal bits on all of them. Reuses x's memory."""
        if self._is_host:  # in the order of ranks: a row's bits do not depend on the batch
            first, *others = self._gather(x)
            torch.add(first, others[0], out=x)
            for other in others[1:]:
                x += other
            return x
        self._board.begin_collective()
        self._group.allreduce([x]).wait()
        self._board.end_collective()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, m] -> [n, size * m], in the order of ranks."""
        return torch.cat(list(self._gather(x)), dim=1)

    def _gather(self, x: Tensor) -> Sequence[Tensor]:
        """x of each rank."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._board.begin_collective()
        self._group._allgather_base(out.view(-1), x.view(-1)).wait()
        self._board.end_collective()
        return out.unbind(0)

    # -- numbers of the hosts ------------------------------------------------------------------------------------------

    def least(self, number: int) -> int:
        """The least number of all ranks."""
        numbers = torch.empty(self.size, dtype=torch.int64)
        self._control._allgather_base(numbers, torch.tensor([number], dtype=torch.int64)).wait()
        return int(numbers.min())

    def share(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of rank 0; others pass as many of any kind."""
        shared = torch.tensor(numbers)
        self._control.broadcast([shared]).wait()
        return [int(number) for number in shared]

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, which pass as many."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        all_bytes = torch.empty(self.size, len(data), dtype=torch.uint8)
        self._control._allgather_base(all_bytes.view(-1), mine).wait()
        return [bytes(row.tolist()) for row in all_bytes]

    def abort(self) -> None:
        """End the collectives of GPUs that wait for a rank that is gone. Their results are wrong.

        Any thread may call it. Gloo notices by itself. Pushed sums end first: NCCL may wait for the work of its GPU.
        """
        if self._buffers is not None:
            self._buffers.stop_waiting()
        if not self._is_host:
            self._group.abort()

    def close(self) -> None:
        """Close the connections. Others get an error from a collective that waits for this rank."""
        self.abort()
        del self._group, self._control
