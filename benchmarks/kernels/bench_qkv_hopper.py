"""Decode steps of a model with random weights, with and without the fused QKV projection, on a GPU.

    PYTHONPATH=src python benchmarks/kernels/bench_qkv_hopper.py CONFIG_FOLDER [--layers N]

Microseconds, medians of seven rounds of ten replays of a CUDA graph, in turns: `separate` runs RoPE and the K/V write
in a kernel after the projection, `fused` in its epilogue (`project_qkv`), if the model and the batch support it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import split_heads
from octavo.kernels.triton import ops as cuda
from octavo.models.config import spec_from_config
from octavo.models.decoder import Decoder
from octavo.models.linear import LayerFactory

BLOCK_SIZE = 16
MIN_LEN, MAX_LEN = 100, 1800
NUM_SEQUENCES = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


def separate(stream: Any, eps: float, weight: Tensor, bias: Any, kv_layer: Tensor, batch: RaggedBatch, cos_sin: Tensor,
          *, q_norm: Any, k_norm: Any, norm_eps: float) -> Tensor:  # fmt: skip
    """`reference.project_qkv` as two kernels."""
    parts = split_heads(cuda.norm_linear(stream, eps, weight, bias), kv_layer)
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": norm_eps}
    return cuda.rope_kv_write(*parts, batch.positions, cos_sin, kv_layer, batch.slot_mapping, **norms)


VARIANTS = {"separate": SimpleNamespace(**(vars(cuda) | {"project_qkv": separate})), "fused": cuda}


def batch_of(lengths: list[int], ids: Iterator[int]) -> RaggedBatch:
    tables = [[next(ids) for _ in range(cdiv(n, BLOCK_SIZE))] for n in lengths]
    return RaggedBatch.from_lists([1] * len(lengths), lengths, tables, BLOCK_SIZE, device="cuda")


def captured(model: Decoder, ops: Any, token_ids: Tensor, batch: RaggedBatch, kv: Tensor) -> torch.cuda.CUDAGraph:
    for layer in model.layers:
        layer.attention.qkv.method.ops = ops
    with torch.cuda.stream(torch.cuda.Stream()):
        model.forward(token_ids, replace(batch, derived={}), kv, None)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward(token_ids, replace(batch, derived={}), kv, None)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, times: int = 10) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="layers of the model; default: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    spec = spec_from_config(json.loads((args.folder / "config.json").read_text()))
    spec = replace(spec, num_layers=args.layers or spec.num_layers)
    model = Decoder(spec, LayerFactory(cuda, torch.bfloat16, "cuda"), max_len=8192)
    for weight in model.weights():
        weight.tensor.normal_(0, weight.tensor.shape[-1] ** -0.5) if weight.tensor.ndim > 1 else weight.tensor.fill_(1)
    shape = spec.num_layers, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim
    num_blocks = max(NUM_SEQUENCES) * (MIN_LEN + MAX_LEN) // BLOCK_SIZE // 2 * 5 // 4
    kv = torch.randn(num_blocks + 1, *shape, device="cuda", dtype=torch.bfloat16)
    print(f"{'sequences':>9}{'tokens':>9}" + "".join(f"{name:>9}" for name in VARIANTS) + "    ratio")
    for num in NUM_SEQUENCES:
        rng = random.Random(num)
        lengths = [rng.randint(MIN_LEN, MAX_LEN) for _ in range(num)]
        batch = batch_of(lengths, iter(rng.sample(range(1, num_blocks + 1), num_blocks)))
        token_ids = torch.randint(spec.vocab_size, (num,), device="cuda")
        graphs = [captured(model, ops, token_ids, batch, kv) for ops in VARIANTS.values()]
        rounds = [[replay_us(graph) for graph in graphs] for _ in range(7)]
        us = [median(times) for times in zip(*rounds, strict=True)]
        print(f"{num:>9}{sum(lengths):>9}" + "".join(f"{t:>9.0f}" for t in us) + f"{us[0] / us[1]:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
