"""A mixture of experts, in place of a decoder layer's MLP."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.reference.norms import NormedResidual
from octavo.models.layers import GatedMLP
from octavo.models.linear import LayerFactory, Linear, Slot, Weight
from octavo.models.linear_methods import NO_LIMIT
from octavo.models.spec import DecoderSpec, LinearShape
from octavo.models.spec.tensors import EXPERT_ROLES


class WholeLinear:
    """A small linear layer whose outputs a CPU does not round, which is never quantised and equal on all ranks."""

    def __init__(self, shape: LinearShape, factory: LayerFactory) -> None:
        self.shape = shape
        self.method = factory.method(*shape.shape, "router")
        self.bias = factory.empty(shape.num_out) if shape.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_size] -> [num_tokens, num_out] float32; on a GPU in x's dtype."""
        logits = self.method.logits(x)
        return logits if self.bias is None else logits + self.bias

    def weights(self, prefix: str) -> Iterator[Weight]:
        name = prefix + self.shape.names[0]
        yield Weight(f"{name}.weight", self.shape.shape, Slot(self.method, 0, self.shape.num_out), (0, 0))
        if self.bias is not None:
            yield Weight.whole(f"{name}.bias", self.bias)


class Experts:
    """The sum of a few gated MLPs of many, which a router chooses for each token, and maybe of one for all tokens.

    A rank has some columns of each expert.
    """

    def __init__(self, spec: DecoderSpec, factory: LayerFactory) -> None:
        experts, own = spec.experts, spec.of_rank(factory.tp.size).experts
        assert experts is not None and own is not None
        self.spec, self.ops, self.tp = experts, factory.ops, factory.tp
        self.gate = ExpertGate(experts.gate, experts.alpha, experts.limit)
        linears, own_linears = experts.linears(spec.hidden_size), own.linears(spec.hidden_size)
        self.router = WholeLinear(linears["router"], factory)
        self.up, self.down = (
            Linear(linears[role], own_linears[role], factory, num_experts=experts.num) for role in EXPERT_ROLES
        )
        self.shared: GatedMLP | None = None
        if experts.shared_inner:
            shared_in, shared_out = (
                Linear(linears[role], own_linears[role], factory) for role in ("shared_in", "shared_out")
            )
            self.shared = GatedMLP(shared_in, shared_out, spec.activation)
            self.shared_gate = WholeLinear(linears["shared_gate"], factory)

    def __call__(self, x: Tensor) -> Tensor:
        return self.tp.reduced(self._partial(x))

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = self.tp.add_rms_norm(self.ops, x, residual, norm, eps)
        return self(normed), total

    def _route(self, x: Tensor) -> Routing:
        spec = self.spec
        return self.ops.route(
            self.router(x), spec.top_k, softmax_first=spec.softmax_first, renormalise=spec.renormalise
        )

    def _partial(self, x: Tensor) -> Tensor:
        """This rank's part of the output."""
        return self._sum(x, self._route(x))

    def _sum(self, x: Tensor, routing: Routing) -> Tensor:
        inner = self.up.method.experts_in(x, self.up.bias, routing, self.gate)
        y = self.down.method.experts_out(inner, self.down.bias, routing)
        if self.shared is not None:
            y += self.ops.sigmoid_mul(self.shared.partial(x), self.shared_gate(x))
        return y

    @property
    def max_small_batch_tokens(self) -> int:
        return 0 if self.tp.size > 1 and self.tp.sums is None else NO_LIMIT

    def forward_small_batch(
        self, residual: NormedResidual, norm: Tensor, eps: float, next_norm: Tensor
    ) -> NormedResidual:
        y = self._partial(self.ops.rms_norm(residual.x, norm, eps))
        if self.tp.sums is not None:
            return self.tp.sums.add_reduced(residual, y, next_norm)
        return self.ops.make_normed_residual(residual.x + y, next_norm)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.router.weights(prefix)
        yield from self.up.weights(prefix)
        yield from self.down.weights(prefix)
        if self.shared is not None:
            yield from self.shared.weights(prefix)
            yield from self.shared_gate.weights(prefix)
