"""From the host to the device, once a plan: one piece of pinned memory, one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WORDS = 1 << 17
"""Of 8 bytes, which the device keeps for what most plans bring; a larger one takes memory of its own for a moment."""


class InputBuffers:
    """Words of int64 on the device. The first ones stay in their places, because captured graphs read them there:

    | step_counter | rows of all slices | starts of all slices | ends of all slices | the plan's other parts |

    See `octavo.kernels.row_state.DecodeInputs` for what these are.
    """

    def __init__(self, num_slices: int, device: torch.device) -> None:
        self.num_slices = num_slices
        self.device = device
        stride = num_slices + num_slices % 2
        self.head = 2 + 3 * stride
        self.words = torch.zeros(self.head + WORDS, dtype=torch.int64, device=device)
        self._staging = torch.empty(2, len(self.words), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._turn = 0
        self.step_counter = self.words[:2]
        self.rows, self.starts, self.ends = self.words[2 : self.head].view(3, stride)[:, :num_slices]

    def send(
        self,
        column: int,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        null_row: int,
        parts: Sequence[np.ndarray],
    ) -> list[Tensor]:
        """Queue a copy of all that; gives the parts as they will be on the device, [len(part)] int64 each.

        All arrays are one-dimensional, of int64. They are put together in memory that two plans share by turns, as they
        do the ring: nothing here waits.
        """
        # Of even length, so that all begin at 16 bytes: a pointer's alignment makes a kernel's variant, and every
        # variant is a compilation.
        sizes = [len(part) + len(part) % 2 for part in parts]
        total = self.head + sum(sizes)
        fits = total <= len(self.words)
        self._turn ^= 1
        own = self._staging[self._turn, :total]
        staging = own if fits else torch.empty(total, dtype=torch.int64, pin_memory=self.words.is_cuda)
        words = staging.numpy()
        words[0], words[1] = column, 0
        head = words[2 : self.head].reshape(3, -1)
        head[:, len(rows) :] = [[null_row], [0], [0]]
        head[:, : len(rows)] = rows, starts, ends
        at = self.head
        for part, size in zip(parts, sizes, strict=True):
            words[at : at + len(part)] = part
            at += size
        if fits:
            self.words[:total].copy_(staging, non_blocking=True)
            rest = self.words[self.head : total]
        else:
            self.words[: self.head].copy_(staging[: self.head], non_blocking=True)
            rest = staging[self.head :].to(self.device, non_blocking=True)
        if not len(rest):
            return [rest] * len(parts)
        return [padded[: len(part)] for padded, part in zip(torch.split(rest, sizes), parts, strict=True)]
