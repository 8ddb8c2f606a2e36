"""Experts of one layer of Qwen3-30B-A3B on the CPU, beside torch and Transformers, in bfloat16.

    native        `kernels.cpu`: router, two products of 8 of 128 experts for each token, gate and sum
    4 bits        the same with weights in groups of 32
    segments      torch: pairs sorted by expert, a product for each expert in use
    Transformers  its eager experts, without a router; if it is installed

They take turns in one process, in layers with weights of their own: one layer's would stay in a cache. Times are the
best of several turns; those of one thread are its processor time. The bytes are those of the distinct experts in
bfloat16.

    OMP_NUM_THREADS=2 python benchmarks/kernels/bench_experts.py --tokens 1 16
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu import ops
from octavo.kernels.cpu.huge_memory import move_to_huge
from octavo.kernels.groups import GroupForm, Groups, PackedExperts
from octavo.kernels.reference import ExpertGate

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
FORM = GroupForm(4, 32, zero=8)
Run = Callable[[Tensor, Tensor], Tensor]
"""(x [num_tokens, HIDDEN], logits [num_tokens, EXPERTS]) -> [num_tokens, HIDDEN]"""


def random_weight(num_out: int, num_in: int) -> Tensor:
    weight = move_to_huge(torch.empty(EXPERTS * num_out, num_in, dtype=torch.bfloat16))
    return weight.normal_(0, num_in**-0.5)


def random_packed(num_out: int, num_in: int) -> PackedExperts:
    values = torch.randint(0, 16, (EXPERTS * num_out, num_in), dtype=torch.uint8)
    packed = ops.pack_experts(Groups(FORM, values, torch.full((len(values), num_in // 32), 2.0**-8).half()), EXPERTS)
    assert packed is not None
    return packed


def native(gate_up: Tensor, down: Tensor) -> Run:
    def run(x: Tensor, logits: Tensor) -> Tensor:
        routing = ops.route(logits, TOP_K, softmax_first=True, renormalise=True)
        h = ops.experts_in(x, gate_up, None, routing, EXPERTS, ExpertGate())
        return ops.experts_out(h, down, None, routing, EXPERTS)

    return run


def in_groups(gate_up: PackedExperts, down: PackedExperts) -> Run:
    def run(x: Tensor, logits: Tensor) -> Tensor:
        routing = ops.route(logits, TOP_K, softmax_first=True, renormalise=True)
        return down.experts_out(gate_up.experts_in(x, None, routing, ExpertGate()), None, routing)

    return run


def segments(gate_up: Tensor, down: Tensor) -> Run:
    gate_ups, downs = gate_up.view(EXPERTS, 2 * INNER, HIDDEN), down.view(EXPERTS, HIDDEN, INNER)

    def run(x: Tensor, logits: Tensor) -> Tensor:
        weights, experts = logits.softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=EXPERTS).tolist()
        out = torch.empty(len(order), HIDDEN, dtype=x.dtype)
        rows = torch.split(x[order // TOP_K], counts)
        for expert, (x_in, y) in enumerate(zip(rows, torch.split(out, counts), strict=True)):
            if len(x_in):
                gate, up = F.linear(x_in, gate_ups[expert]).chunk(2, -1)
                y.copy_(F.linear(F.silu(gate) * up, downs[expert]))
        pairs = torch.empty_like(out)
        pairs[order] = out
        return (pairs.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(2).to(x.dtype)).sum(1)

    return run


def transformers_experts(gate_up: Tensor, down: Tensor) -> Run | None:
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError:
        return None
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]
    module.gate_up_proj = torch.nn.Parameter(gate_up.view(EXPERTS, 2 * INNER, HIDDEN), requires_grad=False)
    module.down_proj = torch.nn.Parameter(down.view(EXPERTS, HIDDEN, INNER), requires_grad=False)

    def run(x: Tensor, logits: Tensor) -> Tensor:
        weights, experts = logits.softmax(-1).topk(TOP_K)
        y: Tensor = module(x, experts, (weights / weights.sum(-1, keepdim=True)).to(x.dtype))
        return y

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of tokens")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    layers: list[dict[str, Run]] = []
    for _ in range(args.layers):
        gate_up, down = random_weight(2 * INNER, HIDDEN), random_weight(HIDDEN, INNER)
        packed = random_packed(2 * INNER, HIDDEN), random_packed(HIDDEN, INNER)
        runs = {"native": native(gate_up, down), "4 bits": in_groups(*packed), "segments": segments(gate_up, down)}
        if (other := transformers_experts(gate_up, down)) is not None:
            runs["Transformers"] = other
        layers.append(runs)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; ms a layer, GB/s of bfloat16 experts")
    print(f"{'tokens':>6}{'experts':>9}" + "".join(f"{name:>14}" for name in layers[0]) + f"{'native GB/s':>14}")
    for num_tokens in args.tokens:
        best, begin, turn = dict.fromkeys(layers[0], float("inf")), time.perf_counter(), 0
        x, logits = torch.randn(num_tokens, HIDDEN).bfloat16(), torch.randn(num_tokens, EXPERTS)
        expected = layers[0]["segments"](x, logits)
        assert (layers[0]["native"](x, logits) - expected).norm() < 0.02 * expected.norm()
        while turn < 3 * args.layers or time.perf_counter() - begin < args.seconds:
            for name, run in layers[turn % args.layers].items():
                started = clock()
                run(x, logits)
                best[name] = min(best[name], clock() - started)
            turn += 1
        used = len(set(logits.topk(TOP_K).indices.flatten().tolist()))
        num_bytes = used * 3 * INNER * HIDDEN * 2  # gate, up and down
        times = "".join(f"{seconds * 1e3:>14.2f}" for seconds in best.values())
        print(f"{num_tokens:>6}{used:>9}{times}{num_bytes / best['native'] / 1e9:>14.1f}", flush=True)


if __name__ == "__main__":
    main()
