"""The recurrence of a Gated DeltaNet on the CPU, a layer of Qwen3.5-35B-A3B or Qwen3.5-0.8B, beside Transformers.

    native        `kernels.cpu`: position by position
    reference     `kernels.reference`: the same in torch
    Transformers  chunks of 64 positions for prompts, its recurrent function for one position

They take turns in one process, in layers with states of their own. Times are the best of several turns, of one thread
its processor time.

    OMP_NUM_THREADS=1 python benchmarks/kernels/bench_recurrent.py --tokens 1 64 512
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as transformers_model

from octavo.kernels import reference
from octavo.kernels.cpu import ops
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="35B-A3B")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 512], help="of a prompt; 1: a step")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of tokens")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    num_keys, num_heads = SHAPES[args.model]
    rules: dict[str, Callable[..., Tensor]] = {
        "native": ops.gated_delta_rule, "reference": reference.gated_delta_rule, "Transformers": transformers_rule
    }  # fmt: skip
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; us a layer and position")
    print(f"{'tokens':>6}" + "".join(f"{name:>14}" for name in rules) + f"{'state GB/s':>14}")
    num_seqs, size = args.sequences, num_heads * DIM * DIM
    layers = [torch.zeros(1 + num_seqs, size) for _ in range(LAYERS)]
    tables = torch.arange(1, num_seqs + 1, dtype=torch.int32).unsqueeze(1)
    for num_tokens in args.tokens:
        lens = [num_tokens] * num_seqs
        batch = RaggedBatch.from_lists(lens, [1000] * num_seqs, [[0] * 63] * num_seqs, 16)
        batch = replace(batch, state_tables=tables)
        q, k = torch.randn(2, num_tokens * num_seqs, num_keys, DIM).bfloat16()
        v = torch.randn(num_tokens * num_seqs, num_heads, DIM).bfloat16()
        decay, beta = -torch.rand(len(v), num_heads), torch.rand(len(v), num_heads)
        found = [rule(q, k, v, decay, beta, layers[0].zero_(), 0, batch).float() for rule in rules.values()]
        assert all((out - found[1]).norm() < 0.02 * found[1].norm() for out in found)
        best, begin, turn = dict.fromkeys(rules, float("inf")), time.perf_counter(), 0
        while turn < 3 * LAYERS or time.perf_counter() - begin < args.seconds:
            for name, rule in rules.items():
                started = clock()
                rule(q, k, v, decay, beta, layers[turn % LAYERS], 0, batch)
                best[name] = min(best[name], clock() - started)
            turn += 1
        times = "".join(f"{seconds * 1e6 / len(v):>14.1f}" for seconds in best.values())
        print(f"{num_tokens:>6}{times}{8 * size * num_seqs / best['native'] / 1e9:>14.1f}", flush=True)


if __name__ == "__main__":
    main()
