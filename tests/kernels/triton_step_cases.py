"""What stands between two passes of a model, in Triton, against the reference: rows, and sampling.

No `test_` in the name: see triton_cases.py.
"""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch, SamplingTensors
from octavo.kernels.reference import NormedResidual
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    FIRST_STOP_ID,
    LOGIT_BIAS,
    MAX_LOGPROBS,
    MIN_P,
    MIN_TOKENS,
    NUM_COLUMNS,
    NUM_LOGPROBS,
    PENALTIES,
    TEMPERATURE,
    TOP_P,
    DecodeInputs,
    LogitsProcessorState,
    RowState,
)
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.linear.skinny import ThinTuning
from tests.kernels.pool import relative_error
from tests.kernels.triton_cases import DEVICE, INTERPRETED

NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 6, 300, 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


# -- rows -------------------------------------------------------------------------------------------------------------


def make_state() -> RowState:
    state = RowState.empty(NUM_ROWS, MAX_BLOCKS, "cpu")
    state.block_tables[:-1] = torch.arange(1, NUM_ROWS * MAX_BLOCKS + 1, dtype=torch.int32).view(NUM_ROWS, MAX_BLOCKS)
    state.last_token[:] = torch.randint(0, 50, (NUM_ROWS + 1,))
    state.done[2] = True
    state.sampling_params.random_(-(1 << 62), 1 << 62)
    state.sampling_params[:, 3] = torch.arange(NUM_ROWS + 1)  # top_k
    state.sampling_params.view(torch.float64)[:, [TEMPERATURE, TOP_P, MIN_P]] = torch.rand(NUM_ROWS + 1, 3).double()
    state.sampling_params[:, FIRST_STOP_ID:] = torch.randint(0, 50, (NUM_ROWS + 1, NUM_COLUMNS - FIRST_STOP_ID))
    return state


def moved(state: RowState) -> RowState:
    return RowState(*(getattr(state, f.name).to(DEVICE, copy=True) for f in fields(RowState)))


def same(mine: RowState, expected: RowState) -> None:
    for field in fields(RowState):
        assert torch.equal(getattr(mine, field.name).cpu(), getattr(expected, field.name)), field.name


def test_begin_decode() -> None:
    rows, starts = torch.tensor([4, 2, 0, NUM_ROWS, 1]), torch.tensor([1100, 5, 7, 0, 0])
    ends, step_counter = torch.tensor([1104, 9, 8, 0, 3]), torch.tensor([0, 1])  # row 0 has computed its only position
    state, steps = make_state(), []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        tensors = [x.to(device) for x in (step_counter, rows, starts, ends)]
        step = DecodeInputs.allocate(*tensors, max_blocks=MAX_BLOCKS, block_size=BLOCK_SIZE).first(5)
        ops.prepare_decode_inputs(state if ops is reference else moved(state), step, BLOCK_SIZE)
        steps.append(step)
    expected, mine = steps
    assert expected.live_rows.tolist() == [4, NUM_ROWS, NUM_ROWS, NUM_ROWS, 1]
    assert expected.batch.seq_lens.tolist() == [1102, 0, 0, 0, 2]
    assert expected.batch.slot_mapping.tolist()[0] == (4 * MAX_BLOCKS + 1 + 275) * BLOCK_SIZE + 1
    for name in ("live_rows", "token_ids"):
        assert torch.equal(getattr(mine, name).cpu(), getattr(expected, name)), name
    for name in ("positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(mine.batch, name).cpu(), getattr(expected.batch, name)), name
    for name in PER_ROW_FIELDS:
        assert torch.equal(getattr(mine.sampling, name).cpu(), getattr(expected.sampling, name)), name
    for table, wanted, length in zip(
        mine.batch.block_tables, expected.batch.block_tables, [1102, 0, 0, 0, 2], strict=True
    ):
        used = -(-length // BLOCK_SIZE)
        assert torch.equal(table[:used].cpu(), wanted[:used])


def test_begin_chunks() -> None:
    """A chunk, a decoding row, one that is done, and one that was and is given a chunk longer than a program's tile."""
    state = make_state()
    state.done[3] = True
    counts = [3, 1, 1, 700]
    rows, starts = torch.tensor([0, 1, 2, 3]), torch.tensor([9, 40, 6, 400])
    known = torch.cat((torch.tensor([7, 8, 9, -1, -1]), torch.randint(0, 50, (700,))))
    results: list[tuple[RowState, RaggedBatch, Tensor]] = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        own = moved(state) if ops is cuda else RowState(*(getattr(state, f.name).clone() for f in fields(RowState)))
        batch = RaggedBatch.from_lists(counts, counts, [[0] * 275] * 4, BLOCK_SIZE, device=device)
        token_ids = torch.empty(len(known), dtype=torch.int64, device=device)
        ops.prepare_prefill_inputs(
            own, rows.to(device), starts.to(device), known.to(device), batch, token_ids, BLOCK_SIZE
        )
        results.append((own, batch, token_ids))
    (expected_state, expected, expected_tokens), (state, mine, tokens) = results
    same(state, expected_state)
    assert expected_state.done.tolist() == [False, False, True, False, False, False, True]
    assert expected.seq_lens.tolist() == [12, 41, 1, 1100]
    assert torch.equal(tokens.cpu(), expected_tokens)
    assert int(tokens[3]) == int(state.last_token[1])
    for name in ("positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(mine, name).cpu(), getattr(expected, name)), name
    assert expected.slot_mapping[4] == 0  # of the row that is done
    for table, wanted, length in zip(mine.block_tables, expected.block_tables, [12, 41, 1, 1100], strict=True):
        used = -(-length // BLOCK_SIZE)
        assert torch.equal(table[:used].cpu(), wanted[:used])


def test_settle() -> None:
    """A token, a stop token, none, what was no number, a row that was done, and two draws of one row, both heard."""
    state = make_state()
    rows, tokens = torch.tensor([0, 1, NUM_ROWS, 3, 2, 4, 4]), torch.tensor([60, -5, 61, -1, 62, -5, -5])
    tokens[1], tokens[5], tokens[6] = (
        state.sampling_params[1, FIRST_STOP_ID],
        state.sampling_params[4, -1],
        state.sampling_params[4, -1],
    )
    results = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        own = moved(state) if ops is cuda else RowState(*(getattr(state, f.name).clone() for f in fields(RowState)))
        ring = torch.full((3, 9), -7, dtype=torch.int32, device=device)
        step_counter = torch.tensor([1, 5], device=device)
        ops.commit_sampled_tokens(own, rows.to(device), tokens.to(device), ring, step_counter)
        results.append((own, ring.cpu(), step_counter.cpu()))
    (expected_state, expected_ring, expected_step_counter), (state, ring, step_counter) = results
    same(state, expected_state)
    assert torch.equal(ring, expected_ring) and torch.equal(step_counter, expected_step_counter)
    assert step_counter.tolist() == [2, 6]
    assert ring[1].tolist() == [60, int(tokens[1]), -1, -2, -1, int(tokens[5]), int(tokens[5]), -7, -7]
    assert state.done.cpu().tolist() == [False, True, True, True, True, False, True]


# -- products of few tokens -------------------------------------------------------------------------------------------


def wide(stream: NormedResidual) -> NormedResidual:
    return NormedResidual(stream.x.double(), stream.weighted.double(), stream.squares.double())


def check_stream(mine: NormedResidual, expected: NormedResidual, num_tokens: int) -> None:
    assert relative_error(mine.x, expected.x) < 1e-3
    assert relative_error(mine.weighted, expected.weighted) < 2e-3  # of a rounded x
    assert relative_error(mine.squares.sum(0)[:num_tokens], expected.squares.sum(0)) < 1e-3


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("num_tokens", "size", "num_in"), [(1, 40, 256), (3, 33, 300), (16, 64, 517), (31, 1048, 260)])
def test_products_of_few_tokens(num_tokens: int, size: int, num_in: int, splits: int) -> None:
    """Also twice, as the counters of the parts must be 0 again; with a bias that is added once, and without."""
    x = torch.randn(num_tokens, num_in + 8, device=DEVICE).half()[:, :num_in]
    weight, bias = torch.randn(size, num_in, device=DEVICE).half() / 16, torch.randn(size, device=DEVICE).half()
    norm = torch.rand(size, device=DEVICE).half()
    tuning = ThinTuning(rows=16, columns=128, splits=splits, num_warps=2, num_stages=3)
    begin = torch.randn(num_tokens, size, device=DEVICE).half()
    stream, expected = (
        cuda.make_normed_residual(begin, norm),
        reference.make_normed_residual(begin.double(), norm.double()),
    )
    check_stream(stream, expected, num_tokens)
    for b in (None, bias, bias):
        wide_bias = None if b is None else b.double()
        product = cuda.norm_linear(stream, 1e-5, weight.T.contiguous(), None, tuning=tuning)
        assert relative_error(product, reference.norm_linear(wide(stream), 1e-5, weight.T.double())) < 1e-3
        expected = reference.add_linear(wide(stream), x.double(), weight.double(), wide_bias, norm.double())
        stream = cuda.add_linear(stream, x, weight, b, norm, tuning=tuning)
        check_stream(stream, expected, num_tokens)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gate_in_its_product(gate: Any, biased: bool) -> None:
    """With a norm's weight that is wider than the rest."""
    x, weight = torch.randn(5, 96, device=DEVICE).half(), torch.randn(2 * 40, 96, device=DEVICE).half() / 4
    norm, bias = torch.rand(96, device=DEVICE), torch.randn(2 * 40, device=DEVICE).half() if biased else None
    stream = cuda.make_normed_residual(x, norm)
    wide_bias = None if bias is None else bias.double()
    expected = reference.norm_linear(wide(stream), 1e-5, weight.double(), wide_bias, gate)
    assert relative_error(cuda.norm_linear(stream, 1e-5, weight, bias, gate), expected) < 2e-3


def test_heads_of_few_tokens_are_projected_turned_and_written() -> None:
    """With two eps that are far apart, and a bias."""
    num_heads, num_kv_heads, head_dim, size = 4, 2, 32, 96
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    weight, bias = torch.randn(rows, size, device=DEVICE).half() / 8, torch.randn(rows, device=DEVICE).half()
    norms = [torch.rand(head_dim, device=DEVICE).half() for _ in range(2)]
    batch = RaggedBatch.from_lists([1] * 5, [3, 30, 17, 1, 9], [[4, 7], [1, 5], [3, 6], [2], [8]], 16, device=DEVICE)
    table = reference.rope_table(head_dim, 64, 10000.0, device=DEVICE)
    stream = cuda.make_normed_residual(
        torch.randn(5, size, device=DEVICE).half(), torch.rand(size, device=DEVICE).half()
    )
    kv = torch.zeros(9, 2, num_kv_heads, 16, head_dim, device=DEVICE, dtype=torch.float16)
    wide_kv = kv.double()
    q = cuda.project_qkv(stream, 0.5, weight, bias, kv, batch, table, q_norm=norms[0], k_norm=norms[1], norm_eps=0.1)
    expected = reference.project_qkv(
        wide(stream), 0.5, weight.double(), bias.double(), wide_kv, batch, table.double(),
        q_norm=norms[0].double(), k_norm=norms[1].double(), norm_eps=0.1,
    )  # fmt: skip
    assert q.shape == (5, num_heads, head_dim) and relative_error(q, expected) < 3e-3
    assert relative_error(kv, wide_kv) < 3e-3 and wide_kv.count_nonzero() == 5 * 2 * num_kv_heads * head_dim


# -- sampling ---------------------------------------------------------------------------------------------------------


def make_params(device: str = DEVICE, **changes: list[Any]) -> SamplingTensors:
    """Greedy, warm, and each filter alone and with others."""
    columns: dict[str, list[Any]] = {
        "temperature": [0.0, 1.0, 0.6, 0.8, 1.3, 0.7, 1.0, 2.0],
        "top_k": [0, 0, 3, 0, 50, 0, 1, 7],
        "top_p": [1.0, 1.0, 1.0, 0.9, 0.8, 0.3, 1.0, 0.5],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 0.0, 0.3],
        "seed": [random.getrandbits(64) - (1 << 63) for _ in range(8)],
        "sample_index": list(range(8)),
        "position": [random.randrange(1 << 20) for _ in range(8)],
    }
    return SamplingTensors.from_lists(**(columns | changes), device=device)


def on_cpu(params: SamplingTensors) -> SamplingTensors:
    values = {f.name: getattr(params, f.name) for f in fields(SamplingTensors)}
    return SamplingTensors(**{k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()})


@pytest.mark.parametrize("kind", ["flat", "peaked", "equals"])
@pytest.mark.parametrize("vocab", [5, 300, 5003] if INTERPRETED else [5, 300, 5003, 151_936])
def test_the_same_tokens_as_the_reference(vocab: int, kind: str) -> None:
    different = total = 0
    for _ in range(1 if INTERPRETED else 20):
        logits = torch.randn(8, vocab) * {"flat": 0.5, "peaked": 8.0, "equals": 2.0}[kind]
        if kind == "equals":
            logits = logits.round()
        params = make_params()
        mine = cuda.sample(logits.to(DEVICE), params).cpu()
        different += int((mine != reference.sample(logits, on_cpu(params))).sum())
        total += 8
    assert different <= total // 100  # where two scores are within rounding of each other


def test_logits_of_half_precision_and_a_strided_row() -> None:
    logits = torch.randn(8, 1000).half()
    wide = torch.zeros(8, 1500, dtype=torch.float16)
    wide[:, :1000] = logits
    params = make_params()
    expected = reference.sample(logits.float(), on_cpu(params))
    assert torch.equal(cuda.sample(wide.to(DEVICE)[:, :1000], params).cpu(), expected)


def test_a_row_that_is_not_finite_is_marked_and_no_other() -> None:
    logits = torch.randn(8, 5003)
    expected = reference.sample(logits, on_cpu(params := make_params()))
    for row, (column, value) in {1: (5002, math.nan), 3: (0, math.inf), 5: (2500, -math.inf)}.items():
        logits[row, column] = value
    expected[[1, 3, 5]] = -1
    assert torch.equal(cuda.sample_checked(logits.to(DEVICE), params).cpu(), expected)
    assert torch.equal(reference.sample_checked(logits, on_cpu(params)), expected)


@pytest.mark.parametrize("vocab", [50, 3003])
def test_what_rows_ask_of_their_logits(vocab: int) -> None:
    """Told tokens and noted ones, in turns, some of them twice; one draw is padding, one row asks for nothing."""
    num_rows, max_len = 5, 4000
    state, there = RowState.empty(num_rows, 1, "cpu"), RowState.empty(num_rows, 1, DEVICE)
    rules = LogitsProcessorState.empty(num_rows, vocab, torch.zeros(num_rows + 1, max_len, dtype=torch.int32))
    rules.enabled[:num_rows] = torch.tensor([PENALTIES, PENALTIES | LOGIT_BIAS, ALLOWED_TOKENS | MIN_TOKENS, 15, 0])
    rules.num_prompt[:num_rows] = torch.tensor([5, 1500, 3, 20, 7])
    rules.min_length[:num_rows] = torch.tensor([0, 0, 9, 30, 0])
    rules.penalties[:num_rows] = torch.tensor([1.3, 0.4, -0.2]) + 0.1 * torch.rand(num_rows, 3)
    rules.bias_ids.fill_(-1)
    for row in (1, 3):
        rules.bias_ids[row, :40] = torch.randperm(vocab)[:40].int()
        rules.bias_values[row, :40] = 5 * torch.randn(40)
    rules.allowed_bitmask.random_(-(1 << 31), 1 << 31)
    for tensors in (state, there):
        tensors.sampling_params[2, FIRST_STOP_ID : FIRST_STOP_ID + 3] = torch.tensor([7, 0, vocab - 1])
        tensors.sampling_params[3, FIRST_STOP_ID] = 11
    mine = LogitsProcessorState(
        **{f.name: getattr(rules, f.name).clone().to(DEVICE) for f in fields(LogitsProcessorState)}
    )

    def tell(rows: list[int], starts: list[int], lengths: list[int]) -> None:
        begins = torch.tensor([0, *lengths]).cumsum(0)
        told = [torch.tensor(rows), torch.tensor(starts), begins, torch.randint(0, vocab, (int(begins[-1]),))]
        reference.init_token_counts(rules, *told)
        cuda.init_token_counts(mine, *(x.to(DEVICE) for x in told))

    tell([0, 3, 1], [0, 0, 0], [9, 20, 1503])
    tell([3, 1], [18, 1400], [6, 104])  # most of them once more
    rows, positions = torch.tensor([3, 0, num_rows, 4, 1, 2]), torch.tensor([24, 9, 0, 7, 1504, 8])
    for _ in range(3):
        tokens = torch.randint(0, vocab, (6,))
        tokens[1] = -1
        reference.update_token_counts(rules, rows, positions, tokens)
        cuda.update_token_counts(mine, *(x.to(DEVICE) for x in (rows, positions, tokens)))
        positions = positions + 1
        logits = 3 * torch.randn(6, vocab)
        changed = logits.clone().to(DEVICE)
        cuda.apply_row_logits_processors(changed, rows.to(DEVICE), positions.to(DEVICE), there, mine)
        reference.apply_row_logits_processors(logits, rows, positions, state, rules)
        assert torch.allclose(changed.cpu(), logits, rtol=1e-5, atol=1e-5)
    for f in fields(LogitsProcessorState):
        assert torch.equal(getattr(mine, f.name).cpu(), getattr(rules, f.name)), f.name
    assert (
        int(rules.num_counted[0]) == 9
        and int(rules.num_counted[1]) == 1507
        and int(rules.history[3, 26]) == int(tokens[0])
    )


@pytest.mark.parametrize("num_top", [0, 1, 20, 300, 5003])
def test_what_the_model_likes_best(num_top: int) -> None:
    """Also where many are equal, the lowest ids first, and where a zero has a sign."""
    logits = torch.cat([torch.randn(3, 5003), torch.randn(2, 5003).round(), torch.zeros(1, 5003)])
    logits[5, ::3] = -0.0
    logits[1, 7:90] = -math.inf
    token_ids = torch.tensor([3, 50, 5002, 0, 9, 4000])
    mine = cuda.token_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), num_top)
    for x, expected in zip(mine, reference.token_logprobs(logits, token_ids, num_top), strict=True):
        if x.is_floating_point():
            assert torch.allclose(x.cpu(), expected, atol=1e-5)
        else:
            assert torch.equal(x.cpu(), expected)


@pytest.mark.parametrize("num_left", [1, 3, 400])
def test_masked_tokens_are_never_drawn(num_left: int) -> None:
    """Of a vocabulary in several pieces, some of which have no token left; two of the rows have no mask."""
    vocab = 9003
    logits, params = torch.randn(8, vocab), make_params()
    mask_index = torch.tensor([1, -1, 5, 2, -1, 3, 0, 3], dtype=torch.int32)  # two share one, one is nobody's
    bitmask = torch.zeros(6, -(-vocab // 32), dtype=torch.int32)
    for line in range(len(bitmask)):
        for token in torch.randperm(vocab)[:num_left].tolist():
            bitmask[line, token // 32] |= (1 << token % 32) - ((1 << 32) if token % 32 == 31 else 0)
    masked, mine = logits.clone(), logits.to(DEVICE)
    reference.apply_token_bitmask(masked, mask_index, bitmask)
    cuda.apply_token_bitmask(mine, mask_index.to(DEVICE), bitmask.to(DEVICE))
    assert torch.equal(mine.cpu(), masked)
    assert (masked > -math.inf).sum(1).tolist() == [vocab if i < 0 else num_left for i in mask_index.tolist()]
    assert torch.equal(cuda.sample(mine, params).cpu(), reference.sample(masked, on_cpu(params)))


@pytest.mark.parametrize("num_left", [1, 2, 400])
def test_draws_behind_masks(num_left: int) -> None:
    """One mask leaves nothing; a row that is not finite says so, also where the number is masked."""
    vocab = 9003
    logits, params = torch.randn(8, vocab), make_params()
    mask_index = torch.tensor([1, -1, 0, 2, 4, 3, 0, 3], dtype=torch.int32)
    bitmask = torch.zeros(5, -(-vocab // 32), dtype=torch.int32)
    for line in range(4):
        for token in torch.randperm(vocab)[:num_left].tolist():
            bitmask[line, token // 32] |= (1 << token % 32) - ((1 << 32) if token % 32 == 31 else 0)
    masked = logits.clone()
    reference.apply_token_bitmask(masked, mask_index, bitmask)
    expected = reference.sample(masked, on_cpu(params))
    logits[5, int((masked[5] == -math.inf).nonzero()[7])] = math.nan
    expected[4], expected[5] = -2, -1
    for draw, device in ((reference.sample_checked, "cpu"), (cuda.sample_checked, DEVICE)):
        mine = logits.to(device, copy=True)
        found = draw(mine, params if device == DEVICE else on_cpu(params), (mask_index.to(device), bitmask.to(device)))
        assert torch.equal(found.cpu(), expected)
        good = [0, 1, 2, 3, 4, 6, 7]
        assert torch.equal(mine.cpu()[good], masked[good])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "num"), [(2, 2), (1024, 1), (3001, 8), (9003, 64), (300, 300)])
def test_the_best_tokens_of_each_row(vocab: int, num: int, dtype: torch.dtype) -> None:
    """Of several pieces, in which there are equals, in one also and between two; a row with a NaN is told of."""
    logits = 3 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].round()
    logits[2, :: max(1, vocab // 3)] = 9.0
    logits = logits.to(dtype)
    logits[3, vocab - 1] = math.nan
    logits[4, 0] = math.inf
    expected = reference.packed_top_logprobs(logits, num)
    found = cuda.packed_top_logprobs(logits.to(DEVICE), num).cpu()
    ids = slice(2, 2 + num)
    assert found[:, 1].tolist() == expected[:, 1].tolist() == [1, 1, 1, 0, 0]
    assert torch.equal(found[:3, ids], expected[:3, ids])
    for words in (slice(0, 1), slice(2 + num, None)):
        values, wanted = (x[:3, words].contiguous().view(torch.float32) for x in (found, expected))
        assert torch.allclose(values, wanted, atol=1e-5)
    assert (found[:, ids] >= 0).all() and (found[:, ids] < vocab).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [20, 2048, 9003])
def test_what_the_model_thought_of_tokens(vocab: int, dtype: torch.dtype) -> None:
    """Of rows that ask for it, in the next column, and nothing else is written: not of those that do not, whose
    token is none, or beyond what is asked for. One row has two draws; some logits are equal, also the token's own."""
    logits = 3 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].round()
    logits[2, ::3] = 30.0
    logits[5, 1:] = -0.0
    logits = logits.to(dtype)
    state, asked = make_state(), (20, 0, 3, 1, -1, 7, -1)
    state.sampling_params[:, NUM_LOGPROBS] = torch.tensor(asked)
    rows = torch.tensor([0, 1, 5, 2, 4, 0, 3])
    tokens = torch.tensor([4, vocab - 1, 6, 5, 3, vocab // 2, -1])
    step_counter = torch.tensor([1, 3])
    rings = [torch.full((3, 9, 2 + 2 * MAX_LOGPROBS), 77777, dtype=torch.int32) for _ in range(2)]
    reference.write_logprobs(state, rows, logits, tokens, rings[0], step_counter)
    args = [x.to(DEVICE) for x in (rows, logits, tokens)]
    mine = rings[1].to(DEVICE)
    cuda.write_logprobs(moved(state), *args, mine, step_counter.to(DEVICE))
    found, expected = mine.cpu(), rings[0]
    bits = torch.zeros_like(found, dtype=torch.bool)
    bits[1, :6, 0] = bits[1, :6, 2 + MAX_LOGPROBS :] = True
    assert torch.equal(found[~bits], expected[~bits])
    assert torch.allclose(found[bits].view(torch.float32), expected[bits].view(torch.float32), atol=1e-5)
    told = (found != 77777).sum(-1)
    assert told[1].tolist() == [42, 2, 16, 8, 0, 42, 0, 0, 0] and not told[0].any() and not told[2].any()
    assert found[1, 2, 1] == 1 and found[1, 2, 2:5].tolist() == [0, 3, 6]  # the first of equals


def test_greedy_takes_the_first_of_equals_in_whatever_piece() -> None:
    logits = torch.zeros(3, 20_000)
    for row, first in enumerate((19_999, 4096, 4095)):
        logits[row, first:] = 1.0
    params = SamplingTensors.from_lists(
        [0.0] * 3, [0] * 3, [1.0] * 3, [0.0] * 3, [1] * 3, [0] * 3, [0] * 3, device=DEVICE
    )
    assert cuda.sample(logits.to(DEVICE), params).tolist() == [19_999, 4096, 4095]


def test_draws_follow_the_filtered_distribution() -> None:
    """Of 6 tokens that four filters leave, in a vocabulary of 40: a chi-squared test against the probabilities."""
    count = 25 if INTERPRETED else 4000
    logits = torch.linspace(0, 4, 40)[torch.randperm(40)].repeat(count, 1)
    params = SamplingTensors.from_lists(
        [0.8] * count,
        [8] * count,
        [0.9] * count,
        [0.3] * count,
        [3] * count,
        [0] * count,
        list(range(count)),
        device=DEVICE,
    )
    tokens = cuda.sample(logits.to(DEVICE), params).cpu()
    probs = reference.filtered_logits(logits[:1], on_cpu(params).rows(torch.tensor([0]))).softmax(-1)[0]
    counts = torch.bincount(tokens, minlength=40)
    assert not counts[probs == 0].any()
    kept = probs > 0
    expected = probs[kept] * count
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert statistic < 20.5  # 0.1 % of honest samples are beyond, for 5 degrees of freedom
