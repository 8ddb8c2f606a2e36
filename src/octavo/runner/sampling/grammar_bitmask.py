"""Masks of grammars, where graphs read them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.runner.sampling.sampler import mask_indices
from octavo.runner.streams import SideStream


class BitmaskBuffer:
    """Memory on the device for the masks of one pass. It stays where it is, because captured graphs read it there.

    which   [num_lines] int32, words [num_lines, num_words] int32: see `reference.apply_token_bitmask`
    """

    def __init__(self, num_lines: int, vocab_size: int, device: torch.device) -> None:
        # Words begin at 16 bytes: a pointer's alignment makes a kernel's variant.
        self._head = num_lines + -num_lines % 4
        num_words = cdiv(vocab_size, 32)
        self._all = torch.empty(self._head + num_lines * num_words, dtype=torch.int32, device=device)
        self.which = self._all[:num_lines]
        self.words = self._all[self._head :].view(num_lines, num_words)
        self._copies = SideStream(device)
        self._is_read = False  # all that was queued and read or wrote masks, but for what `fill` speaks of
        self._staging = torch.empty_like(self._all, device="cpu", pin_memory=device.type == "cuda")

    def clear(self) -> None:
        """No draw has a mask; queued with what else is."""
        self.which.fill_(-1)
        self._is_read = False

    def fill(self, masks: GrammarBitmask | None, slices: Seq[int]) -> None:
        """Queue a copy of the masks of draws for these slices, beside the pass that they draw behind. Nothing here
        waits: who has made them knows the tokens that were drawn behind the last ones, so those have been copied, and
        read."""
        numbers, end, num_words = self._staging.numpy(), self._head, self.words.shape[1]
        numbers[:end] = -1
        if masks is not None:
            numbers[: len(slices)] = mask_indices(masks, slices)
            end += len(masks.slices) * num_words
            np.copyto(numbers[self._head : end].reshape(-1, num_words), masks.bitmask[:, :num_words])
        with self._copies.apart() if self._is_read else self._copies:
            self._all[:end].copy_(self._staging[:end], non_blocking=True)
        self._copies.join()
        self._is_read = True
