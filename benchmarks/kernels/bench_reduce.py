"""Sums over the ranks of several GPUs: pushed through peer memory, by NCCL, and by torch's symmetric memory.

`PYTHONPATH=src python benchmarks/kernels/bench_reduce.py [--ranks 2] [--way pairs]`: microseconds of a call in a CUDA
graph of 64 calls, of the slowest rank. Each width ends with the smallest messages that blocks and NCCL sum faster.

+norm  with residual and the next norm, which the small-batch path applies later
whole  with residual and whole norm, in blocks whatever the way; `2 steps`: the pushed sum, then a kernel for the rest
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp

from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear.skinny import add_linear, few_rows_linear, make_normed_residual
from octavo.kernels.triton.norms import add_rms_norm
from octavo.kernels.triton.peer_memory import PeerCopies, PeerReducer, open_buffers
from octavo.kernels.triton.reduce import PAIRED_BYTES, push_add, push_add_norm, push_gather, push_reduce

CALLS, REPLAYS, ROUNDS = 64, 20, 3
MAX_BYTES = 16 << 20
EPS = 1e-6
SPIN_LIMIT = 1 << 24
"""About 20 s: a rank compiles kernels while another waits."""


def open_reducer(
    device: torch.device, max_bytes: int, paired_bytes: int = PAIRED_BYTES, sent_bytes: int = 0
) -> PeerReducer | None:
    """Of the ranks of the default group. None on all ranks if a GPU cannot reach another's memory."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def exchange(data: bytes) -> list[bytes]:
        parts: list[bytes] = [b""] * size
        dist.all_gather_object(parts, data)
        return parts

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty(size, *x.shape)
        dist.all_gather_into_tensor(parts, x)
        return torch.cat(parts.unbind(0), dim=1)

    limits = {"spin_limit": SPIN_LIMIT, "paired_bytes": paired_bytes, "sent_bytes": sent_bytes}
    buffers = open_buffers(rank, size, device, exchange, max_bytes, **limits)
    engine = PeerCopies(device) if sent_bytes else None
    return None if buffers is None else PeerReducer(buffers, all_reduce, all_gather, engine)


def graph_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call, of the slowest rank, in the best round."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    graph.replay()
    rounds = torch.empty(ROUNDS, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        rounds[i] = begin.elapsed_time(end) * 1e3 / REPLAYS / CALLS
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return float(rounds.min())


def torch_one_shot(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object] | str:
    """torch's sum of x, copied into its symmetric memory before; or why there is none."""
    try:
        buffer = symmetric_memory.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        symmetric_memory.rendezvous(buffer, group)
        call = lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)  # noqa: E731
        call()
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError) as error:
        return " ".join(str(error).split())[:80]
    return call


def measure(rank: int, ranks: int, store: str, ways: list[str]) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    say = print if rank == 0 else lambda *words, **options: None
    if (reducer := open_reducer(device, MAX_BYTES, MAX_BYTES)) is None:
        say("no peer memory: nothing to measure", flush=True)
        dist.destroy_process_group()
        return
    limits = {"pairs": MAX_BYTES, "blocks": 0}
    buffers = {way: replace(reducer.buffers, paired_bytes=limits[way]) for way in ways}
    status = reducer.buffers.status
    say(f"{torch.cuda.get_device_name()} x {ranks}, torch {torch.__version__}; microseconds of a call")
    pushed = "".join(f"{way:>9}{'+norm':>9}{'gather':>9}{'2 steps':>9}" for way in ways)
    say(f"{'bfloat16':14}{'KiB':>7}{pushed}{'whole':>9}{'NCCL':>9}{'+norm':>9}{'torch':>9}", flush=True)
    for width in (4096, 8192):
        faster: dict[str, int] = {}
        for rows in (1, 8, 32, 64, 128, 256, 512, 1024):
            x, norm = torch.zeros(rows, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
            stream = make_normed_residual(x.clone(), norm)

            def nccl(x: torch.Tensor = x) -> torch.Tensor:
                dist.all_reduce(x, group=group)
                return x

            def nccl_add(stream: object = stream, norm: torch.Tensor = norm) -> object:
                return make_normed_residual(stream.x + nccl(), norm)  # type: ignore[attr-defined]

            one_shot = torch_one_shot(x, group)
            calls = []
            for way in buffers.values():
                calls += [
                    lambda way=way, x=x: push_reduce(way, x),
                    lambda way=way, x=x, stream=stream, norm=norm: push_add(way, stream, x, norm),
                    lambda way=way, x=x: push_gather(way, x),
                    lambda way=way, x=x, r=stream.x, norm=norm: add_rms_norm(push_reduce(way, x), r, norm, EPS),
                ]
            calls.append(lambda x=x, r=stream.x, norm=norm: push_add_norm(reducer.buffers, x, r, norm, EPS))
            calls += [nccl, nccl_add]
            times = [graph_us(call, device) for call in calls]
            theirs = one_shot if isinstance(one_shot, str) else f"{graph_us(one_shot, device):9.2f}"
            if status.item():
                raise RuntimeError(f"rank {rank}, {rows} x {width}: a word did not come within the spin limit")
            say(f"{rows:5} x {width:6}{x.nbytes >> 10:7}", *(f"{us:8.2f}" for us in times), theirs, flush=True)
            if times[-2] < min(times[:-3:4]):
                faster.setdefault("NCCL", x.nbytes)
            if len(ways) == 2 and times[4] < times[0]:
                faster.setdefault("blocks", x.nbytes)
        for name in ("blocks", "NCCL"):
            first = f"{faster[name] >> 10} KiB" if name in faster else "none of these"
            say(f"{name}: faster from {first}", flush=True)
    measure_products(reducer, ranks, device, say)
    dist.barrier()
    dist.destroy_process_group()


def measure_products(reducer: PeerReducer, ranks: int, device: torch.device, say: Callable[..., None]) -> None:
    """Products of Llama 3.1 8B with a sum over ranks, the residual and the norm: in one kernel, and in two."""
    say(f"{'product':14}{'tokens':>7}{'one':>9}{'two':>9}{'alone':>9}")
    for num_in in (4096 // ranks, 14336 // ranks):
        weights = [torch.zeros(4096, num_in, dtype=torch.bfloat16, device=device) for _ in range(CALLS)]
        norm = torch.ones(4096, dtype=torch.bfloat16, device=device)
        for num_tokens in (1, 8, 16, 32, 64):
            x = torch.zeros(num_tokens, num_in, dtype=torch.bfloat16, device=device)
            stream = make_normed_residual(torch.zeros(num_tokens, 4096, dtype=torch.bfloat16, device=device), norm)

            def one(weight: torch.Tensor, x: torch.Tensor = x, stream: NormedResidual = stream) -> object:
                return reducer.add_linear(stream, x, weight, None, norm)  # noqa: B023

            def two(weight: torch.Tensor, x: torch.Tensor = x, stream: NormedResidual = stream) -> object:
                return reducer.add_reduced(stream, few_rows_linear(x, weight, None), norm)  # noqa: B023

            def alone(weight: torch.Tensor, x: torch.Tensor = x, stream: NormedResidual = stream) -> object:
                return add_linear(stream, x, weight, None, norm)  # noqa: B023

            times = []
            for call in (one, two, alone):
                turn = itertools.cycle(weights)  # each from memory, as in a model
                times.append(graph_us(lambda call=call, turn=turn: call(next(turn)), device))
            say(f"4096 x {num_in:7}{num_tokens:7}", *(f"{us:8.2f}" for us in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--way", choices=("pairs", "blocks"), help="of sending; default: both")
    args = parser.parse_args()
    ranks, ways = args.ranks, [args.way] if args.way else ["pairs", "blocks"]
    if torch.cuda.device_count() < ranks:
        raise SystemExit(f"needs {ranks} GPUs; there are {torch.cuda.device_count()}")
    print("can_device_access_peer(0, 1):", torch.cuda.can_device_access_peer(0, 1), flush=True)
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    print(topology.stdout or topology.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (ranks, f"{folder}/store", ways), nprocs=ranks)


if __name__ == "__main__":
    main()
