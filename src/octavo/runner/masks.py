"""Masks of grammars, where graphs read them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.engine.executor import Masks
from octavo.runner.sampler import which_of


class MaskSpace:
    """Memory on the device for the masks of one pass. It stays where it is, because captured graphs read it there.

    which   [num_lines] int32, words [num_lines, num_words] int32: see `reference.mask_tokens`
    """

    def __init__(self, num_lines: int, vocab_size: int, device: torch.device) -> None:
        # Words begin at 16 bytes: a pointer's alignment makes a kernel's variant.
        self._head = num_lines + -num_lines % 4
        num_words = -(-vocab_size // 32)
        self._all = torch.empty(self._head + num_lines * num_words, dtype=torch.int32, device=device)
        self.which = self._all[:num_lines]
        self.words = self._all[self._head :].view(num_lines, num_words)

    def fill(self, masks: Masks | None, slices: Seq[int]) -> None:
        """Queue a copy of the masks of draws for these slices. Nothing here waits."""
        num_masks, num_words = 0 if masks is None else len(masks.slices), self.words.shape[1]
        pinned = self._all.device.type == "cuda"
        staging = torch.empty(self._head + num_masks * num_words, dtype=torch.int32, pin_memory=pinned)
        numbers = staging.numpy()
        numbers[: self._head] = -1
        if masks is not None:
            numbers[: len(slices)] = which_of(masks, slices)
            np.copyto(numbers[self._head :].reshape(num_masks, num_words), masks.words[:, :num_words])
        self._all[: len(staging)].copy_(staging, non_blocking=True)
