"""Checks every Triton kernel on this GPU against the reference, then times it.

    PYTHONPATH=src python benchmarks/kernels/gpu_check.py [--out DIR] [--only check|time] [--seconds 400]

Needs a CUDA device, torch and triton, but no pytest, which runs the same checks (tests/gpu/test_fuzzed.py). Prints one
JSON line for each failed case and a summary, then one JSON line for each shape: microseconds from replays of a CUDA
graph (the median of several), and TB/s of K and V, or TFLOP/s. All lines are in DIR/gpu_check.jsonl. A failed case
does not stop the others; the exit status is 1 if any failed.

For decode, the engine's tuning is timed, and others for comparison (`best_us`, `all_cold`). For `us`, every call reads
the same K and V, which small shapes find in the cache; for `cold_us`, calls cycle over so many layers that each has
left the cache before it is read again, as in a model.

`--only packs` checks and times decode with several lines a row: `ratio` is the time with each line read alone, divided
by that with packs (`RaggedBatch.lines_per_row`). `wide_us` has packs of 32 rows of the matrix product in place of 16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.decode import decode_attention
from octavo.kernels.triton.attention.decode_schedule import DecodeTuning, decode_tuning

Record = dict[str, Any]
DEVICE = "cuda"
COLD_BYTES = 200 << 20
"""More than three times an H200's second-level cache."""

# -- a pool and a batch -----------------------------------------------------------------------------------------------


def make_batch(
    query_lens: list[int], seq_lens: list[int], block_size: int, pool_blocks: int, seed: int = 0, first_id: int = 1
) -> RaggedBatch:
    """A batch with shuffled block ids from first_id to pool_blocks."""
    g = torch.Generator().manual_seed(seed)
    ids = (torch.randperm(pool_blocks - first_id + 1, generator=g) + first_id).tolist()
    tables, used = [], 0
    for n in seq_lens:
        count = cdiv(n, block_size)
        tables.append(ids[used : used + count])
        used += count
    return RaggedBatch.from_lists(query_lens, seq_lens, tables, block_size, device=DEVICE)


def all_slots(batch: RaggedBatch, block_size: int) -> Tensor:
    """The slots of all tokens of all sequences, cached ones included, [sum(seq_lens)] int64."""
    slots = []
    for table, n in zip(batch.block_tables.long(), batch.seq_lens.tolist(), strict=True):
        positions = torch.arange(n, device=DEVICE)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
    return torch.cat(slots)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected norm; NaN if anything is NaN."""
    actual, expected = actual.double(), expected.double()
    same = actual == expected  # -inf - -inf is NaN
    difference = torch.where(same, 0.0, actual - expected)
    return float(difference.norm() / torch.where(expected.isfinite(), expected, 0.0).norm().clamp(min=1e-30))


TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


# -- checks -----------------------------------------------------------------------------------------------------------


def attention_cases() -> Iterator[Record]:
    """Every block size, head_dim, group, dtype and kind of batch several times, in random combinations."""
    rnd = random.Random(0)
    block_sizes, head_dims = [8, 16, 32, 64, 128, 256], [64, 80, 96, 128, 256, 40]
    groups = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
    kinds = ["decode", "mixed", "prompt"]
    pairs = [(b, d) for i in range(6) for b, d in zip(block_sizes, head_dims[i:] + head_dims[:i], strict=True)]
    for i, (block_size, head_dim) in enumerate(pairs):
        for kind in rnd.sample(kinds, 2):
            yield {
                "block_size": block_size,
                "head_dim": head_dim,
                "group": groups[i % len(groups)],
                "kv_heads": rnd.choice([1, 2, 8]),
                "dtype": str(rnd.choice(dtypes)).removeprefix("torch."),
                "kind": kind,
                "window": rnd.choice([0, 0, 1, 17, 100, 1000]),
                "seed": i,
            }


def long_cases() -> Iterator[Record]:
    """Queries that are long enough for Hopper's prefill kernel: whole prompts, and chunks after a context."""
    shapes = [(b, d) for d in (128, 64, 256, 80, 96) for b in (16, 64, 8, 32, 128, 256)]
    groups = [4, 7, 1, 16, 8, 5, 2, 3, 12]
    for i, (block_size, head_dim) in enumerate(shapes):
        yield {
            "block_size": block_size,
            "head_dim": head_dim,
            "group": groups[i % len(groups)],
            "kv_heads": (8, 2, 1)[i % 3],
            "dtype": "float16" if i % 5 == 3 else "bfloat16",
            "kind": "long",
            "window": 100_000 if i % 7 == 6 else 0,
            "seed": i,
        }


def check_attention(case: Record) -> Record:
    """Attention by `paged_attention`; free blocks, unused slots, the null block and the other layer are NaN."""
    from octavo.kernels.triton.attention.paged_attention import paged_attention

    rnd = random.Random(case["seed"])
    dtype = getattr(torch, case["dtype"])
    block_size, head_dim, heads = case["block_size"], case["head_dim"], case["kv_heads"]
    num_seqs = rnd.choice([1, 3, 9, 70])
    seq_lens = [rnd.choice([1, 2, 63, 64, 65, 128, 300, rnd.randint(1, 3000)]) for _ in range(num_seqs)]
    query_lens = [1] * num_seqs
    if case["kind"] == "mixed":
        query_lens = [rnd.choice([1, min(n, rnd.randint(1, 200))]) for n in seq_lens]
    elif case["kind"] == "prompt":
        seq_lens = [min(n, 700) for n in seq_lens[:5]]
        query_lens = list(seq_lens)
    elif case["kind"] == "long":
        query_lens = [rnd.choice([1, 7, 64, 65, 128, 200, 513]) for _ in range(rnd.choice([1, 5, 9]))]
        query_lens[0] = rnd.randint(64, 700)
        seq_lens = [n + rnd.choice([0, 0, 1, 127, 128, 300, 1000]) for n in query_lens]
    pool_blocks = sum(cdiv(n, block_size) for n in seq_lens) + 5
    batch = make_batch(query_lens, seq_lens, block_size, pool_blocks, case["seed"])
    torch.manual_seed(case["seed"])
    kv = torch.full((pool_blocks + 1, 2, 2, heads, block_size, head_dim), math.nan, dtype=dtype, device=DEVICE)
    slots = all_slots(batch, block_size)
    k, v = torch.randn(2, len(slots), heads, head_dim, device=DEVICE).to(dtype)
    reference.kv_write(k, v, kv[:, 1], slots)
    fused = torch.randn(sum(query_lens), heads * (case["group"] + 2), head_dim, device=DEVICE).to(dtype)
    q = fused[:, : heads * case["group"]]
    scale, window = head_dim**-0.5, case["window"]
    out, lse = paged_attention(q, kv[:, 1], batch, scale=scale, window=window, return_lse=True)
    plain = paged_attention(q, kv[:, 1], batch, scale=scale, window=window)
    expected, expected_lse = reference.paged_attention(
        q.double(), kv[:, 1].double(), batch, scale=scale, window=window, return_lse=True
    )
    errors = [error_of(out, expected), error_of(lse, expected_lse)]
    limits = [TOLERANCE[dtype], 1e-5]
    fine = all(e < limit for e, limit in zip(errors, limits, strict=True)) and torch.equal(out, plain)
    return {"errors": errors, "seqs": len(seq_lens), "ok": fine}


def make_lines(seq_lens: list[int], lines: int, block_size: int, pool_blocks: int, seed: int = 0) -> RaggedBatch:
    """A batch with `lines` lines a row; seq_lens: of the last line of each row."""
    rows = make_batch([1] * len(seq_lens), seq_lens, block_size, pool_blocks, seed)
    lens = (rows.seq_lens.unsqueeze(1) - torch.arange(lines - 1, -1, -1, device=DEVICE)).flatten().int()
    num = len(lens)
    return RaggedBatch(
        lens.long() - 1,
        lens.long(),  # not read
        torch.arange(num + 1, dtype=torch.int32, device=DEVICE),
        lens,
        rows.block_tables.repeat_interleave(lines, 0),
        1,
        rows.max_seq_len,
        lines_per_row=lines,
    )


def pack_cases() -> Iterator[Record]:
    rnd = random.Random(1)
    for i, (group, lines) in enumerate(itertools.product([1, 2, 3, 4, 7, 8], [2, 4, 5, 9, 16])):
        yield {
            "block_size": rnd.choice([16, 16, 32, 64]),
            "head_dim": rnd.choice([64, 128, 128, 80, 256]),
            "group": group,
            "kv_heads": rnd.choice([1, 2, 8]),
            "dtype": rnd.choice(["bfloat16", "bfloat16", "float16", "float32"]),
            "lines": lines,
            "rows": (1, 3, 20, 150)[i % 4],
            "window": rnd.choice([0, 0, 0, 1, 100]),
            "seed": i,
        }


def check_packs(case: Record) -> Record:
    """Lines of rows with packs; without, equal bits with a fixed split; some lines and rows have no keys."""
    from octavo.kernels.triton.attention.paged_attention import paged_attention

    rnd = random.Random(case["seed"])
    dtype, lines = getattr(torch, case["dtype"]), case["lines"]
    block_size, head_dim, heads = case["block_size"], case["head_dim"], case["kv_heads"]
    longest = 3000 if case["rows"] <= 20 else 400
    seq_lens = [lines + rnd.choice([0, 1, 62, 63, 64, 300, rnd.randint(1, longest)]) for _ in range(case["rows"])]
    pool_blocks = sum(cdiv(n, block_size) for n in seq_lens) + 5
    batch = make_lines(seq_lens, lines, block_size, pool_blocks, case["seed"])
    num_live = torch.tensor([lines, *(rnd.choice([0, rnd.randint(1, lines)]) for _ in seq_lens[1:])], device=DEVICE)
    live = (torch.arange(lines, device=DEVICE) < num_live.unsqueeze(1)).flatten()
    last = (torch.arange(lines, device=DEVICE) == num_live.unsqueeze(1) - 1).flatten()
    batch.seq_lens.mul_(live)
    torch.manual_seed(case["seed"])
    kv = torch.full((pool_blocks + 1, 2, 2, heads, block_size, head_dim), math.nan, dtype=dtype, device=DEVICE)
    slots = all_slots(select_lines(batch, last), block_size)
    k, v = torch.randn(2, len(slots), heads, head_dim, device=DEVICE).to(dtype)
    reference.kv_write(k, v, kv[:, 1], slots)
    fused = torch.randn(len(live), heads * (case["group"] + 2), head_dim, device=DEVICE).to(dtype)
    q = fused[:, : heads * case["group"]]
    options: Record = {"scale": head_dim**-0.5, "window": case["window"], "return_lse": True}
    expected = reference.paged_attention(q[live].double(), kv[:, 1].double(), select_lines(batch, live), **options)
    errors, same = [], True
    for fixed_split in (False, True):
        packed = paged_attention(q, kv[:, 1], replace(batch, derived={}, fixed_split=fixed_split), **options)
        errors += [error_of(a[live], b) for a, b in zip(packed, expected, strict=True)]
        alone = replace(batch, derived={}, fixed_split=fixed_split, lines_per_row=1)
        single = paged_attention(q, kv[:, 1], alone, **options)
        same &= not fixed_split or all(map(torch.equal, packed, single))
        same &= not packed[0][~live].any() and torch.equal(packed[1][~live], single[1][~live])
    fine = all(e < limit for e, limit in zip(errors, [TOLERANCE[dtype], 1e-5] * 2, strict=True)) and same
    return {"errors": errors, "same": bool(same), "ok": bool(fine)}


def select_lines(batch: RaggedBatch, live: Tensor) -> RaggedBatch:
    """Some sequences with one query, each on its own."""
    starts = torch.arange(int(live.sum()) + 1, dtype=torch.int32, device=DEVICE)
    positions, slots, lens, tables = (
        t[live] for t in (batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables)
    )
    return RaggedBatch(positions, slots, starts, lens, tables, 1, batch.max_seq_len)


def check_replay(case: Record) -> Record:
    """A graph that was captured with some lengths is correct with others: the host computes no part of the schedule."""
    from octavo.kernels.triton.attention.paged_attention import paged_attention

    block_size, heads, head_dim = 16, 8, 128
    long = [1500, 3, 700, 64, 65, 1, 2000, 900]
    batch = make_batch([1] * 8, long, block_size, 400, case["seed"])
    kv = torch.randn(401, 1, 2, heads, block_size, head_dim, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(8, heads * 4, head_dim, device=DEVICE, dtype=torch.bfloat16)
    paged_attention(q, kv[:, 0], batch, scale=0.1)  # compiled before the capture
    batch.derived.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, kv[:, 0], batch, scale=0.1)
    worst = 0.0
    for lens in (long, [5, 3, 64, 64, 65, 1, 7, 900], [1, 0, 0, 1, 1, 0, 2000, 0]):
        batch.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        expected = reference.paged_attention(q.double(), kv[:, 0].double(), batch, scale=0.1)
        worst = max(worst, error_of(out, expected))
    return {"errors": [worst], "ok": worst < TOLERANCE[torch.bfloat16]}


def check_far_blocks(case: Record) -> Record:
    """Write, copy and read the last blocks of a pool of more than 2^32 elements."""
    from octavo.kernels.triton import ops as cuda

    block_size, heads, head_dim, group = 16, 8, 128, 4
    pool_blocks = (1 << 32) // (2 * 2 * heads * block_size * head_dim) + 200
    kv = torch.empty((pool_blocks + 1, 2, 2, heads, block_size, head_dim), dtype=torch.bfloat16, device=DEVICE)
    assert kv.numel() > 1 << 32
    kv[-300:] = math.nan
    seq_lens, query_lens = [1000, 77, 300], [1, 77, 20]
    batch = make_batch(query_lens, seq_lens, block_size, pool_blocks, 1, first_id=pool_blocks - 100)
    slots = all_slots(batch, block_size)
    k, v = torch.randn(2, len(slots), heads, head_dim, device=DEVICE).bfloat16()
    cuda.kv_write(k, v, kv[:, 1], slots)
    tail = torch.full_like(kv[-300:], math.nan)
    reference.kv_write(k, v, tail[:, 1], slots - (pool_blocks + 1 - 300) * block_size)
    wrong = int((kv[-300:].nan_to_num(7.0) != tail.nan_to_num(7.0)).sum())
    q = torch.randn(sum(query_lens), heads * group, head_dim, device=DEVICE).bfloat16()
    out = cuda.paged_attention(q, kv[:, 1], batch, scale=0.1)
    near = RaggedBatch(
        batch.positions,
        batch.slot_mapping,
        batch.query_start,
        batch.seq_lens,
        (batch.block_tables - (pool_blocks + 1 - 300)).clamp(min=0),
        batch.max_query_len,
        batch.max_seq_len,
    )
    error = error_of(out, reference.paged_attention(q.double(), tail[:, 1].double(), near, scale=0.1))
    ids = batch.block_tables[0, :20].long()
    cuda.block_copy(kv, ids, torch.arange(1, 21, device=DEVICE))
    wrong += int((kv[1:21].nan_to_num(7.0) != kv[ids].nan_to_num(7.0)).sum())
    positions = torch.arange(len(slots), device=DEVICE) % 1000
    table = reference.rope_table(head_dim, 1000, 10000.0, device=DEVICE)
    cuda.rope_kv_write(k, k, v, positions, table, kv[:, 0], slots)
    _, rotated = reference.apply_rope(k, k, positions, table)
    back = kv[:, 0][slots // block_size, 0, :, slots % block_size]
    rope_error = error_of(back, rotated)
    return {"errors": [error, rope_error], "wrong": wrong, "ok": error < 5e-3 and rope_error < 5e-3 and wrong == 0}


def check_small(case: Record) -> Record:
    """Norms, activation, RoPE, kv_write, their fusion, and block_copy, for one shape and dtype."""
    from octavo.kernels.triton import ops as cuda

    torch.manual_seed(case["seed"])
    dtype, n = getattr(torch, case["dtype"]), case["tokens"]
    heads, kv_heads, head_dim, block_size = case["heads"], case["kv_heads"], case["head_dim"], case["block_size"]
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    errors: dict[str, float] = {}

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    hidden = heads * head_dim
    x, residual, weight = randn(n, hidden), randn(n, hidden), randn(hidden)
    normed, total = cuda.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    errors["add_rms_norm"] = max(error_of(normed, expected), error_of(total, expected_total))
    errors["rms_norm"] = error_of(cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    gate_up = randn(n, 2 * case["size"])
    errors["silu_mul"] = error_of(cuda.silu_mul(gate_up), reference.silu_mul(gate_up.double()))

    q, k, v = randn(n, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    q_norm, k_norm = randn(head_dim), randn(head_dim)
    positions = torch.randint(4096, (n,), device=DEVICE)
    table = reference.rope_table(head_dim, 4096, 10000.0, device=DEVICE)
    wide_q, _ = reference.apply_rope(q.double(), k.double(), positions, table.double())
    _, rotated_k = reference.apply_rope(q, k, positions, table)

    pool_blocks = n // block_size + 9
    before = randn(pool_blocks + 1, 2, 2, kv_heads, block_size, head_dim)
    slots = torch.randperm(pool_blocks * block_size, device=DEVICE)[:n] + block_size
    written, kv = before.clone(), before.clone()
    cuda.kv_write(k, v, kv[:, 1], slots)
    reference.kv_write(k, v, written[:, 1], slots)
    errors["kv_write"] = 0.0 if torch.equal(kv, written) else 1.0
    kv = before.clone()
    out = cuda.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots)
    reference.kv_write(rotated_k, v, written[:, 1], slots)
    errors["rope_kv_write"] = max(error_of(out, wide_q), error_of(kv, written))
    kv = before.clone()
    out = cuda.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5)
    wide_q, wide_k = (reference.rms_norm(a.double(), w.double(), 1e-5) for a, w in ((q, q_norm), (k, k_norm)))
    wide_q, wide_k = reference.apply_rope(wide_q, wide_k, positions, table.double())
    reference.kv_write(wide_k, v, written[:, 1], slots)
    errors["norm_rope_kv_write"] = max(error_of(out, wide_q), error_of(kv, written))

    copies = min(case["copies"], pool_blocks)
    src = torch.randperm(pool_blocks, device=DEVICE)[:copies] + 1
    dst = torch.randperm(pool_blocks, device=DEVICE)[:copies] + 1  # many targets are also sources
    kv, copied = before.clone(), before.clone()
    cuda.block_copy(kv, src, dst)
    reference.block_copy(copied, src, dst)
    errors["block_copy"] = 0.0 if torch.equal(kv, copied) else 1.0
    return {"errors": errors, "ok": all(e <= limit for e in errors.values())}


def small_cases() -> Iterator[Record]:
    shapes = [(32, 8, 128), (14, 2, 64), (16, 8, 128), (9, 3, 64), (5, 5, 40), (8, 1, 256), (12, 4, 80), (7, 1, 96)]
    for i, (heads, kv_heads, head_dim) in enumerate(shapes):
        for dtype in ("bfloat16", "float16", "float32"):
            yield {
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "dtype": dtype,
                "tokens": (1, 7, 300, 2049)[i % 4],
                "size": (576, 1536, 4864, 14336)[i % 4],
                "block_size": 8 << i % 6,
                "copies": (1, 3, 100, 300)[i % 4],
                "seed": i,
            }


CHECKS: dict[str, Callable[[Record], Record]] = {
    "attention": check_attention,
    "packs": check_packs,
    "replay": check_replay,
    "far blocks": check_far_blocks,
    "small": check_small,
}


def all_checks() -> Iterator[tuple[str, Record]]:
    """Arguments of `run_check`, the longest checks first."""
    yield "far blocks", {"seed": 0}
    yield "replay", {"seed": 0}
    for case in small_cases():
        yield "small", case
    for case in pack_cases():
        yield "packs", case
    for case in itertools.chain(long_cases(), attention_cases()):
        yield "attention", case


def run_check(name: str, case: Record) -> Record:
    begin = time.perf_counter()
    try:
        found = CHECKS[name](case)
        torch.cuda.synchronize()
    except Exception as error:
        found = {"ok": False, "error": f"{error!r}"[:300], "trace": traceback.format_exc()[-600:]}
    return {"check": name, "s": round(time.perf_counter() - begin, 1), **case, **found}


# -- timings ----------------------------------------------------------------------------------------------------------


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one call: the median of seven replays of a graph of all calls."""
    torch.cuda.synchronize()  # wait for the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[3] / len(calls) * 1e3


def decode_loads() -> dict[str, list[int]]:
    rnd = random.Random(0)
    loads = {"1x1024": [1024], "1x8192": [8192], "8x1024": [1024] * 8, "32x1024": [1024] * 32, "64x4096": [4096] * 64}
    loads["256x1024"] = [1024] * 256
    loads["256 mixed"] = [rnd.randint(100, 2048) for _ in range(256)]
    loads["64 mixed"] = [rnd.randint(100, 2048) for _ in range(64)]
    loads["1x65536"] = [65536]
    return loads


HEAD_SHAPES = [(32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 32, 128)]


def decode_tunings(head_dim: int) -> list[DecodeTuning]:
    """Tunings to compare with the default."""
    if head_dim == 64:
        tunings = [(64, 2, 4, 4), (128, 4, 3, 2), (128, 4, 3, 3), (64, 2, 3, 6), (64, 4, 4, 4)]
    else:
        tunings = [
            (32, 1, 4, 4),
            (64, 4, 3, 3),
            (64, 2, 3, 3),
            (64, 2, 4, 2),
            (32, 2, 4, 4),
            (32, 2, 3, 6),
            (128, 8, 3, 1),
        ]
    return [DecodeTuning(*tuning) for tuning in tunings]


def time_decode(heads: tuple[int, int, int], name: str, lens: list[int], block_size: int) -> Record:
    num_heads, kv_heads, head_dim = heads
    pool_blocks = sum(cdiv(n, block_size) for n in lens)
    num_bytes = 2 * sum(lens) * kv_heads * head_dim * 2
    layers = min(32, max(1, cdiv(COLD_BYTES, num_bytes)))
    kv = torch.randn((pool_blocks + 1, layers, 2, kv_heads, block_size, head_dim), device=DEVICE, dtype=torch.bfloat16)
    batch = make_batch([1] * len(lens), lens, block_size, pool_blocks)
    q = torch.randn(len(lens), num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), q.new_empty(0, dtype=torch.float32)
    found: dict[DecodeTuning, tuple[float, float]] = {}
    errors = []
    chosen = decode_tuning(q, len(lens))
    for tuning in dict.fromkeys([chosen, *decode_tunings(head_dim)]):

        def call(layer: int, tuning: DecodeTuning = tuning) -> None:
            decode_attention(
                q, kv[:, layer], batch, out, lse, scale=head_dim**-0.5, window=0, decode_only=True, tuning=tuning
            )

        try:
            hot = graph_us([lambda: call(0)] * 20)
            cold = graph_us([lambda i=i: call(i % layers) for i in range(max(20, layers))]) if layers > 1 else hot
            found[tuning] = cold, hot
        except Exception as error:
            errors.append(f"{tuning}: {error!r}"[:200])
    cold, hot = found[chosen]
    return {
        "decode": list(heads),
        "load": name,
        "block_size": block_size,
        "tuning": list(astuple(chosen)),
        "us": round(hot, 2),
        "tb_s": round(num_bytes / hot / 1e6, 3),
        "cold_us": round(cold, 2),
        "cold_tb_s": round(num_bytes / cold / 1e6, 3),
        "best_us": round(min(hot for _, hot in found.values()), 2),
        "best_cold_us": round(min(cold for cold, _ in found.values()), 2),
        "all_cold": {"/".join(map(str, astuple(tuning))): round(us, 1) for tuning, (us, _) in found.items()},
        **({"errors": errors} if errors else {}),
    }


def time_packs(num_rows: int, lines: int, context: int, heads: tuple[int, int, int] = HEAD_SHAPES[0]) -> Record:
    """Decode with several lines a row of Llama-3.1-8B: each line alone, and packed. K and V come from memory."""
    num_heads, kv_heads, head_dim = heads
    block_size, lens = 16, [context + lines - 1] * num_rows
    pool_blocks = sum(cdiv(n, block_size) for n in lens)
    num_bytes = 2 * sum(lens) * kv_heads * head_dim * 2
    layers = min(32, max(1, cdiv(COLD_BYTES, num_bytes)))
    kv = torch.randn((pool_blocks + 1, layers, 2, kv_heads, block_size, head_dim), device=DEVICE, dtype=torch.bfloat16)
    batch = make_lines(lens, lines, block_size, pool_blocks)
    q = torch.randn(batch.num_seqs, num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), q.new_empty(0, dtype=torch.float32)

    def cold_us(batch: RaggedBatch, tuning: DecodeTuning | None = None) -> float:
        n = batch.num_seqs

        def call(i: int) -> None:
            layer, options = kv[:, i % layers], {"scale": head_dim**-0.5, "window": 0, "decode_only": True}
            decode_attention(q[:n], layer, batch, out[:n], lse, tuning=tuning, **options)

        return graph_us([partial(call, i) for i in range(max(20, layers))])

    def packed(tuning: DecodeTuning) -> float | str:
        try:
            return round(cold_us(replace(batch, derived={}), tuning), 2)
        except Exception as error:
            return repr(error)[:100]

    alone = cold_us(replace(batch, derived={}, lines_per_row=1))
    first_lines = torch.arange(batch.num_seqs, device=DEVICE) % lines == 0
    plain = cold_us(select_lines(batch, first_lines))
    us = cold_us(replace(batch, derived={}))
    more = [(64, 2, 3, 3), (32, 2, 3, 6), (32, 2, 4, 4), (64, 4, 3, 3), (32, 1, 4, 4)]
    return {
        "packs": [num_rows, lines, context],
        "one_line_us": round(plain, 2),
        "alone_us": round(alone, 2),
        "us": round(us, 2),
        "ratio": round(alone / us, 3),
        "tb_s": round(num_bytes / us / 1e6, 3),
        "others": {"/".join(map(str, numbers)): packed(DecodeTuning(*numbers)) for numbers in more},
    }


def prefill_tunings(head_dim: int) -> list[tuple[int, int, int, int]]:
    """(rows, tile, warps, stages) to compare."""
    return [(128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2)]


def time_prefill(name: str, query_lens: list[int], seq_lens: list[int], block_size: int) -> Record:
    from octavo.kernels.triton.attention.prefill import prefill_attention
    from octavo.kernels.triton.attention.prefill_tuning import PrefillTuning

    num_heads, kv_heads, head_dim = 32, 8, 128
    pool_blocks = sum(cdiv(n, block_size) for n in seq_lens)
    kv = torch.randn((pool_blocks + 1, 1, 2, kv_heads, block_size, head_dim), device=DEVICE, dtype=torch.bfloat16)
    batch = make_batch(query_lens, seq_lens, block_size, pool_blocks)
    q = torch.randn(sum(query_lens), num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), q.new_empty(0, dtype=torch.float32)
    flops = sum(
        4 * num_heads * head_dim * (n * (s - n) + n * (n + 1) / 2) for n, s in zip(query_lens, seq_lens, strict=True)
    )
    rates: dict[str, float] = {}
    errors = []
    for numbers in prefill_tunings(head_dim):
        tuning = PrefillTuning(*numbers)

        def call(tuning: PrefillTuning = tuning) -> None:
            prefill_attention(
                q, kv[:, 0], batch, out, lse, scale=head_dim**-0.5, window=0, skip_single=False, tuning=tuning
            )

        try:
            rates["/".join(map(str, numbers))] = round(flops / graph_us([call] * 3) / 1e6, 1)
        except Exception as error:
            errors.append(f"{numbers}: {error!r}"[:200])
    best = max(rates, key=lambda key: rates[key])
    return {
        "prefill": name,
        "block_size": block_size,
        "tflop_s": rates[best],
        "best": best,
        "all": rates,
        "errors": errors,
    }


def time_small(n: int) -> Iterator[Record]:
    """The other kernels with n tokens of Llama-3.1-8B: microseconds, and TB/s of the bytes that must be moved."""
    from octavo.kernels.triton import ops as cuda

    def line(name: str, call: Callable[[], object], num_bytes: int) -> Record:
        us = graph_us([call] * 20)
        return {"kernel": name, "tokens": n, "us": round(us, 2), "tb_s": round(num_bytes / us / 1e6, 3)}

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    x, residual, weight = randn(n, 4096), randn(n, 4096), randn(4096)
    yield line("add_rms_norm 4096", lambda: cuda.add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes)
    gate_up = randn(n, 2 * 14336)
    yield line("silu_mul 14336", lambda: cuda.silu_mul(gate_up), gate_up.nbytes * 3 // 2)
    table = reference.rope_table(128, 8192, 500000.0, device=DEVICE)
    fused = randn(n, 48, 128)
    q, k, v = fused.split([32, 8, 8], dim=1)
    kv = torch.zeros(n // 16 + 100, 4, 2, 8, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.randperm(n + 64, device=DEVICE)[:n] + 16
    positions = torch.randint(8192, (n,), device=DEVICE)
    fusion = partial(cuda.rope_kv_write, q, k, v, positions, table, kv[:, 1], slots)
    yield line("rope_kv_write", fusion, 2 * fused.nbytes)
    yield line("kv_write", lambda: cuda.kv_write(k, v, kv[:, 1], slots), 4 * n * 8 * 256)


def time_block_copy(num_copies: int) -> Record:
    """Copies of blocks of 2 MiB."""
    from octavo.kernels.triton import ops as cuda

    kv = torch.zeros(600, 32, 2, 8, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    src = torch.randperm(299, device=DEVICE)[:num_copies] + 1
    dst = src + 299
    us = graph_us([lambda: cuda.block_copy(kv, src, dst)] * 20)
    tb_s = 2 * num_copies * kv[0].nbytes / us / 1e6
    return {"kernel": "block_copy", "copies": num_copies, "us": round(us, 2), "tb_s": round(tb_s, 3)}


def time_copy() -> Record:
    source = torch.randn(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    us = graph_us([lambda: torch.mul(source, 1.0, out=target)] * 5)  # not copy_: in a graph it uses the copy engine
    return {"copy_tb_s": round(2 * source.nbytes / us / 1e6, 3)}


def compile_decode(heads: tuple[int, int, int], tuning: DecodeTuning) -> None:
    """Compile decode kernels into Triton's cache on disk; several processes do so in parallel."""
    num_heads, kv_heads, head_dim = heads
    for num_seqs in (1, 8, 32, 64, 256):  # `_combine` differs
        kv = torch.zeros(num_seqs + 1, 2, 2, kv_heads, 16, head_dim, device=DEVICE, dtype=torch.bfloat16)
        batch = make_batch([1] * num_seqs, [16] * num_seqs, 16, num_seqs)
        q = torch.zeros(num_seqs, num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
        out, lse = torch.empty_like(q), q.new_empty(0, dtype=torch.float32)
        decode_attention(q, kv[:, 1], batch, out, lse, scale=1.0, window=0, decode_only=True, tuning=tuning)


# -- all of it --------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", choices=["check", "time", "packs"])
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=400, help="start no new measurement after this time")
    args = parser.parse_args()
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "gpu_check.jsonl").open("w")
    failures = 0

    def report(line: Record, show: bool = True) -> None:
        print(json.dumps(line), file=log, flush=True)
        if show:
            print(json.dumps({k: v for k, v in line.items() if k != "trace"}), flush=True)

    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        compilations = []
        if args.only in (None, "time"):
            compilations = [
                pool.submit(compile_decode, heads, tuning)
                for heads in HEAD_SHAPES
                for tuning in decode_tunings(heads[2])
            ]
        if args.only != "time":
            cases = [case for case in all_checks() if args.only != "packs" or case[0] == "packs"]
            checks = [pool.submit(run_check, name, case) for name, case in cases]
            done = 0
            for future in as_completed(checks):
                line = future.result()
                done += 1
                failures += not line["ok"]
                report(line, show=not line["ok"])
            report({"checks": done, "failed": failures, "s": round(time.monotonic() - started, 1)})
        for future in compilations:
            if future.exception() is not None:
                report({"compile": repr(future.exception())[:300]})

    if args.only != "check":
        props = torch.cuda.get_device_properties(0)
        report({"device": props.name, "multiprocessors": props.multi_processor_count, "torch": torch.__version__})
        sizes = list(itertools.product((1, 16, 64, 256), (2, 4, 5, 8), (500, 2000)))
        work: list[Callable[[], Record]] = [time_copy, *(partial(time_packs, *size) for size in sizes)]
        loads = decode_loads() if args.only != "packs" else {}
        for heads in HEAD_SHAPES:
            for name, lens in loads.items():
                if heads != (32, 32, 128) or len(lens) <= 64:
                    work.append(lambda heads=heads, name=name, lens=lens: time_decode(heads, name, lens, 16))
        for name in ("1x8192", "64x4096", "256 mixed") if loads else ():
            work.append(lambda name=name: time_decode(HEAD_SHAPES[0], name, loads[name], 64))
        prefills = {
            "4k": ([4096], [4096]),
            "8k": ([8192], [8192]),
            "16x1k": ([1024] * 16, [1024] * 16),
            "512 at 7.7k": ([512], [8192]),
        }
        for block_size in (16, 64) if loads else ():
            for name, (query_lens, seq_lens) in prefills.items():
                work.append(
                    lambda name=name, q=query_lens, s=seq_lens, b=block_size: time_prefill(name, q, s, b)  # type: ignore[misc]
                )
        for task in work:
            if time.monotonic() - started > args.seconds:
                report({"stopped": "out of time"})
                break
            try:
                report(task())
            except Exception as error:
                failures += 1
                report({"error": repr(error)[:300], "trace": traceback.format_exc()[-600:]})
        try:
            small = itertools.chain(*map(time_small, (1, 256, 8192)), map(time_block_copy, (1, 8, 64, 256)))
            for line in small if loads else ():
                report(line)
        except Exception as error:
            failures += 1
            report({"error": repr(error)[:300], "trace": traceback.format_exc()[-600:]})
    report({"failures": failures, "s": round(time.monotonic() - started, 1)})
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
