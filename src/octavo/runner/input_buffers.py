"""Inputs of a plan as flat arrays, and their copy to the device: one copy of pinned memory."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, TableWrite
from octavo.kernels.row_state import COLUMN, FIRST_STOP_ID, FLOATS, MAX_STOP_IDS, NUM_COLUMNS, NUM_LOGPROBS
from octavo.runner.platform import Platform

EMPTY = np.empty(0, dtype=np.int64)
EMPTY_PAIR = EMPTY, EMPTY
NO_TOKENS = EMPTY, EMPTY, EMPTY
NUM_BUFFERED = 1 << 17
"""int64 values in the device buffer, besides the fixed head. A larger plan allocates temporary memory."""


class InputBuffers:
    """An int64 buffer on the device. Its head keeps its addresses, because captured graphs read it:

    | step counter | rows of all lines | their depths | their ends | parts of the plan |

    See `octavo.kernels.row_state.DecodeInputs` for the head.

    head   [3, num_lines]: rows, depths and ends, where the host writes the device's memory
    """

    def __init__(self, num_lines: int, platform: Platform) -> None:
        self._platform = platform
        stride = num_lines + num_lines % 2
        self.head_size = 2 + 3 * stride
        self.buffer = torch.zeros(self.head_size + NUM_BUFFERED, dtype=torch.int64, device=platform.device)
        # Where the host writes the device's memory, a plan is written where it is read.
        staging = [platform.empty_host((len(self.buffer),), torch.int64) for _ in range(2)]
        self._staging = [self.buffer] * 2 if platform.is_host else staging
        self._arrays = [staging.numpy() for staging in self._staging]
        self._turn = 0
        self.step_counter = self.buffer[:1]
        self.rows, self.depths, self.ends = self.buffer[2 : self.head_size].view(3, stride)[:, :num_lines]
        self.head = self._arrays[0][2 : self.head_size].reshape(3, stride)

    def upload(self, column: int, lines: np.ndarray, null_row: int, parts: Seq[np.ndarray]) -> list[Tensor]:
        """Queue a copy of the head and of all parts. Returns the parts on the device, [len(part)] int64 each.

        lines   [3, num_lines] int64: rows, depths and ends

        All parts are one-dimensional int64. Two plans use the staging memory by turns, as they use the output buffers,
        so this does not wait.
        """
        # Even lengths, so that all parts are aligned to 16 bytes: kernels are compiled for each pointer alignment.
        sizes = [len(part) + len(part) % 2 for part in parts]
        total = self.head_size + sum(sizes)
        fits = total <= len(self.buffer)
        self._turn ^= 1
        staging = self._staging[self._turn] if fits else self._platform.empty_host((total,), torch.int64)
        values = self._arrays[self._turn] if fits else staging.numpy()
        values[0] = column
        head = values[2 : self.head_size].reshape(3, -1)
        num_lines = lines.shape[1]
        head[:, num_lines:] = [[null_row], [0], [0]]
        head[:, :num_lines] = lines
        offset = self.head_size
        for part, size in zip(parts, sizes, strict=True):
            values[offset : offset + len(part)] = part
            offset += size
        if fits:
            if staging is not self.buffer:
                self.buffer[:total].copy_(staging[:total], non_blocking=True)
            rest = self.buffer[self.head_size : total]
        else:
            self.buffer[: self.head_size].copy_(staging[: self.head_size], non_blocking=True)
            rest = staging[self.head_size :].to(self.buffer.device, non_blocking=True)
        if not len(rest):
            return [rest] * len(parts)
        return [padded[: len(part)] for padded, part in zip(torch.split(rest, sizes), parts, strict=True)]


def int64(numbers: Seq[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def is_decode_only(counts: Seq[int], num_sampled: Seq[int]) -> bool:
    """True if the first pass computes and samples one position of each slice."""
    return all(count == num > 0 for count, num in zip(counts, num_sampled, strict=True))


def next_tokens(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, their next input tokens, the positions of these)."""
    columns = [(plan.rows[i], tokens[0], plan.starts[i]) for i, tokens in plan.host_tokens.items()]
    rows, tokens, positions = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    return rows, tokens, positions


def pack_setups(setups: Seq[RowSetup], num_logprobs: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(rows [num], lines [num * NUM_COLUMNS] of `RowState.sampling_params`).

    num_logprobs   see `LogitsProcessors`
    """
    if not setups:
        return EMPTY_PAIR
    last = {setup.row: setup for setup in setups}  # the device writes in any order: one line a row
    lines = np.full((len(last), NUM_COLUMNS), -1, dtype=np.int64)
    for line, floats, setup in zip(lines, lines.view(np.float64), last.values(), strict=True):
        params = setup.sampling_params
        own = {"seed": setup.seed, "sample_index": setup.sample_index}
        if params.greedy:
            own["temperature"] = 0
        for name, i in COLUMN.items():
            (floats if i in FLOATS else line)[i] = own[name] if name in own else getattr(params, name)
        line[NUM_LOGPROBS] = num_logprobs.get(setup.row, -1)
        stop_ids = sorted(setup.stop_ids)[:MAX_STOP_IDS]  # the same ones on all tensor parallel ranks
        line[FIRST_STOP_ID : FIRST_STOP_ID + len(stop_ids)] = stop_ids
    return int64(list(last)), lines.reshape(-1)


def table_writes(writes: Seq[TableWrite], max_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices into the flat block tables, block ids). A later write to the same index replaces an earlier one."""
    if not writes:
        return EMPTY_PAIR
    firsts = [line * max_blocks + start for line, start, _ in writes]
    if all(len(ids) == 1 for _, _, ids in writes):
        indices = int64(firsts)
    else:
        indices = np.concatenate(
            [np.arange(first, first + len(ids)) for first, (_, _, ids) in zip(firsts, writes, strict=True)]
        )
    ids = np.fromiter(chain.from_iterable(ids for _, _, ids in writes), dtype=np.int64, count=len(indices))
    if len({line for line, _, _ in writes}) < len(writes):
        _, last = np.unique(indices[::-1], return_index=True)
        indices, ids = indices[::-1][last], ids[::-1][last]
    return indices, ids


def pack_pairs(pairs: Seq[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(first elements, second elements)."""
    if not pairs:
        return EMPTY_PAIR
    table = np.array(pairs, dtype=np.int64)  # [num_pairs, 2]
    return table[:, 0], table[:, 1]
