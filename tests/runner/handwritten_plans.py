"""Plans written by hand, a model that predicts t + 1 after token t, and a runner of it."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, TableWrite
from octavo.kernels.metadata import RaggedBatch
from octavo.params.sampling_params import SamplingParams
from octavo.runner.model_runner import ModelRunner
from octavo.runner.platform import Platform

VOCAB = 11
SIZE = 2
"""Tokens of a block."""


class NextTokenModel:
    """Predicts t + 1 after token t. Writes each token to its slot in the KV pool, and records each pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[list[int], list[int], list[int]]] = []  # tokens, positions, slots
        self.poison: set[int] = set()  # tokens with a NaN in their logits
        self.fails = False

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        assert torch.is_inference_mode_enabled()
        if self.fails:
            raise RuntimeError("out of luck\nand advice")
        self.passes.append((token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()))
        for token, slot in zip(token_ids.tolist(), batch.slot_mapping.tolist(), strict=True):
            kv[slot // SIZE, 0, :, 0, slot % SIZE] = token
        indices = range(len(token_ids)) if logits_rows is None else logits_rows.tolist()
        logits = torch.zeros(len(indices), VOCAB)
        for i, index in enumerate(indices):
            token = int(token_ids[index])
            logits[i, (token + 1) % VOCAB] = 5.0
            if token in self.poison:
                logits[i, 0] = torch.nan
        return logits


class Plan(StepPlan):
    """A plan that is written by hand."""

    def give(
        self,
        row: int,
        block_ids: tuple[int, ...],
        *,
        stops: tuple[int, ...] = (),
        known: list[int] | None = None,
        num_output: int = 0,
        **params: Any,
    ) -> Plan:
        """Give the row to a new sequence.

        known       its tokens, for sampling parameters that need the token history
        num_output  the last ones of these that are output
        """
        sampling_params = SamplingParams(**({"temperature": 0} | params))
        history = None if known is None else array("i", known)
        num_prompt = len(known or ()) - num_output
        self.row_setups.append(RowSetup(row, sampling_params, 5, 0, frozenset(stops), num_prompt, history))
        self.table_writes.append(TableWrite(row, 0, block_ids))
        return self

    def slice(
        self, row: int, start: int, count: int, num_sampled: int, tokens: list[int] | None = None, num_samples: int = 0
    ) -> Plan:
        index = len(self.rows)
        self.rows.append(row)
        self.starts.append(start)
        self.counts.append(count)
        self.num_sampled.append(num_sampled)
        if tokens is not None:
            self.host_tokens[index] = array("i", tokens)
        if num_samples:
            self.num_samples[index] = num_samples
        return self


def make_runner(model: Any, platform: Platform, num_host_blocks: int = 8) -> ModelRunner:
    """A runner with 8 usable blocks."""
    kv = torch.zeros(9, 1, 2, 1, SIZE, 1)
    host_kv = torch.zeros(1 + num_host_blocks, *kv.shape[1:])
    sizes = {"num_rows": 4, "max_model_len": 8, "max_num_tokens": 16, "max_decode_steps": 4, "vocab_size": VOCAB}
    return ModelRunner(model, kv, host_kv, platform, graphs=False, **sizes)
