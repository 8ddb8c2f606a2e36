"""Inputs of a plan, copied from the host to the device in one copy of pinned memory."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

NUM_BUFFERED = 1 << 17
"""int64 values in the device buffer, besides the fixed head. A larger plan allocates temporary memory."""


class InputBuffers:
    """An int64 buffer on the device. Its head keeps its addresses, because captured graphs read it:

    | step counter | rows of all slices | starts of all slices | ends of all slices | parts of the plan |

    See `octavo.kernels.row_state.DecodeInputs` for the head.
    """

    def __init__(self, num_slices: int, device: torch.device) -> None:
        self.num_slices = num_slices
        self.device = device
        stride = num_slices + num_slices % 2
        self.head_size = 2 + 3 * stride
        self.buffer = torch.zeros(self.head_size + NUM_BUFFERED, dtype=torch.int64, device=device)
        self._staging = torch.empty(2, len(self.buffer), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._turn = 0
        self.step_counter = self.buffer[:2]
        self.rows, self.starts, self.ends = self.buffer[2 : self.head_size].view(3, stride)[:, :num_slices]

    def upload(
        self, column: int, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, null_row: int, parts: Seq[np.ndarray]
    ) -> list[Tensor]:
        """Queue a copy of the head and of all parts. Returns the parts on the device, [len(part)] int64 each.

        All arrays are one-dimensional int64. Two plans use the staging memory by turns, as they use the output buffers,
        so this does not wait.
        """
        # Even lengths, so that all parts are aligned to 16 bytes: kernels are compiled for each pointer alignment.
        sizes = [len(part) + len(part) % 2 for part in parts]
        total = self.head_size + sum(sizes)
        fits = total <= len(self.buffer)
        self._turn ^= 1
        reused = self._staging[self._turn, :total]
        staging = reused if fits else torch.empty(total, dtype=torch.int64, pin_memory=self.buffer.is_cuda)
        values = staging.numpy()
        values[0], values[1] = column, 0
        head = values[2 : self.head_size].reshape(3, -1)
        head[:, len(rows) :] = [[null_row], [0], [0]]
        head[:, : len(rows)] = rows, starts, ends
        offset = self.head_size
        for part, size in zip(parts, sizes, strict=True):
            values[offset : offset + len(part)] = part
            offset += size
        if fits:
            self.buffer[:total].copy_(staging, non_blocking=True)
            rest = self.buffer[self.head_size : total]
        else:
            self.buffer[: self.head_size].copy_(staging[: self.head_size], non_blocking=True)
            rest = staging[self.head_size :].to(self.device, non_blocking=True)
        if not len(rest):
            return [rest] * len(parts)
        return [padded[: len(part)] for padded, part in zip(torch.split(rest, sizes), parts, strict=True)]
