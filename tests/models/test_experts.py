"""Bugs planted in experts and attention sinks change the logits by more than the tests of models tolerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.models.experts import Experts
from octavo.models.loading import loader
from octavo.models.loading.experts import split_experts
from tests.models.loading.test_loader import edit
from tests.models.tiny import PagedRun, load_tiny, make_tiny_checkpoint, random_prompts, transformers_logits

PROMPTS = random_prompts(9, 23)
TOLERANCE = 2e-5
"""That of `assert_close`."""

Plant: TypeAlias = Callable[[Any, Any], None]
"""Plants a bug in a model, and in the operations that it alone uses."""


class Ops(ModuleType):
    """Operations of a platform in which bugs can be planted."""

    def __init__(self, ops: ModuleType) -> None:
        super().__init__("planted")
        self.__dict__.update(vars(ops))


def change_route(change: Callable[[Routing], Routing], model: Any, ops: Any) -> None:
    route = ops.route
    ops.route = lambda logits, top_k, **how: change(route(logits, top_k, **how))


def route_otherwise(model: Any, ops: Any, **others: bool) -> None:
    route = ops.route
    ops.route = lambda logits, top_k, **how: route(logits, top_k, **(how | others))


def higher_ties(model: Any, ops: Any) -> None:
    """Of equal logits, the higher id wins."""
    route = ops.route

    def wrong(logits: Tensor, top_k: int, **how: bool) -> Routing:
        routing = route(logits.flip(1).contiguous(), top_k, **how)
        return Routing(logits.shape[1] - 1 - routing.experts.flip(1), routing.weights.flip(1))

    ops.route = wrong


def change_gate(model: Any, ops: Any, **fields: Any) -> None:
    products = ops.experts_in

    def wrong(x: Tensor, weight: Tensor, bias: Any, routing: Routing, num: int, gate: ExpertGate) -> Tensor:
        return products(x, weight, bias, routing, num, gate._replace(**fields))

    ops.experts_in = wrong


def exchange_gate_and_up(model: Any, ops: Any) -> None:
    products = ops.experts_in

    def exchanged(tensor: Tensor, num_experts: int) -> Tensor:
        return tensor.unflatten(0, (num_experts, 2, -1)).flip(1).flatten(0, 2)

    def wrong(x: Tensor, weight: Tensor, bias: Any, routing: Routing, num: int, gate: ExpertGate) -> Tensor:
        bias = None if bias is None else exchanged(bias, num)
        return products(x, exchanged(weight, num), bias, routing, num, gate)

    ops.experts_in = wrong


def next_expert(name: str, model: Any, ops: Any) -> None:
    """A product, "experts_in" or "experts_out", by the expert after each of a token's."""
    products = getattr(ops, name)

    def wrong(x: Tensor, weight: Tensor, bias: Any, routing: Routing, num: int, *gate: Any) -> Tensor:
        return products(x, weight, bias, replace(routing, experts=(routing.experts + 1) % num), num, *gate)

    setattr(ops, name, wrong)


def bias_once(model: Any, ops: Any) -> None:
    """The down projection's bias of each chosen expert is added once for a token, not times the expert's weight."""
    products = ops.experts_out

    def wrong(h: Tensor, weight: Tensor, bias: Tensor, routing: Routing, num: int) -> Tensor:
        biases: Tensor = bias.view(num, -1)[routing.experts.long()].sum(1)
        return products(h, weight, None, routing, num) + biases

    ops.experts_out = wrong


def no_bias(name: str, model: Any, ops: Any) -> None:
    products = getattr(ops, name)
    setattr(ops, name, lambda x, weight, bias, *others: products(x, weight, None, *others))


def experts_of(model: Any) -> list[Experts]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]


def open_shared_gate(model: Any, ops: Any) -> None:
    for experts in experts_of(model):
        experts.shared_gate = lambda x: x.new_full((len(x), 1), 99.0)  # type: ignore[assignment]


def no_shared_expert(model: Any, ops: Any) -> None:
    for experts in experts_of(model):
        experts.shared = None


def no_router_bias(model: Any, ops: Any) -> None:
    for experts in experts_of(model):
        experts.router.bias = None


def no_sinks(model: Any, ops: Any) -> None:
    attention = ops.paged_attention
    ops.paged_attention = lambda *args, **how: attention(*args, **(how | {"sinks": None}))


def first_sink(model: Any, ops: Any) -> None:
    """All heads have the sink of the first."""
    attention = ops.paged_attention

    def wrong(*args: Any, **how: Any) -> Tensor:
        return attention(*args, **(how | {"sinks": how["sinks"][:1].repeat(len(how["sinks"]))}))

    ops.paged_attention = wrong


class Case(NamedTuple):
    kind: str
    plant: Plant
    sizes: dict[str, Any] = {}  # noqa: RUF012


def first_weight(routing: Routing) -> Routing:
    first = routing.weights[:, :1]
    return replace(routing, weights=first.repeat(1, routing.weights.shape[1]))


def turned_weights(routing: Routing) -> Routing:
    return replace(routing, weights=routing.weights.roll(1, 1))


CASES: dict[str, Case] = {
    "gate and up exchanged": Case("qwen3_moe", exchange_gate_and_up),
    "gate and up exchanged, with biases": Case("gpt_oss", exchange_gate_and_up),
    "weights renormalised": Case("qwen3_moe", partial(route_otherwise, renormalise=True)),
    "weights not renormalised": Case("mixtral", partial(route_otherwise, renormalise=False)),
    "softmax over the chosen": Case("qwen3_moe", partial(route_otherwise, softmax_first=False)),
    "softmax over all": Case("gpt_oss", partial(route_otherwise, softmax_first=True)),
    "first weight for all": Case("mixtral", partial(change_route, first_weight)),
    "weights of other experts": Case("mixtral", partial(change_route, turned_weights)),
    "gate and up of the next expert": Case("mixtral", partial(next_expert, "experts_in")),
    "down of the next expert": Case("mixtral", partial(next_expert, "experts_out")),
    "higher ties": Case("gpt_oss ties", higher_ties),
    "silu for gelu": Case("mixtral", partial(change_gate, name="silu"), {"hidden_act": "gelu_pytorch_tanh"}),
    "open gate of the shared expert": Case("qwen3_next", open_shared_gate),
    "no shared expert": Case("qwen3_5_moe", no_shared_expert),
    "no sinks": Case("gpt_oss", no_sinks),
    "first sink for all": Case("gpt_oss", first_sink),
    "no clamp": Case("gpt_oss", partial(change_gate, limit=1e30)),
    "alpha of 1": Case("gpt_oss", partial(change_gate, alpha=1.0)),
    "plain gate": Case("gpt_oss", partial(change_gate, name="silu")),
    "no router bias": Case("gpt_oss", no_router_bias),
    "no bias of gate and up": Case("gpt_oss", partial(no_bias, "experts_in")),
    "no bias of down": Case("gpt_oss", partial(no_bias, "experts_out")),
    "bias of down once": Case("gpt_oss", bias_once),
}


def tie_routers(lower_by: float, tensors: dict[str, Tensor]) -> None:
    """All tokens have these logits of 6 experts, of which 3 are chosen: the last one is expert 2, not 5."""
    for name in tensors:
        if name.endswith("router.weight"):
            tensors[name].zero_()
        elif name.endswith("router.bias"):
            tensors[name].copy_(torch.tensor([1.0, -0.25, 0.5, 1.0, -0.25, 0.5 - lower_by]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Tensor]]:
    """A case -> its directory and Transformers' logits."""
    made: dict[str, tuple[Path, Tensor]] = {}

    def find(case: Case) -> tuple[Path, Tensor]:
        if (key := f"{case.kind} {case.sizes}") not in made:
            kind, _, ties = case.kind.partition(" ")
            folder = make_tiny_checkpoint(kind, tmp_path_factory.mktemp("model") / "model", **case.sizes)
            if ties:  # which Transformers breaks in any way: its expert 5 is a little below
                edit(folder, partial(tie_routers, 1e-5))
            logits = torch.cat(transformers_logits(folder, PROMPTS))
            if ties:
                edit(folder, partial(tie_routers, 0.0))
            made[key] = folder, logits
        return made[key]

    return find


def distance(model: Any, expected: Tensor) -> float:
    """The largest error of a logit, by the largest logit."""
    logits = torch.cat(PagedRun(model, PROMPTS, block_size=4).run(7))
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("platform", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_every_planted_bug_is_noticed(name: str, platform: ModuleType, models: Any) -> None:
    case = CASES[name]
    directory, expected = models(case)
    model = load_tiny(directory, ops := Ops(platform))
    assert distance(model, expected) <= TOLERANCE
    case.plant(model, ops)
    assert not distance(model, expected) <= 10 * TOLERANCE


def test_gate_and_up_in_halves_are_noticed(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss's are interleaved."""
    directory, expected = models(Case("gpt_oss", no_sinks))
    monkeypatch.setattr(
        loader, "split_experts", lambda stored, layout: split_experts(stored, replace(layout, interleaved=False))
    )
    assert not distance(load_tiny(directory), expected) <= 10 * TOLERANCE
