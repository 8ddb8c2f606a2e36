"""Calls of the GPU's operations that together launch every kernel, in the variants that models use.

`LAUNCHES` has a function for each group of kernels; compiled.py lists the kernels that they launch, for any GPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.metadata import RaggedBatch, SamplingTensors
from octavo.kernels.reference import ExpertGate
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.row_state import DecodeInputs, DraftLines, LogitsProcessorState, RowState
from octavo.kernels.triton import invariant_ops, ops, reduce
from octavo.kernels.triton.capability import kernels_for
from octavo.kernels.triton.linear.grouped_kernels import quantise
from octavo.kernels.triton.linear.norm_quantise import add_norm_quantise
from octavo.kernels.triton.sent_sums import CopiedSum
from tests.kernels.cpu.groups import make_groups
from tests.kernels.triton.peers import HostCopies

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BLOCK_SIZE = 16
QWEN_05B, QWEN3, LLAMA, SMALL = (14, 2, 64), (16, 8, 128), (32, 8, 128), (8, 2, 80)
"""Query heads, K/V heads and head size."""
SILU = ExpertGate("silu")
MXFP4 = GroupForm(4, 32, is_float=True)


def attend(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int, int] = LLAMA,
    *,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = BF16,
    window: int = 0,
    return_lse: bool = False,
    fixed_split: bool = False,
    cascade: bool = False,
    lines_per_row: int = 1,
    kv_dtype: torch.dtype | None = None,
    with_sinks: bool = False,
) -> None:
    """Two layers of one step: the second finds the schedule that the first made."""
    num_heads, num_kv_heads, head_dim = heads
    tables = [[1] * cdiv(n, block_size) for n in seq_lens]
    batch = replace(RaggedBatch.from_lists(query_lens, seq_lens, tables, block_size), fixed_split=fixed_split)
    batch = replace(batch, lines_per_row=lines_per_row)
    if cascade:
        batch = replace(batch, common_prefix_lens=torch.zeros(len(seq_lens), dtype=torch.int32))
    kv = torch.empty(3, 2, 2, num_kv_heads, block_size, head_dim, dtype=kv_dtype or dtype)
    scales = None if kv_dtype is None else torch.ones(2, num_kv_heads)
    sinks = torch.zeros(num_heads) if with_sinks else None
    fused = torch.empty(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    for layer in range(2):
        q = fused[:, :num_heads]
        options = {"window": window, "return_lse": return_lse, "kv_scales": scales, "sinks": sinks}
        ops.paged_attention(q, kv[:, layer], batch, scale=0.1, **options)


def decode() -> None:
    """Few and many sequences, with heads that need masks, large groups and long rows."""
    for heads, num_seqs in ((QWEN_05B, 40), (QWEN3, 1), (LLAMA, 256), ((8, 8, 96), 2), ((8, 1, 256), 64), (SMALL, 8)):
        attend([1] * num_seqs, [300] * num_seqs, heads)


def decode_with_other_settings() -> None:
    """Sliding windows, fixed splits, log-sum-exp, other blocks and dtypes."""
    ones, lens = [1] * 130, [600] * 130
    attend(ones, lens, window=128)
    attend(ones, lens, window=128, fixed_split=True, return_lse=True)
    attend(ones, lens, dtype=F16, block_size=64, return_lse=True)
    for num_seqs in (1, 130):
        attend([1] * num_seqs, [600] * num_seqs, (64, 8, 64), with_sinks=True)
    attend(ones, lens, (64, 8, 64), window=128, with_sinks=True)


def decode_with_drafts() -> None:
    """Few and many rows, with the lines of one pack and of several."""
    for heads, num_rows, lines in ((QWEN_05B, 40, 2), (QWEN3, 1, 9), (LLAMA, 64, 5), (LLAMA, 1, 4), (SMALL, 8, 3)):
        attend([1] * num_rows * lines, [300] * num_rows * lines, heads, lines_per_row=lines)
    attend([1] * 64, [300] * 64, window=128, return_lse=True, lines_per_row=4)
    attend([1] * 64, [600] * 64, fixed_split=True, lines_per_row=4)


def cascade() -> None:
    for heads in (QWEN_05B, LLAMA):
        attend([1] * 256, [300] * 256, heads, cascade=True)
    attend([1] * 256, [300] * 256, (64, 8, 64), cascade=True, with_sinks=True)


def prefill() -> None:
    """Whole prompts, mixed batches, short queries after long prompts, windows, fixed splits."""
    attend([1000] * 20, [1000] * 20, QWEN_05B)
    attend([100, 1, 1, 70], [100, 40, 90, 70])
    attend([4], [4000], QWEN3)
    attend([500], [500], (8, 1, 256))
    attend([300], [600], window=128, return_lse=True, dtype=F16)
    attend([300, 1], [600, 30], fixed_split=True)
    for window in (0, 128):
        attend([300], [600], (64, 8, 64), window=window, with_sinks=True)
    attend([8], [4000], (64, 8, 64), with_sinks=True)


def float8() -> None:
    """Attention over K and V in float8, and their writes. e4m3 is compiled for Hopper alone: others may lack it."""
    kv_dtype = torch.float8_e5m2
    for heads in (QWEN_05B, LLAMA):
        attend([1] * 40, [300] * 40, heads, kv_dtype=kv_dtype)
        attend([1] * 64, [300] * 64, heads, kv_dtype=kv_dtype, cascade=True)
        attend([100, 1, 1, 70], [100, 40, 90, 70], heads, kv_dtype=kv_dtype)
    kv, scales = torch.empty(9, 2, 2, 8, BLOCK_SIZE, 128, dtype=kv_dtype), torch.ones(2, 8)
    q, k, v = torch.empty(5, 32, 128, dtype=BF16).split([16, 8, 8], dim=1)
    slots = torch.zeros(5, dtype=torch.int64)
    ops.kv_write(k, v, kv[:, 1], slots, kv_scales=scales)
    ops.rope_kv_write(q, k, v, slots, torch.empty(99, 128), kv[:, 1], slots, kv_scales=scales)


def linear() -> None:
    """The layers of Qwen2.5-0.5B, Qwen3-0.6B and Llama 3.1 8B, up to the limits of small batches."""
    small_layer(1, 896, 4864, QWEN_05B, "silu")
    small_layer(17, 4096, 14336, LLAMA, "silu")
    small_layer(24, 1024, 3072, QWEN3, "gelu")
    small_layer(200, 1024, 3072, QWEN3, "silu")
    small_layer(3, 328, 200, (4, 2, 40), "silu", dtype=F16)


def small_layer(
    num_tokens: int, hidden: int, inner: int, heads: tuple[int, int, int], gate: Gate, *, dtype: torch.dtype = BF16
) -> None:
    """The products of a layer, each where its batch is small enough; a layer has biases where its heads are 64 wide."""
    num_heads, num_kv_heads, head_dim = heads
    x, norm = torch.empty(num_tokens, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    biased, normed = head_dim == 64, heads == QWEN3

    def weight(num_out: int, num_in: int) -> tuple[Tensor, Tensor | None]:
        bias = torch.empty(num_out, dtype=dtype) if biased else None
        return torch.empty(num_out, num_in, dtype=dtype), bias

    def fits(matrix: Tensor) -> bool:
        return num_tokens <= ops.max_small_batch_tokens(matrix)

    qkv, o = weight((num_heads + 2 * num_kv_heads) * head_dim, hidden), weight(hidden, num_heads * head_dim)
    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    residual: NormedResidual = ops.make_normed_residual(x, norm)
    if fits(qkv[0]):
        batch = RaggedBatch.from_lists([1] * num_tokens, [1] * num_tokens, [[1]] * num_tokens, BLOCK_SIZE)
        kv = torch.empty(3, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=dtype)
        head_norm = torch.empty(head_dim, dtype=dtype) if normed else None
        table = torch.empty(99, head_dim)
        ops.project_qkv(residual, 1e-5, *qkv, kv[:, 1], batch, table, q_norm=head_norm, k_norm=head_norm, norm_eps=1e-6)
    if fits(o[0]):
        residual = ops.add_linear(residual, torch.empty(num_tokens, num_heads * head_dim, dtype=dtype), *o, norm)
    if fits(gate_up[0]):
        ops.norm_linear(residual, 1e-5, *gate_up, gate)
        ops.norm_linear(residual, 1e-5, *qkv)
    if fits(down[0]):
        ops.add_linear(residual, torch.empty(num_tokens, inner, dtype=dtype), *down, norm)


def batch_invariant() -> None:
    """Products in both tiles, of sizes that end within a step, and in float32; a mixed pass."""
    for num_out, num_in, dtype in ((1024, 4096, BF16), (151_936, 1024, F16), (70, 100, BF16), (512, 256, F32)):
        x, weight = torch.empty(3, num_in, dtype=dtype), torch.empty(num_out, num_in, dtype=dtype)
        for bias in (None, torch.empty(num_out, dtype=dtype)):
            invariant_ops.linear(x, weight, bias)
    batch = RaggedBatch.from_lists([300, 1], [600, 30], [[0] * 38] * 2, BLOCK_SIZE)
    kv = torch.empty(3, 2, 2, 8, BLOCK_SIZE, 128, dtype=BF16)
    invariant_ops.paged_attention(torch.empty(301, 16, 128, dtype=BF16), kv[:, 1], batch, scale=0.1)


def quantised() -> None:
    """Each form, for each tile of tokens; fused, by the library, and with x in float8 where a GPU has it."""
    for form in (
        GroupForm(4, 128, zero=8),
        GroupForm(4, 32, has_zeros=True),
        GroupForm(8, 64, zero=128),
        GroupForm(8, 1024, zero=128),
        GroupForm(8, 128, is_float=True),
        GroupForm(8, 1024, is_float=True),
    ):
        values = torch.zeros(512, 1024, dtype=torch.uint8)
        scales = torch.ones(512, 1024 // form.group_size, dtype=F32 if form.is_float else F16)
        zeros = torch.zeros(scales.shape, dtype=torch.uint8) if form.has_zeros else None
        values = values.view(torch.float8_e4m3fn) if form.is_float else values
        weight = ops.pack_groups(Groups(form, values, scales, zeros))
        assert weight is not None
        for num_tokens in (1, 17, 33, 200, 2000):
            weight(torch.empty(num_tokens, 1024, dtype=BF16), None)
            if num_tokens <= weight.max_small_batch_tokens:
                residual = ops.make_normed_residual(torch.empty(num_tokens, 1024, dtype=BF16), torch.empty(1024))
                weight.norm_linear(residual, 1e-5, torch.empty(512, dtype=BF16), "silu")
                batch = RaggedBatch.from_lists([1] * num_tokens, [1] * num_tokens, [[1]] * num_tokens, BLOCK_SIZE)
                kv, table = torch.empty(3, 2, 2, 1, BLOCK_SIZE, 128, dtype=BF16), torch.empty(99, 128)
                weight.project_qkv(residual, 1e-5, None, kv[:, 1], batch, table)
                stream = ops.make_normed_residual(torch.empty(num_tokens, 512, dtype=BF16), torch.empty(512))
                weight.add_linear(stream, residual.x, None, torch.empty(512))
        weight(torch.empty(5, 1024, dtype=F16), None, float32_out=True)
        weight(torch.empty(2000, 1024, dtype=F16), None)  # by the library on Hopper, too
        if form.is_float and kernels_for(torch.device("cpu")).float8:  # for the library, which a test has not
            gates: tuple[Gate, ...] = ("", "silu", "gelu")
            for gate in gates:
                quantise(torch.empty(200, 1024, dtype=BF16), form.group_size, gate)
            x = torch.empty(200, 1024, dtype=BF16)
            if kernels_for(torch.device("cpu")).hopper:
                for num_tokens in (300, 600) if form.group_size == 128 else (50, 100):
                    weight._by_float8(torch.empty(num_tokens, 1024, dtype=BF16), torch.empty(512), None)
            for dtype in (BF16, F32):
                add_norm_quantise(x, x, torch.empty(1024, dtype=dtype), 1e-5, form.group_size)


def experts() -> None:
    """The layers of Qwen3-30B-A3B and gpt-oss-20b, in tiles of every size; sizes that end within a step; float32."""
    for num_tokens in (1, 20, 50, 256, 500, 1000, 5000):
        expert_layer(num_tokens, (2048, 768, 128, 8))
        expert_layer(num_tokens, (2880, 2880, 32, 4), ExpertGate("swiglu"), biased=True)
    for num_tokens in (1, 20, 50, 500):
        expert_layer(num_tokens, (2880, 2880, 2, 1), ExpertGate("swiglu"), biased=True, form=MXFP4)
        for form in (GroupForm(4, 32, has_zeros=True), GroupForm(8, 128, zero=128)):
            expert_layer(num_tokens, (1024, 512, 2, 1), form=form)
    expert_layer(3, (72, 40, 6, 2), ExpertGate("gelu"), dtype=F16)
    for num_tokens in (1, 5000):
        expert_layer(num_tokens, (72, 40, 6, 2), dtype=F32)


def expert_layer(
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    gate: ExpertGate = SILU,
    *,
    biased: bool = False,
    dtype: torch.dtype = BF16,
    form: GroupForm | None = None,
) -> None:
    """form: of the weights, which else have the dtype"""
    hidden, inner, num_experts, top_k = sizes
    logits = torch.empty(num_tokens, num_experts)
    routing = ops.route(logits, top_k, softmax_first=not biased, renormalise=not biased)
    up, down = num_experts * 2 * inner, num_experts * hidden
    x, h = torch.empty(num_tokens, hidden, dtype=dtype), torch.empty(num_tokens, top_k, inner, dtype=dtype)
    up_bias, down_bias = (torch.empty(n, dtype=dtype) if biased else None for n in (up, down))
    if form is not None:
        packed = [ops.pack_experts(make_groups(form, *shape), num_experts) for shape in ((up, hidden), (down, inner))]
        assert packed[0] is not None and packed[1] is not None
        packed[0].experts_in(x, up_bias, routing, gate)
        packed[1].experts_out(h, down_bias, routing)
        return
    ops.experts_in(x, torch.empty(up, hidden, dtype=dtype), up_bias, routing, num_experts, gate)
    ops.experts_out(h, torch.empty(down, inner, dtype=dtype), down_bias, routing, num_experts)


def recurrent() -> None:
    """A layer of Qwen3.5-35B-A3B: prompts beside a step, and steps alone."""
    dim, num_keys, num_heads = 128, 16, 32
    num_channels = (2 * num_keys + num_heads) * dim
    states, weight = torch.empty(3, 320 * 256), torch.empty(num_channels, 4)
    for lens in ([100, 1], [1, 1]):
        batch = RaggedBatch.from_lists(lens, [200, 200], [[1] * 13] * 2, BLOCK_SIZE)
        tables = torch.zeros(2, 196, dtype=torch.int32)
        batch = replace(batch, state_tables=tables, state_reads=tables)
        projected = torch.empty(sum(lens), num_channels + 64, dtype=BF16)[:, :num_channels]
        qkv = ops.causal_conv(projected, weight, states, 0, batch)
        q, k, v = torch.split(qkv, [num_keys * dim, num_keys * dim, num_heads * dim], dim=1)
        heads = (x.view(len(x), -1, dim) for x in (q, k, v))
        decay, beta = ops.delta_gates(projected[:, :32], projected[:, 32:64], torch.empty(32), torch.empty(32))
        out = ops.gated_delta_rule(*heads, decay, beta, states, 3 * num_channels, batch)
        x = ops.gated_rms_norm(out, torch.empty(dim), projected[:, : num_heads * dim], 1e-6)
        ops.sigmoid_mul(x, projected[:, : num_heads * dim])
        ops.sigmoid_mul(x, torch.empty(len(x), 1))


def sums_over_ranks() -> None:
    for size, dtype in ((2, BF16), (4, F16), (3, F32)):
        shapes = reduce.buffer_shapes(size, 1 << 22)
        buffer = torch.empty(sum(map(math.prod, shapes)), dtype=torch.int64)
        buffers = reduce.split_buffer(0, buffer, [0] * size, shapes)
        norm = torch.empty(4096, dtype=dtype)
        for num_rows in (8, 256):
            x = torch.empty(num_rows, 4096, dtype=dtype)
            reduce.push_add(buffers, ops.make_normed_residual(x, norm), x, norm)
            reduce.push_gather(buffers, x)
            reduce.push_reduce(buffers, x)
            reduce.push_add_norm(buffers, x, x, norm, 1e-6)


def winners_of_slices() -> None:
    shapes = reduce.buffer_shapes(2, 1 << 22)
    buffers = reduce.split_buffer(0, torch.empty(sum(map(math.prod, shapes)), dtype=torch.int64), [0] * 2, shapes)
    reduce.push_gather(buffers, torch.empty(8, 3))


def sent_sums() -> None:
    shapes = reduce.buffer_shapes(2, 1 << 16, sent_bytes=1 << 23)
    buffers = reduce.split_buffer(0, torch.empty(sum(map(math.prod, shapes)), dtype=torch.int64), [0] * 2, shapes)
    for width, dtype in ((4096, BF16), (5120, F16), (1536, F32), (12288, BF16)):
        x, norm = torch.empty(300, width, dtype=dtype), torch.empty(width, dtype=dtype)
        sent = CopiedSum(buffers, HostCopies(0), x, 1, threading.Event())
        sent.end.set()
        sent.add_rms_norm(x, norm, 1e-6)


def wide_norms_over_ranks() -> None:
    """Of rows in several blocks."""
    shapes = reduce.buffer_shapes(2, 1 << 22)
    buffers = reduce.split_buffer(0, torch.empty(sum(map(math.prod, shapes)), dtype=torch.int64), [0] * 2, shapes)
    for width in (5120, 9216):
        x = torch.empty(64, width, dtype=BF16)
        reduce.push_add_norm(buffers, x, x, torch.empty(width), 1e-6)


def norms_and_activations() -> None:
    for size, dtype in ((64, BF16), (4096, BF16), (896, F32)):
        x, weight = torch.empty(300, size, dtype=dtype), torch.empty(size, dtype=dtype)
        ops.rms_norm(x, weight, 1e-6)
        ops.add_rms_norm(x, x, weight, 1e-6)
        ops.silu_mul(x)
        ops.gelu_mul(x)
        ops.gather_own_rows(x, torch.zeros(5, dtype=torch.int64), 16)


def kv_copies() -> None:
    """Writes, block copies and swaps."""
    for (num_heads, num_kv_heads, head_dim), normed in ((QWEN3, True), (SMALL, False)):
        kv = torch.empty(9, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=BF16)
        fused = torch.empty(5, num_heads + 2 * num_kv_heads, head_dim, dtype=BF16)
        q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        slots, norm = torch.zeros(5, dtype=torch.int64), torch.empty(head_dim, dtype=BF16) if normed else None
        ops.kv_write(k, v, kv[:, 1], slots)
        ops.rope_kv_write(q, k, v, slots, torch.empty(99, head_dim), kv[:, 1], slots, q_norm=norm, k_norm=norm)
        ids = torch.zeros(2, 200, dtype=torch.int64)
        for num in (1, 30, 200):
            ops.block_copy(kv, ids[0, :num], ids[1, :num])
        ops.swap_out(kv, kv.clone(), *ids)
        ops.swap_in(kv, kv.clone(), *ids)


def sampling() -> None:
    vocab, n = 151_936, 40
    logits, tokens = torch.empty(n, vocab, dtype=BF16), torch.zeros(n, dtype=torch.int64)
    rows, ring, step_counter = tokens.clone(), torch.zeros(4, n, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    sampling_params = SamplingTensors.from_lists(*([[0] * n] * 7))
    bitmask = torch.zeros(n, cdiv(vocab, 32), dtype=torch.int32)
    mask_index = torch.zeros(n, dtype=torch.int32)
    state = RowState.empty(n, 300, "cpu", max_len=300)
    processors = LogitsProcessorState.empty(n, vocab, torch.zeros(n + 1, 300, dtype=torch.int32))
    inputs = DecodeInputs.allocate(step_counter, rows, tokens, tokens, max_blocks=300, block_size=BLOCK_SIZE)
    for cascade in (False, True):
        ops.prepare_decode_inputs(state, inputs.first(n, cascade=cascade), BLOCK_SIZE)
    batch = RaggedBatch.from_lists([500], [500], [[0] * 40], BLOCK_SIZE)
    ops.prepare_prefill_inputs(state, rows[:1], tokens[:1], batch.positions, batch, batch.positions.clone(), BLOCK_SIZE)
    ops.init_token_counts(processors, rows[:1], tokens[:1], torch.zeros(2, dtype=torch.int32), tokens)
    ops.update_token_counts(processors, rows, tokens, tokens)
    ops.apply_token_bitmask(logits, mask_index, bitmask)
    for dtype in (BF16, F32):
        ops.sample(logits.to(dtype), sampling_params)
        ops.sample_checked(logits.to(dtype), sampling_params)
        ops.sample_checked(logits.to(dtype), sampling_params, (mask_index, bitmask))
        ops.decide(ops.race(logits.to(dtype), sampling_params, vocab))
        ops.packed_top_logprobs(logits.to(dtype), 8)
        ops.write_logprobs(state, rows, logits.to(dtype), tokens, ring, step_counter)
    ops.commit_sampled_tokens(state, rows, tokens, tokens, ring, step_counter)
    ops.propose_drafts(state, rows, tokens, 3)
    ops.reject_drafts(state, rows, tokens, DraftLines(tokens, tokens))
    for drafts in (None, DraftLines(tokens, tokens)):
        ops.apply_row_logits_processors(logits.float(), rows, tokens, state, processors, drafts)


def one_small_step() -> None:
    """Decode attention and a norm of a small model: few kernels, which compile in seconds."""
    attend([1] * 40, [300] * 40, QWEN_05B)
    ops.rms_norm(torch.empty(40, 896, dtype=BF16), torch.empty(896, dtype=BF16), 1e-6)


LAUNCHES: tuple[Callable[[], None], ...] = (
    decode,
    decode_with_other_settings,
    decode_with_drafts,
    cascade,
    prefill,
    float8,
    linear,
    batch_invariant,
    quantised,
    experts,
    recurrent,
    sums_over_ranks,
    winners_of_slices,
    sent_sums,
    wide_norms_over_ranks,
    norms_and_activations,
    kv_copies,
    sampling,
)
TILED = (prefill, linear, batch_invariant, quantised, experts, recurrent)
"""Those whose kernels need the most shared memory."""
