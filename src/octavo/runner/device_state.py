"""What the device keeps between plans: rows, block tables, logits processors, and both pools of blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.integers import cdiv
from octavo.kernels.row_state import NUM_COLUMNS, RowState
from octavo.runner.checksums import NO_SWAP_IN_CHECK, SwapInCheck
from octavo.runner.drafts.draft_model import Draft
from octavo.runner.input_buffers import EMPTY_PAIR, int64, pack_pairs, pack_setups, table_writes
from octavo.runner.kv_swap import KVSwapper
from octavo.runner.memory.budget import time_swaps
from octavo.runner.platform import Platform
from octavo.runner.sampling.logits_state import LogitsProcessors
from octavo.runner.shared_prefixes import SharedPrefixes

Arrays = Seq[np.ndarray]
NUM_PARTS = 8
"""Arrays of `pack`."""


class DeviceState:
    """Changed only by plans and passes.

    rows             sampling parameters, block tables, last tokens, done flags
    processors       logits processors of the rows
    kv, draft        see `ModelRunner`
    shared_prefixes  None without cascade attention
    """

    def __init__(
        self,
        kv: Tensor,
        host_kv: Tensor,
        platform: Platform,
        *,
        num_rows: int,
        max_model_len: int,
        vocab_size: int,
        keeps_history: bool,
        draft: Draft | None = None,
        num_groups: int = 1,
        state_blocks: int = 0,
    ) -> None:
        block_size = kv.shape[4]
        max_blocks = cdiv(max_model_len, block_size)
        self.kv, self.draft, self._platform = kv, draft, platform
        max_len = max_model_len + 1 if keeps_history else 0
        self.rows = RowState.empty(
            num_rows, max_blocks, platform.device, max_len=max_len, num_groups=num_groups, state_blocks=state_blocks
        )
        self._num_known = [0] * num_rows  # tokens of each row's history that came with its setup
        self.processors = LogitsProcessors(self.rows, max_model_len + 1, vocab_size, platform)
        self.swapper = KVSwapper(kv, host_kv, platform, draft and (draft.kv, draft.host_kv))
        token_bytes = kv[0, 0].nbytes // block_size
        prefixes = SharedPrefixes(num_rows, self.rows.max_blocks, block_size, token_bytes, self.rows.num_lines)
        self.shared_prefixes = prefixes if platform.has_cascade else None

    def pack(self, plan: StepPlan) -> list[np.ndarray]:
        """The plan's changes as flat arrays, for `apply`."""
        writes = table_writes(plan.table_writes, self.rows.max_blocks)
        if self.shared_prefixes is not None:
            self.shared_prefixes.update(*writes)
        setups = pack_setups(plan.row_setups, self.processors.num_logprobs)
        return [*setups, *writes, *pack_pairs(plan.copies), *self._history_writes(plan)]

    def _history_writes(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """(indices into the flat history, tokens) that the host sends, and that no setup had."""
        max_len, known = self.rows.history.shape[1], self._num_known
        writes: list[tuple[int, Seq[int]]] = []
        setups = {setup.row: setup for setup in plan.row_setups}  # the device writes in any order: one a row
        for setup in setups.values() if max_len else ():
            tokens = setup.token_ids or ()
            known[setup.row] = len(tokens)
            writes.append((setup.row * max_len, tokens))
        for i, tokens in plan.host_tokens.items() if max_len else ():
            row, start = plan.rows[i], plan.starts[i]
            if start + len(tokens) > known[row]:
                writes.append((row * max_len + start, tokens))
        if not writes:
            return EMPTY_PAIR
        indices = [np.arange(first, first + len(tokens)) for first, tokens in writes]
        return np.concatenate(indices), np.concatenate([int64(tokens) for _, tokens in writes])

    def apply(self, plan: StepPlan, parts: Seq[Tensor], last_tokens: Seq[Tensor]) -> SwapInCheck:
        """Queue the plan's changes, in stream order, and the next input tokens of decoding rows.

        parts        those of `pack`, on the device
        last_tokens  rows, tokens and positions of `input_buffers.next_tokens`, likewise
        """
        setup_rows, setups, indices, block_ids, copy_src, copy_dst, places, history = parts
        token_rows, tokens, positions = last_tokens
        rows = self.rows
        if len(setup_rows):
            rows.sampling_params.index_copy_(0, setup_rows, setups.view(-1, NUM_COLUMNS))
        if len(indices):
            rows.block_tables.view(-1).index_copy_(0, indices, block_ids.int())
        if len(token_rows):
            rows.last_token.index_copy_(0, token_rows, tokens)
            rows.num_computed.index_copy_(0, token_rows, positions)
            rows.done.index_fill_(0, token_rows, False)
        if len(places):
            rows.history.view(-1).index_copy_(0, places, history.int())
        check = NO_SWAP_IN_CHECK
        if plan.swap_outs or plan.swap_ins:
            check = self.swapper.move(plan.swap_outs, plan.swap_ins)
        if plan.copies:
            self._platform.ops.block_copy(self.kv, copy_src, copy_dst)
            if self.draft is not None:
                self._platform.ops.block_copy(self.draft.kv, copy_src, copy_dst)
        return check

    def measure_swap(self) -> float:
        """Seconds that a block takes to swap; see `memory.budget.time_swaps`. Overwrites blocks: call it at start."""

        def move(pairs: list[tuple[int, int]]) -> None:
            self.swapper.queue(pairs, [])
            self._platform.synchronize()

        return time_swaps(move, len(self.swapper.host_kv) - 1)
