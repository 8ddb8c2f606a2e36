"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.spec.tensors import LinearShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts, in place of the MLP of some layers: gated MLPs, of which each token goes to a few.

    num, top_k       experts of a layer, and those of a token
    inner            width of an expert
    softmax_first, renormalise
                     how the weights of a token's experts follow from the router's logits; see `kernels.reference.route`
    gate             between an expert's products; see `kernels.reference.ExpertGate`
    alpha, limit     of the gate "swiglu"
    router_bias, bias
                     the router has a bias, and so have the experts' projections
    shared_inner     width of an expert of all tokens, whose output is times the sigmoid of its own gate; 0: none
    dense_layers     layers that have an MLP instead
    router           name of the router
    """

    num: int
    top_k: int
    inner: int
    softmax_first: bool = True
    renormalise: bool = True
    gate: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    router_bias: bool = False
    bias: bool = False
    shared_inner: int = 0
    dense_layers: tuple[int, ...] = ()
    router: str = "mlp.gate"

    def linears(self, hidden: int) -> dict[str, LinearShape]:
        """Linear layers of a layer with experts, whose projections are merged: for each expert its gate, then up."""
        numbers, shared = range(self.num), self.shared_inner
        gate_up = tuple(f"mlp.experts.{i}.{part}_proj" for i in numbers for part in ("gate", "up"))
        down = tuple(f"mlp.experts.{i}.down_proj" for i in numbers)
        shapes = {
            "router": LinearShape((self.router,), hidden, (self.num,), self.router_bias),
            "experts_in": LinearShape(gate_up, hidden, (self.inner,) * len(gate_up), self.bias),
            "experts_out": LinearShape(down, self.inner, (hidden,) * len(down), self.bias),
        }
        if shared:
            names = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up"))
            shapes |= {
                "shared_gate": LinearShape(("mlp.shared_expert_gate",), hidden, (1,)),
                "shared_in": LinearShape(names, hidden, (shared, shared)),
                "shared_out": LinearShape(("mlp.shared_expert.down_proj",), shared, (hidden,)),
            }
        return shapes

    def activation_size(self, hidden: int) -> int:
        """Activations of a token between router and sum."""
        return self.top_k * (3 * self.inner + hidden) + 3 * self.shared_inner
