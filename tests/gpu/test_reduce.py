"""Sums and gathers over two or four GPUs: `python -m pytest tests/gpu/test_reduce.py -s`.

A process each; a wrong kernel gives up after some seconds and the test fails, with the last lines that a rank printed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.kernels.bench_reduce import open_reducer

from octavo.kernels.reference.norms import rms_norm
from octavo.kernels.triton.linear import skinny
from octavo.kernels.triton.linear.skinny import make_normed_residual
from octavo.kernels.triton.peer_memory import MAX_PUSHED_BYTES, PeerReducer
from tests.kernels.triton.peers import EPS, Case, Inputs, check, check_norm, collect

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = [Case(rows, width, BF16) for rows in (1, 8, 33, 64) for width in (96, 1030, 4096, 8192)]
CASES += [Case(3, 4096, F16), Case(5, 2050, F32), Case(128, 4096, BF16)]
CASES += [Case(256, 4096, BF16), Case(130, 8192, F16), Case(300, 1030, F32), Case(900, 4096, BF16)]
CASES += [Case(rows, 9000, dtype, norm=F32) for rows in (8, 300) for dtype in (BF16, F16)]
NCCL_CASES = [Case(1030, 4096, BF16), Case(1, 75, BF16)]
"""Too long, and no whole words."""
PRODUCTS = [(4096, num_in, num_tokens, False) for num_in in (2048, 7168) for num_tokens in (1, 7, 16, 32, 33, 64)]
PRODUCTS += [(1024, 1536, 3, True), (5120, 3200, 1, True), (5120, 12800, 64, False), (8448, 512, 9, True)]
PRODUCTS += [(1030, 96, 20, True), (12288, 256, 5, False), (896, 2432, 40, False), (4096, 1024, 65, False)]
"""Outputs, inputs of a rank, tokens, and whether there is a bias; the last is too long for a sum of its own."""


def say(rank: int, *words: Any) -> None:
    print(f"rank {rank}:", *words, flush=True)


def check_shapes(reducer: PeerReducer, rank: int, device: str) -> list[torch.Tensor]:
    """Of every case, before and after the epochs overflow; with random delays of the host."""
    kept = []
    for epoch in (0, (1 << 31) - 40):
        for slots in (reducer.buffers.pairs, reducer.buffers.blocks):
            slots.epochs.fill_(epoch)
        torch.cuda.synchronize()
        dist.barrier()
        for case in (*CASES, *NCCL_CASES):
            for repeat in range(3):
                time.sleep(0.001 * ((rank + repeat + case.rows) % 3))
                inputs = Inputs.of(case, repeat, reducer.buffers.size, device)
                results = collect(reducer, case, inputs, rank)
                assert not reducer.buffers.status.item(), f"{case}: a word did not come within the limit"
                try:
                    check(results, inputs, is_pushed=case in CASES)
                except AssertionError as error:
                    raise AssertionError(f"rank {rank}, {case}, repeat {repeat}, epoch {epoch}") from error
                kept += results
        say(rank, f"{len(CASES)} shapes from epoch {epoch} on are right")
    return kept


def check_replays(reducer: PeerReducer, rank: int, device: str) -> list[torch.Tensor]:
    """300 replays of a graph of 64 sums; each adds both ranks' parts to what the one before made."""
    case, kept = Case(8, 4096, BF16), []
    inputs = Inputs.of(case, 0, reducer.buffers.size, device)
    start = inputs.residual.clone()

    def chain() -> torch.Tensor:
        x = start
        for i in range(64):
            stream = collect(reducer, case, inputs._replace(residual=x), rank)
            x = (stream[1], stream[0] * 0.5 + stream[4][:, : case.width] * 0.25, stream[5] + stream[6])[i % 3]
        return x

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = chain()
    for repeat in range(300):
        out.fill_(float("nan"))
        if repeat % 50 == rank:
            time.sleep(0.05)
        graph.replay()
        if repeat % 20 == 0:
            assert not reducer.buffers.status.item(), f"replay {repeat}: a word did not come within the limit"
            assert torch.equal(out, expected), f"replay {repeat} differs from separate launches"
            kept.append(out.clone())
    say(rank, "300 replays of 64 x 4 collectives are right")
    return kept


def check_products(reducer: PeerReducer, rank: int, device: str) -> list[torch.Tensor]:
    """Products that sum over ranks themselves have the bits of a product and a sum after it. 40 replays of each graph.

    The launches' numbers overflow on the way. A rank is late now and then.
    """
    reducer.buffers.words.counters[1] = (1 << 31) - 3000
    kept = []
    for num_out, num_in, num_tokens, with_bias in PRODUCTS:
        make = torch.Generator(device).manual_seed(num_out + num_tokens)

        def random(*shape: int, make: torch.Generator = make) -> torch.Tensor:
            return torch.randn(shape, generator=make, device=device).to(BF16)

        stream, norm = make_normed_residual(random(num_tokens, num_out), random(num_out)), random(num_out)
        shared_bias = random(num_out)
        make.manual_seed(rank)
        xs, weight = [random(num_tokens, num_in) for _ in range(16)], random(num_out, num_in) * num_in**-0.5
        bias = shared_bias if with_bias and rank == 0 else None
        wanted = [reducer.add_reduced(stream, skinny.few_rows_linear(x, weight, bias), norm) for x in xs]
        reducer.add_linear(stream, xs[0], weight, bias, norm)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = [reducer.add_linear(stream, x, weight, bias, norm) for x in xs]
        for repeat in range(40):
            for result in results:
                result.x.fill_(float("nan"))
                result.weighted.fill_(float("nan"))
            if repeat % 10 == 5 * rank:
                time.sleep(0.003)
            graph.replay()
            assert not reducer.buffers.status.item(), f"{num_out}, {num_tokens}: a word did not come within the limit"
            for i, (result, other) in enumerate(zip(results, wanted, strict=True)):
                where = f"{num_out} x {num_in}, {num_tokens} tokens, replay {repeat}, launch {i}"
                assert torch.equal(result.x, other.x) and torch.equal(result.weighted, other.weighted), where
                parts = result.squares[:, :num_tokens].sum(0), other.squares[:, :num_tokens].sum(0)
                torch.testing.assert_close(*parts, rtol=1e-5, atol=1e-5)
        kept += [results[-1].x, results[-1].weighted]
    say(rank, f"{len(PRODUCTS)} products sum over ranks; {reducer.buffers.words.counters.tolist()}")
    return kept


def check_sends(reducer: PeerReducer, rank: int, device: str) -> list[torch.Tensor]:
    """Sums of 6 layers' two parts, sent while products run: alone, and in 200 replays of a graph, with late ranks.

    The numbers of uses overflow on the way.
    """
    reducer.buffers.sends.counters[:, 0] = (1 << 31) - 600
    make = torch.Generator(device).manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device).to(BF16)

    sizes, weight, norm = (1536, 1100), random(4096, 2048) * 2048**-0.5, random(4096)
    slots = [slot for _ in range(6) for slot in range(4)]
    inputs = [[[random(sizes[slot % 2], 2048) for slot in slots] for _ in range(2)] for _ in range(2)]
    residuals = [random(size, 4096) for size in sizes]

    def both_products(index: int, given: list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (x[index] @ weight.T for x in given)
        total = (first.float() + second.float() + residuals[index % 2].float()).to(BF16)
        return rms_norm(total, norm, EPS), total

    expected = [[both_products(index, [set_[other] for other in range(2)]) for index in range(24)] for set_ in inputs]
    xs = [x.clone() for x in inputs[0][rank]]

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        sent, results = [], []
        for slot, x in zip(slots, xs, strict=True):
            if len(sent) == 2:
                results.append(sent.pop(0).add_rms_norm(residuals[slot % 2], norm, EPS))
            sent.append(reducer.send(x @ weight.T, slot))
        return results + [x.add_rms_norm(residual, norm, EPS) for x, residual in zip(sent, residuals, strict=True)]

    def check_results(results: list[tuple[torch.Tensor, torch.Tensor]], which: int, where: str) -> None:
        assert not reducer.buffers.status.item(), f"{where}: a message did not come within the limit"
        for index, ((normed, total), (wanted_norm, wanted)) in enumerate(zip(results, expected[which], strict=True)):
            assert torch.equal(total, wanted), f"{where}, message {index}"
            check_norm(normed, wanted_norm)

    for repeat in range(20):
        for x, given in zip(xs, inputs[repeat % 2][rank], strict=True):
            x.copy_(given)
        if repeat % 4 == rank:
            time.sleep(0.003)
        check_results(run(), repeat % 2, f"pass {repeat}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    for repeat in range(200):
        for x, given in zip(xs, inputs[repeat % 2][rank], strict=True):
            x.copy_(given)
        if repeat % 20 == 10 * rank:
            time.sleep(0.003)
        graph.replay()
        if repeat % 10 in (0, 1, 5):
            check_results(results, repeat % 2, f"replay {repeat}")
    say(rank, f"200 replays of 24 sent sums are right; {reducer.buffers.sends.counters.tolist()}")
    return [x for result in results for x in result]


def run_rank(rank: int, size: int, folder: Path) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size, device_id=torch.device(device)
    )
    say(
        rank,
        torch.cuda.get_device_name(),
        "reaches the other:",
        torch.cuda.can_device_access_peer(rank, (rank + 1) % size),
    )
    sent_bytes = 1536 * 8192 if size == 2 else 0
    reducer = open_reducer(torch.device(device), MAX_PUSHED_BYTES, sent_bytes=sent_bytes)
    assert reducer is not None
    kept = check_shapes(reducer, rank, device) + check_replays(reducer, rank, device)
    kept += check_products(reducer, rank, device)
    if sent_bytes:
        kept += check_sends(reducer, rank, device)
    torch.save([x.cpu() for x in kept], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_gpus_get_the_same_sums(tmp_path: Path, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    mp.spawn(run_rank, (size, tmp_path), nprocs=size)
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    assert len(first) > 100
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
