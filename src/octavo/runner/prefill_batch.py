"""The first pass of a plan in which slices bring tokens of the host: chunks of prompts, beside rows that decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch


class PrefillSize(NamedTuple):
    """Of a pass: its tokens, slices and draws, and how long the longest slice and sequence may be."""

    num_tokens: int
    num_slices: int
    num_draws: int
    max_query_len: int
    max_seq_len: int


class PrefillBatch:
    """What the host says of such a pass.

    draw_slices  the slice that each drawn token is of: one for most, several for a request about to fork
    """

    def __init__(
        self,
        plan: StepPlan,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        samples: np.ndarray,
        draws: Mapping[int, int],
    ) -> None:
        """draws: of the slices that draw several tokens, how many."""
        counts = counts - np.maximum(samples - 1, 0)  # without what the device feeds itself
        query_start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start[1:])
        known = np.full(query_start[-1], -1, dtype=np.int64)
        for i, tokens in plan.host_tokens.items():
            known[query_start[i] : query_start[i + 1]] = tokens[: counts[i]]
        drawn = np.flatnonzero(samples)
        if draws:
            num_draws = [draws.get(i, 1) for i in drawn.tolist()]
            drawn = np.repeat(drawn, num_draws)
            indices = np.array([j for n in num_draws for j in (range(n) if n > 1 else (-1,))], dtype=np.int64)
        else:
            indices = np.full(len(drawn), -1, dtype=np.int64)
        ends = starts + counts
        self.draw_slices: list[int] = drawn.tolist()
        self.size = PrefillSize(len(known), len(rows), len(drawn), int(counts.max(initial=0)), int(ends.max(initial=0)))
        self._slices = (rows, starts, query_start)
        self._known = known
        self._draws = (query_start[drawn + 1] - 1, rows[drawn], indices, ends[drawn])

    @classmethod
    def nothing(cls) -> PrefillBatch:
        """Of no slices: all padding."""
        none = np.empty(0, dtype=np.int64)
        return cls(StepPlan(), none, none, none, none, {})

    def words(self, size: PrefillSize, null_row: int) -> np.ndarray:
        """All of it as `PrefillInputs` reads it, padded to a size that is at least its own.

        Slices of the null row follow the real ones, and share the tokens that are left over:

            | slice 0 | slice 1 | null row | null row | null row |
        """
        words = np.zeros(num_words(size), dtype=np.int64)
        rows, starts, query_start, known, tokens, draw_rows, indices, positions = split(words, size)
        n, d = self.size.num_slices, self.size.num_draws
        rows[n:], known[self.size.num_tokens :], draw_rows[d:] = null_row, -1, null_row
        rows[:n], starts[:n], query_start[: n + 1] = self._slices
        shares = np.arange(1, size.num_slices - n + 1) * _padding(self.size, size)
        query_start[n + 1 :] = np.minimum(self.size.num_tokens + shares, size.num_tokens)
        known[: self.size.num_tokens] = self._known
        tokens[:d], draw_rows[:d], indices[:d], positions[:d] = self._draws
        return words


def _padding(size: PrefillSize, bucket: PrefillSize) -> int:
    """The length of the slices that fill a bucket up."""
    return cdiv(bucket.num_tokens - size.num_tokens, max(1, bucket.num_slices - size.num_slices))


def _lengths(size: PrefillSize) -> list[int]:
    """Of the parts of a pass's words."""
    n, d = size.num_slices, size.num_draws
    return [n, n, n + 1, size.num_tokens, d, d, d, d]


def num_words(size: PrefillSize) -> int:
    return sum(length + length % 2 for length in _lengths(size))


Words = TypeVar("Words", np.ndarray, Tensor)


def split(words: Words, size: PrefillSize) -> list[Words]:
    """The parts, as views. Each begins at 16 bytes: a pointer's alignment makes a kernel's variant."""
    parts: list[Words] = []
    at = 0
    for length in _lengths(size):
        parts.append(words[at : at + length])
        at += length + length % 2
    return parts


class PrefillInputs(NamedTuple):
    """What the host says of such a pass, on the device: `PrefillBatch.words`, in parts. All int64.

    rows, starts   [num_slices]
    query_start    [num_slices + 1]
    known          [num_tokens], the host's tokens; -1: the row's last one
    draw_tokens    [num_draws], the token after which each draw comes
    draw_rows, draw_indices, draw_positions   [num_draws]; an index of -1 is the row's own
    """

    rows: Tensor
    starts: Tensor
    query_start: Tensor
    known: Tensor
    draw_tokens: Tensor
    draw_rows: Tensor
    draw_indices: Tensor
    draw_positions: Tensor

    def batch(self, size: PrefillSize, block_size: int) -> RaggedBatch:
        """The ragged batch, for `prepare_prefill_inputs` to fill in. Zeroed where a rehearsal reads it unfilled."""
        device, width = self.known.device, cdiv(size.max_seq_len, block_size)
        return RaggedBatch(
            positions=torch.zeros_like(self.known),
            slot_mapping=torch.empty_like(self.known),
            query_start=self.query_start.int(),
            seq_lens=torch.empty(size.num_slices, dtype=torch.int32, device=device),
            block_tables=torch.zeros(size.num_slices, width, dtype=torch.int32, device=device),
            max_query_len=size.max_query_len,
            max_seq_len=size.max_seq_len,
        )


class PrefillSizes:
    """The sizes that graphs are captured for.

    A prompt or two are a few slices; beside rows that decode there are as many as rows. Long passes keep a GPU busy for
    as long as their launches take, but not where the model is small: so there is a graph, too, for those that use up a
    step's tokens, which prompts do while they come in.
    """

    FEW = 8
    TOKENS_OF_FEW = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    TOKENS_OF_MANY = (64, 128, 256, 512, 1024)
    WELL_FILLED = 7 / 8
    """What a pass must make of a graph for 2,048 tokens and more: its padding is computed, too."""

    def __init__(self, num_rows: int, max_num_tokens: int, max_model_len: int) -> None:
        self._longest = max_model_len
        many = {*self.TOKENS_OF_MANY, max_num_tokens}
        if num_rows + 2 <= self.FEW:
            many -= set(self.TOKENS_OF_FEW)
        self.sizes = [
            PrefillSize(num_tokens, num_slices, num_slices, num_tokens, max_model_len)
            for num_slices, steps in ((self.FEW, self.TOKENS_OF_FEW), (num_rows + 2, sorted(many)))
            for num_tokens in steps
            if num_slices <= num_tokens <= max_num_tokens and num_tokens <= num_slices * max_model_len
        ]

    def holding(self, size: PrefillSize) -> PrefillSize | None:
        """The smallest of them that holds it, with a slice for padding; None where there is none."""
        for bucket in self.sizes:
            if (
                size.num_tokens <= bucket.num_tokens
                and size.num_slices < bucket.num_slices
                and size.num_draws <= bucket.num_draws
                and _padding(size, bucket) <= self._longest
            ):
                filled = bucket.num_tokens < 2048 or size.num_tokens >= bucket.num_tokens * self.WELL_FILLED
                return bucket if filled else None
        return None
