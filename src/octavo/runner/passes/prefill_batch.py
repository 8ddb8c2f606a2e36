"""The first pass of a plan with host tokens: prefill chunks, together with decoding rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch, make_of_groups

MAX_PROMPT_LOGITS = 128
"""Prompt positions with logits in one pass: each is as wide as the vocabulary, so their number is limited."""


class PrefillSize(NamedTuple):
    """Size of a prefill pass: numbers of tokens, slices and samples, and the longest slice and sequence."""

    num_tokens: int
    num_slices: int
    num_samples: int
    max_query_len: int
    max_seq_len: int


class SlicePart(NamedTuple):
    """Part of a slice that one pass computes: positions from `start` on, one for each token.

    num_prompt_logits  leading positions whose logits give the log-probability of the prompt's next token
    samples            the slice samples after this part
    """

    slice_index: int
    row: int
    start: int
    token_ids: Seq[int]
    num_prompt_logits: int
    samples: bool


def split_parts(parts: Seq[SlicePart]) -> Iterator[list[SlicePart]]:
    """The parts of each pass, with at most MAX_PROMPT_LOGITS prompt logits in a pass."""
    left = list(parts)
    while left:
        now: list[SlicePart] = []
        later: list[SlicePart] = []
        room = MAX_PROMPT_LOGITS
        for part in left:
            num = part.num_prompt_logits
            if num <= room:
                room -= num
                now.append(part)
                continue
            head, tail = part.token_ids[:room], part.token_ids[room:]
            if room:
                now.append(part._replace(token_ids=head, num_prompt_logits=room, samples=False))
            later.append(part._replace(start=part.start + room, token_ids=tail, num_prompt_logits=num - room))
            room = 0
        yield now
        left = later


NOTHING: Mapping[int, int] = {}


class PrefillBatch:
    """Inputs of a prefill pass on the host.

    parts          see `of_parts`
    sample_slices  the slice of each sampled token. Several for a slice that samples several tokens before a fork. The
                   logits of prompt positions follow those of the samples
    """

    def __init__(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        is_sampled: np.ndarray,
        host_tokens: Mapping[int, Seq[int]],
        num_samples: Mapping[int, int] = NOTHING,
        num_prompt_logits: Mapping[int, int] = NOTHING,
    ) -> None:
        """rows, starts, counts, is_sampled [num_slices], without the positions of later decode passes.

        host_tokens         slice -> its tokens, of which the first `counts` are read; absent: the row's last token
        num_samples         slice -> number of samples of its last logits, for slices with several
        num_prompt_logits   slice -> leading positions with logits
        """
        query_start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start[1:])
        tokens = np.full(query_start[-1], -1, dtype=np.int64)
        for i, token_ids in host_tokens.items():
            tokens[query_start[i] : query_start[i + 1]] = token_ids[: counts[i]]
        slices = np.flatnonzero(is_sampled)
        if num_samples:
            repeats = [num_samples.get(i, 1) for i in slices.tolist()]
            slices = np.repeat(slices, repeats)
            indices = np.array([j for n in repeats for j in (range(n) if n > 1 else (-1,))], dtype=np.int64)
        else:
            indices = np.full(len(slices), -1, dtype=np.int64)
        prompts = [np.arange(query_start[i], query_start[i] + num) for i, num in num_prompt_logits.items()]
        self._prompt_indices = np.concatenate(prompts) if prompts else None
        num_logits = len(slices) + sum(num_prompt_logits.values())
        ends = starts + counts
        max_query_len, max_seq_len = int(counts.max(initial=0)), int(ends.max(initial=0))
        self.parts: Seq[SlicePart] = ()
        self.sample_slices: list[int] = slices.tolist()
        self.size = PrefillSize(len(tokens), len(rows), num_logits, max_query_len, max_seq_len)
        self._slices = (rows, starts, query_start)
        self._host_tokens = tokens
        self._samples = query_start[slices + 1] - 1, rows[slices], indices

    @classmethod
    def of_parts(cls, parts: Seq[SlicePart], num_samples: Mapping[int, int]) -> PrefillBatch:
        """A pass of parts of slices. num_samples as above, by slice index."""
        columns = [(part.row, part.start, len(part.token_ids), part.samples) for part in parts]
        rows, starts, counts, is_sampled = np.array(columns, dtype=np.int64).T
        line_of = {part.slice_index: line for line, part in enumerate(parts)}
        batch = cls(
            rows,
            starts,
            counts,
            is_sampled,
            {line: part.token_ids for line, part in enumerate(parts)},
            {line_of[i]: num for i, num in num_samples.items() if i in line_of},
            {line: part.num_prompt_logits for line, part in enumerate(parts) if part.num_prompt_logits},
        )
        batch.parts = parts
        batch.sample_slices = [parts[line].slice_index for line in batch.sample_slices]
        return batch

    @classmethod
    def empty(cls) -> PrefillBatch:
        """A batch without slices: all padding."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, none, {})

    def pack(self, size: PrefillSize, null_row: int) -> np.ndarray:
        """All inputs in one array, for `unpack`, padded to a size that is at least the batch's own.

        Slices of the null row follow the real ones, and share the padding tokens:

            | slice 0 | slice 1 | null row | null row | null row |
        """
        packed = np.zeros(packed_len(size), dtype=np.int64)
        rows, starts, query_start, host_tokens, logits_indices, sample_rows, indices = unpack(packed, size)
        n, d = self.size.num_slices, len(self.sample_slices)
        rows[n:], host_tokens[self.size.num_tokens :], sample_rows[d:] = null_row, -1, null_row
        rows[:n], starts[:n], query_start[: n + 1] = self._slices
        padding = np.arange(1, size.num_slices - n + 1) * _padding(self.size, size)
        query_start[n + 1 :] = np.minimum(self.size.num_tokens + padding, size.num_tokens)
        host_tokens[: self.size.num_tokens] = self._host_tokens
        logits_indices[:d], sample_rows[:d], indices[:d] = self._samples
        if self._prompt_indices is not None:
            logits_indices[d : d + len(self._prompt_indices)] = self._prompt_indices
        return packed


def make_batches(
    plan: StepPlan,
    num_samples: Mapping[int, int],
    num_prompt_logits: Callable[[int, int, int], int] | None,
    done: np.ndarray | None,
) -> list[PrefillBatch]:
    """The prefill passes of a plan: one, or several for many prompt logits.

    num_prompt_logits  (row, start, count) -> positions with logits; None: no slice has any
    done               rows to skip unless they have host tokens, where the host sees them
    """
    rows, starts, counts, num_sampled = (
        np.array(x, dtype=np.int64) for x in (plan.rows, plan.starts, plan.counts, plan.num_sampled)
    )
    counts, tokens = counts - np.maximum(num_sampled - 1, 0), plan.host_tokens
    skipped = done is not None and done[rows].any()
    if num_prompt_logits is None and not skipped:
        return [PrefillBatch(rows, starts, counts, num_sampled > 0, tokens, num_samples)]
    parts = [
        SlicePart(i, row, start, tokens[i][:count] if i in tokens else (-1,), num, sampled > 0)
        for i, (row, start, count, sampled) in enumerate(
            zip(plan.rows, plan.starts, counts.tolist(), plan.num_sampled, strict=True)
        )
        if i in tokens or done is None or not done[row]
        for num in [0 if num_prompt_logits is None else num_prompt_logits(row, start, count)]
    ]
    return [PrefillBatch.of_parts(some, num_samples) for some in split_parts(parts)]


def _padding(size: PrefillSize, bucket: PrefillSize) -> int:
    """The length of the slices that fill a bucket up."""
    return cdiv(bucket.num_tokens - size.num_tokens, max(1, bucket.num_slices - size.num_slices))


def _part_lengths(size: PrefillSize) -> list[int]:
    """Lengths of the fields of `PrefillInputs`."""
    n, d = size.num_slices, size.num_samples
    return [n, n, n + 1, size.num_tokens, d, d, d]


def packed_len(size: PrefillSize) -> int:
    return sum(length + length % 2 for length in _part_lengths(size))


Packed = TypeVar("Packed", np.ndarray, Tensor)


def unpack(packed: Packed, size: PrefillSize) -> list[Packed]:
    """Views of the fields, each aligned to 16 bytes: kernels are compiled for each pointer alignment."""
    parts: list[Packed] = []
    offset = 0
    for length in _part_lengths(size):
        parts.append(packed[offset : offset + length])
        offset += length + length % 2
    return parts


class PrefillInputs(NamedTuple):
    """Inputs of a prefill pass on the device: the fields of `PrefillBatch.pack`, all int64.

    rows, starts   [num_slices]
    query_start    [num_slices + 1]
    host_tokens    [num_tokens]; -1: the row's last token
    logits_indices [num_samples], the token whose logits each sample uses
    sample_rows, sample_indices
                   [num_samples]; an index of -1 is the row's own sample index
    """

    rows: Tensor
    starts: Tensor
    query_start: Tensor
    host_tokens: Tensor
    logits_indices: Tensor
    sample_rows: Tensor
    sample_indices: Tensor

    def batch(self, size: PrefillSize, block_size: int, num_windows: int = 0, state_blocks: int = 0) -> RaggedBatch:
        """The ragged batch, for `prepare_prefill_inputs` to fill. Zeroed where precompilation reads it unfilled."""
        device, width = self.host_tokens.device, cdiv(size.max_seq_len, block_size)
        return RaggedBatch(
            positions=torch.zeros_like(self.host_tokens),
            slot_mapping=torch.empty_like(self.host_tokens),
            query_start=self.query_start.int(),
            seq_lens=torch.empty(size.num_slices, dtype=torch.int32, device=device),
            block_tables=torch.zeros(size.num_slices, width, dtype=torch.int32, device=device),
            max_query_len=size.max_query_len,
            max_seq_len=size.max_seq_len,
            window_tables=make_of_groups(num_windows, size.num_slices, width, dtype=torch.int32, device=device),
            window_slots=make_of_groups(num_windows, size.num_tokens, dtype=torch.int64, device=device),
            state_tables=_zero_tables(size.num_slices, state_blocks, device),
            state_reads=_zero_tables(size.num_slices, state_blocks, device),
        )


def _zero_tables(num_slices: int, state_blocks: int, device: torch.device) -> Tensor | None:
    return torch.zeros(num_slices, state_blocks, dtype=torch.int32, device=device) if state_blocks else None


class PrefillSizes:
    """Sizes that prefill graphs are captured for.

    One or two prompts are a few slices; together with decoding rows there are as many slices as rows. A long pass keeps
    a GPU busy for longer than its launches take, except with a small model. So the largest graph holds all tokens of a
    step, which prompts use up while they arrive.
    """

    FEW = 8
    TOKENS_OF_FEW = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    TOKENS_OF_MANY = (64, 128, 256, 512, 1024)
    MIN_FILL = 7 / 8
    """Smallest share of a graph for 2,048 tokens or more that a pass must fill: its padding is computed, too."""

    def __init__(self, num_rows: int, max_num_tokens: int, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        many = {*self.TOKENS_OF_MANY, max_num_tokens}
        if num_rows + 2 <= self.FEW:
            many -= set(self.TOKENS_OF_FEW)
        self.sizes = [
            PrefillSize(num_tokens, num_slices, num_slices, num_tokens, max_model_len)
            for num_slices, steps in ((self.FEW, self.TOKENS_OF_FEW), (num_rows + 2, sorted(many)))
            for num_tokens in steps
            if num_slices <= num_tokens <= max_num_tokens and num_tokens <= num_slices * max_model_len
        ]

    def bucket_for(self, size: PrefillSize) -> PrefillSize | None:
        """The smallest captured size that holds a pass and at least one padding slice; None if there is none."""
        for bucket in self.sizes:
            if (
                size.num_tokens <= bucket.num_tokens
                and size.num_slices < bucket.num_slices
                and size.num_samples <= bucket.num_samples
                and _padding(size, bucket) <= self._max_model_len
            ):
                filled = bucket.num_tokens < 2048 or size.num_tokens >= bucket.num_tokens * self.MIN_FILL
                return bucket if filled else None
        return None
