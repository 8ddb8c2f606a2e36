"""The recurrence of a Gated DeltaNet, a layer of Qwen3.5-35B-A3B or Qwen3.5-0.8B, beside Transformers.

    native        `kernels.cpu`: position by position; on a GPU `kernels.triton`, whose calls are replayed from a graph
    reference     `kernels.reference`: the same in torch
    Transformers  chunks of 64 positions for prompts, its recurrent function for one position

They take turns in one process, in layers with states of their own. Times are the best of several turns, of one thread
its processor time, of a GPU by its events. GB/s are of the states, read and written once.

    OMP_NUM_THREADS=1 python benchmarks/kernels/bench_recurrent.py --tokens 1 64 512
    PYTHONPATH=src python benchmarks/kernels/bench_recurrent.py --device cuda --sequences 64 --tokens 1
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as transformers_model

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch

SHAPES = {"35B-A3B": (16, 32), "0.8B": (16, 16)}
"""Heads of K and of V, of 128."""
DIM, LAYERS = 128, 8


def transformers_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, first: int, batch: RaggedBatch
) -> Tensor:
    num_seqs, num_heads = len(batch.seq_lens), v.shape[1]
    name = "torch_chunk_gated_delta_rule" if batch.max_query_len > 1 else "torch_recurrent_gated_delta_rule"
    q, k = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (q, k))
    inputs = (x.view(num_seqs, -1, *x.shape[1:]) for x in (q, k, v, decay, beta))
    state = states[1:].view(num_seqs, num_heads, DIM, DIM)
    out, state = getattr(transformers_model, name)(
        *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    states[1:] = state.view(num_seqs, -1)
    return out.flatten(0, 1)


def call(rule: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """inputs: q, k, v, decay, beta, batch, states"""
    *tensors, batch, states = inputs
    return rule(*tensors, states, 0, batch)


def cpu_seconds(run: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    run()
    return clock() - started


def gpu_seconds(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def record(rule: Callable[[Tensor], object], layers: list[Tensor]) -> Callable[[], object]:
    """A replay of one call for each layer."""
    rule(layers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for states in layers:
            rule(states)
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="35B-A3B")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 512], help="of a prompt; 1: a step")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of tokens")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    num_keys, num_heads = SHAPES[args.model]
    on_gpu, ops, seconds_of = args.device == "cuda", cpu, cpu_seconds
    name = f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    if on_gpu:
        from octavo.kernels.triton import ops as cuda

        torch.set_default_device("cuda")
        ops, seconds_of, name = cuda, gpu_seconds, torch.cuda.get_device_name()
    rules: dict[str, Callable[..., Tensor]] = {
        "native": ops.gated_delta_rule, "reference": reference.gated_delta_rule, "Transformers": transformers_rule
    }  # fmt: skip
    print(f"{name}; us a layer and position")
    print(f"{'tokens':>6}" + "".join(f"{name:>14}" for name in rules) + f"{'state GB/s':>14}")
    num_seqs, size = args.sequences, num_heads * DIM * DIM
    layers = [torch.zeros(1 + num_seqs, size) for _ in range(LAYERS)]
    tables = torch.arange(1, num_seqs + 1, dtype=torch.int32).unsqueeze(1)
    for num_tokens in args.tokens:
        lens = [num_tokens] * num_seqs
        seq_len = num_tokens + 1000
        tables_of_kv = [[0] * cdiv(seq_len, 16)] * num_seqs
        batch = RaggedBatch.from_lists(lens, [seq_len] * num_seqs, tables_of_kv, 16, device=args.device)
        batch = replace(batch, state_tables=tables, state_reads=tables)
        q, k = torch.randn(2, num_tokens * num_seqs, num_keys, DIM).bfloat16()
        v = torch.randn(num_tokens * num_seqs, num_heads, DIM).bfloat16()
        decay, beta = -torch.rand(len(v), num_heads), torch.rand(len(v), num_heads)
        found = [rule(q, k, v, decay, beta, layers[0].zero_(), 0, batch).float() for rule in rules.values()]
        assert all((out - found[1]).norm() < 0.02 * found[1].norm() for out in found)
        calls = {name: partial(call, rule, q, k, v, decay, beta, batch) for name, rule in rules.items()}
        replay = record(calls["native"], layers) if on_gpu else None
        best, begin, turn = dict.fromkeys(rules, float("inf")), time.perf_counter(), 0
        while turn < 3 * LAYERS or time.perf_counter() - begin < args.seconds:
            for name, one in calls.items():
                if replay is not None and name == "native":
                    seconds = seconds_of(replay) / LAYERS
                else:
                    seconds = seconds_of(partial(one, layers[turn % LAYERS]))
                best[name] = min(best[name], seconds)
            turn += 1
        times = "".join(f"{seconds * 1e6 / len(v):>14.1f}" for seconds in best.values())
        print(f"{num_tokens:>6}{times}{8 * size * num_seqs / best['native'] / 1e9:>14.1f}", flush=True)


if __name__ == "__main__":
    main()
