"""Grammar bitmasks on the device, at addresses that captured graphs read."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.runner.platform import Platform
from octavo.runner.sampling.sampler import mask_indices


class BitmaskBuffer:
    """Device memory for the grammar bitmasks of one pass, at a fixed address.

    mask_index   [num_lines] int32
    bitmask      [num_lines, num_words] int32: see `reference.apply_token_bitmask`
    """

    def __init__(self, num_lines: int, vocab_size: int, platform: Platform) -> None:
        # The bitmask is aligned to 16 bytes: kernels are compiled for each pointer alignment.
        self._bitmask_start = num_lines + -num_lines % 4
        num_words = cdiv(vocab_size, 32)
        num_ints = self._bitmask_start + num_lines * num_words
        self._buffer = torch.empty(num_ints, dtype=torch.int32, device=platform.device)
        self.mask_index = self._buffer[:num_lines]
        self.bitmask = self._buffer[self._bitmask_start :].view(num_lines, num_words)
        self._copies = platform.side_stream()
        self._has_waited = False  # the side stream has waited for the last `clear`
        self._staging = platform.empty_host((num_ints,), torch.int32)

    def clear(self) -> None:
        """Allow all tokens for all samples; queued on the current stream."""
        self.mask_index.fill_(-1)
        self._has_waited = False

    def fill(self, bitmask: GrammarBitmask | None, slices: Seq[int], depths: np.ndarray | None) -> None:
        """Queue a copy of the bitmasks of samples for these slices, in parallel with the pass that computes the logits.
        depths: see `mask_indices`.

        Does not wait for the last bitmasks. A caller has the tokens that were sampled with them, so the device has read
        them already.
        """
        values, end, num_words = self._staging.numpy(), self._bitmask_start, self.bitmask.shape[1]
        values[:end] = -1
        if bitmask is not None:
            index, words = mask_indices(bitmask, slices, depths), bitmask.bitmask
            if bitmask.drafts:  # not all of them are computed
                used = np.unique(index[index >= 0])
                index, words = np.where(index < 0, -1, np.searchsorted(used, index)), words[used]
            values[: len(slices)] = index
            end += len(words) * num_words
            np.copyto(values[self._bitmask_start : end].reshape(-1, num_words), words[:, :num_words])
        with self._copies.without_waiting() if self._has_waited else self._copies:
            self._buffer[:end].copy_(self._staging[:end], non_blocking=True)
        self._copies.join()
        self._has_waited = True
