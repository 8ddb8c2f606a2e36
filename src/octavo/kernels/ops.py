"""The operations of a platform: `kernels.reference`, `kernels.cpu.ops` and `kernels.triton.ops` are such modules,
and so are `kernels.cpu.invariant_ops` and `kernels.triton.invariant_ops`.

`reference` defines what each operation computes; see there. An implementation may have further keyword arguments, with
defaults, for its own tests and benchmarks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.kernels.groups import GroupForm, Groups, PackedExperts, PackedHead
from octavo.kernels.metadata import RaggedBatch, SamplingTensors
from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.row_state import DecodeInputs, DraftLines, LogitsProcessorState, RowState


class SentSum(Protocol):
    """The sum of all ranks' parts of an output, which are on their way."""

    def add_rms_norm(self, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As of `RankSums`. Called once."""
        ...


class RankSums(Protocol):
    """Sums of tensor parallel ranks' parts of an output, each in one operation with what follows; on a GPU.

    residual, x, partial [num_tokens, size]; norm [size], the weight of the next RMS norm
    """

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
        """residual + the sum of all ranks' partial."""
        ...

    def add_linear(
        self, residual: NormedResidual, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
    ) -> NormedResidual:
        """residual + the sum of all ranks' x @ weight.T + bias, for at most `max_small_batch_tokens`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(the RMS norm of residual + the sum of all ranks' x, that sum)."""
        ...

    def part_size(self, num_tokens: int, row_bytes: int) -> int:
        """Tokens of the first of two parts, in which a batch is computed while sums are sent; 0: it is not.

        row_bytes  of a token in a sum
        """
        ...

    def send(self, partial: Tensor, slot: int) -> SentSum:
        """Begin to sum the ranks' partial of a part of the batch, while other work of this GPU goes on.

        slot  0 and 1 for the parts of a mixer's output, then 2 and 3 for those of an MLP's; all four by turns
        """
        ...


class ModelOps(Protocol):
    """Operations that models call."""

    # -- embeddings, norms, activations, rotary embedding --------------------------------------------------------------

    def gather_own_rows(self, table: Tensor, token_ids: Tensor, first: int) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor: ...

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_table(
        self,
        head_dim: int,
        max_len: int,
        theta: float,
        *,
        scaling: dict[str, Any] | None = None,
        rotary_dim: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor: ...

    # -- KV cache and attention ----------------------------------------------------------------------------------------

    def kv_write(
        self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None
    ) -> None: ...

    def rope_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        kv_scales: Tensor | None = None,
    ) -> Tensor: ...

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        batch: RaggedBatch,
        *,
        scale: float,
        window: int = 0,
        kv_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    # -- recurrent layers ----------------------------------------------------------------------------------------------

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, first: int, batch: RaggedBatch) -> Tensor: ...

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        first: int,
        batch: RaggedBatch,
    ) -> Tensor: ...

    def delta_gates(self, a: Tensor, b: Tensor, log_decay: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]: ...

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor: ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor: ...

    # -- experts -------------------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, top_k: int, *, softmax_first: bool, renormalise: bool) -> Routing: ...

    def experts_in(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int, gate: ExpertGate
    ) -> Tensor: ...

    def experts_out(
        self, h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int
    ) -> Tensor: ...

    def pack_experts(self, groups: Groups, num_experts: int) -> PackedExperts | None: ...

    # -- products ------------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    # -- quantised weights ---------------------------------------------------------------------------------------------

    def keeps_groups(self, form: GroupForm, num_in: int, dtype: torch.dtype) -> bool: ...

    def pack_groups(self, groups: Groups) -> PackedHead | None: ...

    # -- fused products of the small-batch path ------------------------------------------------------------------------

    def max_small_batch_tokens(self, weight: Tensor) -> int: ...

    def make_normed_residual(self, x: Tensor, norm: Tensor) -> NormedResidual: ...

    def norm_linear(
        self, residual: NormedResidual, eps: float, weight: Tensor, bias: Tensor | None = None, gate: Gate = ""
    ) -> Tensor: ...

    def add_linear(
        self, residual: NormedResidual, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
    ) -> NormedResidual: ...

    def few_rows_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
        kv_scales: Tensor | None = None,
    ) -> Tensor: ...


class Ops(ModelOps, Protocol):
    """Operations that models and the model runner call."""

    # -- moves of blocks -----------------------------------------------------------------------------------------------

    def block_copy(self, kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None: ...

    def swap_out(self, kv: Tensor, host_kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None: ...

    def swap_in(self, host_kv: Tensor, kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None: ...

    # -- from the row state to a pass, and from its tokens back --------------------------------------------------------

    def prepare_decode_inputs(self, state: RowState, inputs: DecodeInputs, block_size: int) -> None: ...

    def prepare_prefill_inputs(
        self,
        state: RowState,
        rows: Tensor,
        starts: Tensor,
        known: Tensor,
        batch: RaggedBatch,
        token_ids: Tensor,
        block_size: int,
    ) -> None: ...

    def propose_drafts(self, state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None: ...

    def reject_drafts(self, state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor: ...

    def commit_sampled_tokens(
        self, state: RowState, rows: Tensor, tokens: Tensor, positions: Tensor, ring: Tensor, step_counter: Tensor
    ) -> None: ...

    # -- logits processors ---------------------------------------------------------------------------------------------

    def apply_token_bitmask(self, logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None: ...

    def apply_row_logits_processors(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: RowState,
        processors: LogitsProcessorState,
        drafts: DraftLines | None = None,
    ) -> None: ...

    def init_token_counts(
        self, processors: LogitsProcessorState, rows: Tensor, starts: Tensor, begins: Tensor, token_ids: Tensor
    ) -> None: ...

    def update_token_counts(
        self, processors: LogitsProcessorState, rows: Tensor, positions: Tensor, tokens: Tensor
    ) -> None: ...

    # -- sampling and log-probabilities --------------------------------------------------------------------------------

    def finite_rows(self, logits: Tensor) -> Tensor: ...

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor: ...

    def sample_checked(
        self, logits: Tensor, params: SamplingTensors, masks: tuple[Tensor, Tensor] | None = None
    ) -> Tensor: ...

    def slice_tops(self, logits: Tensor, params: SamplingTensors) -> Tensor: ...

    def keep_slice(self, logits: Tensor, params: SamplingTensors, tops: Tensor, rank: int) -> Tensor: ...

    def race(self, logits: Tensor, params: SamplingTensors, first: int) -> Tensor: ...

    def decide(self, winners: Tensor) -> Tensor: ...

    def token_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def packed_top_logprobs(self, logits: Tensor, num: int) -> Tensor: ...

    def write_logprobs(
        self, state: RowState, rows: Tensor, logits: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor
    ) -> None: ...
