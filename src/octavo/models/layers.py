"""The parts of a decoder layer: plain objects that own their tensors and are called with activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual, accumulation_dtype
from octavo.models.linear import LayerFactory, Linear, TensorParallel, Weight
from octavo.models.linear_methods import HeadNorms
from octavo.models.spec import DecoderSpec


def empty_norm(spec: DecoderSpec, size: int, factory: LayerFactory) -> Tensor:
    """The weight of an RMS norm, [size]. float32 if it is 1 + the checkpoint's value, which float16 would round."""
    return torch.empty(size, dtype=torch.float32 if spec.unit_offset_norms else factory.dtype, device=factory.device)


class JointNorms:
    """RMS norms of all heads of Q together, and of K (OLMo 2), also of those that other ranks have.

    q, k: the weights of this rank's heads
    """

    def __init__(self, spec: DecoderSpec, tp: TensorParallel, q: Tensor, k: Tensor) -> None:
        self.eps, self.norms, self.all_reduce = spec.rms_norm_eps, (q, k), tp.all_reduce
        # A K/V head that several ranks have counts once.
        num_copies = tp.size * tp.kv_heads(spec.num_kv_heads) // spec.num_kv_heads
        sizes = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.shares = 1 / sizes[0], (tp.rank % num_copies == 0) / sizes[1]

    def __call__(self, ops: ModelOps, q: Tensor, k: Tensor) -> None:
        """Normalise q and k [num_tokens, heads of this rank, head_dim] in place: they are rows of one tensor."""
        heads = q.flatten(1), k.flatten(1)
        if self.all_reduce is None:
            normed = [ops.rms_norm(x, norm, self.eps) for x, norm in zip(heads, self.norms, strict=True)]
        else:
            wide = [x.to(accumulation_dtype(x.dtype)) for x in heads]
            squares = [x.square().sum(1) * share for x, share in zip(wide, self.shares, strict=True)]
            scales = torch.split(torch.rsqrt(self.all_reduce(torch.stack(squares, 1)) + self.eps), 1, dim=1)
            normed = [
                norm * (x * scale).to(norm.dtype) for x, scale, norm in zip(wide, scales, self.norms, strict=True)
            ]
        for part, values in zip((q, k), normed, strict=True):
            part.copy_(values.view_as(part))


class Attention:
    """Self-attention over the paged KV cache, with its projections, rotary embedding and KV write.

    norms: those of `spec.norms`
    sinks: of this rank's heads, float32 in any dtype of the model; None: the model has none
    """

    def __init__(self, spec: DecoderSpec, layer: int, factory: LayerFactory, norms: dict[str, Tensor]) -> None:
        self.ops = factory.ops
        self.eps = spec.rms_norm_eps
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.window = spec.window_of(layer)
        linears, own = spec.attention_linears, spec.of_rank(factory.tp.size)
        self.qkv, self.out = (
            Linear(linears[role], own.attention_linears[role], factory, role) for role in ("qkv", "out")
        )
        self.num_heads, self.first_head = spec.num_heads, factory.tp.start(spec.num_heads, own.num_heads)
        self.sinks = torch.empty(own.num_heads, device=factory.device) if spec.sinks else None
        self.head_norms: HeadNorms = {"q_norm": norms.get("q"), "k_norm": norms.get("k"), "kv_scales": None}
        self.joint_norms = (
            JointNorms(spec, factory.tp, norms["joint_q"], norms["joint_k"]) if "joint_q" in norms else None
        )

    def mix(self, projected: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor) -> Tensor:
        """projected: `qkv` of the tokens -> [num_tokens, num_heads * head_dim]; writes their K and V to kv_layer."""
        q, k, v = split_heads(projected, kv_layer)
        if self.joint_norms is not None:
            self.joint_norms(self.ops, q, k)
        q = self.ops.rope_kv_write(
            q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, eps=self.eps, **self.head_norms
        )
        return self._attend(q, batch, kv_layer)

    @property
    def max_small_batch_tokens(self) -> int:
        return (
            0 if self.joint_norms is not None else min(self.qkv.max_small_batch_tokens, self.out.max_small_batch_tokens)
        )

    def forward_small_batch(
        self,
        residual: NormedResidual,
        eps: float,
        batch: RaggedBatch,
        kv_layer: Tensor,
        cos_sin: Tensor,
        next_norm: Tensor,
    ) -> NormedResidual:
        """Small-batch path: the norm before attention, attention, and the addition; next_norm as for `MLP`."""
        q = self.qkv.project_qkv(residual, eps, kv_layer, batch, cos_sin, norm_eps=self.eps, **self.head_norms)
        return self.out.add_linear(residual, self._attend(q, batch, kv_layer), next_norm)

    def _attend(self, q: Tensor, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
        options = {"kv_scales": self.head_norms["kv_scales"], "sinks": self.sinks}
        return self.ops.paged_attention(q, kv_layer, batch, scale=self.scale, window=self.window, **options).flatten(1)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.qkv.weights(prefix)
        yield from self.out.weights(prefix)
        if self.sinks is not None:
            yield Weight(f"{prefix}self_attn.sinks", (self.num_heads,), self.sinks, (self.first_head,))


class Mixer(Protocol):
    """The part of a decoder layer that sees other tokens: attention, or a recurrence.

    qkv, out  its first and last projections, which alone read its input and write its output
    """

    qkv: Linear
    out: Linear

    @property
    def max_small_batch_tokens(self) -> int:
        """As of `MLP`."""
        ...

    def mix(self, projected: Tensor, batch: RaggedBatch, memory: Tensor, cos_sin: Tensor, /) -> Tensor:
        """What is between its projections: `qkv` of the tokens -> the input of `out`, [num_tokens, out.own.in_size].

        memory  the layer's K and V, or its states; modified
        """
        ...

    def forward_small_batch(
        self,
        residual: NormedResidual,
        eps: float,
        batch: RaggedBatch,
        memory: Tensor,
        cos_sin: Tensor,
        next_norm: Tensor,
        /,
    ) -> NormedResidual:
        """Small-batch path: the norm before it, itself, and the addition; next_norm as for `MLP`."""
        ...

    def weights(self, prefix: str) -> Iterator[Weight]: ...


class MLP(Protocol):
    """The part of a decoder layer after attention: a gated MLP, or experts."""

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens for `forward_small_batch`; 0: it has none."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape, see `TensorParallel.reduced`."""
        ...

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(the output for the RMS norm of x + residual, the sum), both [num_tokens, hidden_size].

        x and the output: see `TensorParallel.reduced`
        """
        ...

    def forward_small_batch(
        self, residual: NormedResidual, norm: Tensor, eps: float, next_norm: Tensor
    ) -> NormedResidual:
        """Small-batch path: the norm before the MLP, the MLP, and the addition.

        norm: weight of the norm before, for which `residual` was made    next_norm: that of the next norm
        """
        ...

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Its tensors in a checkpoint; prefix: the layer's."""
        ...


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product (arXiv 2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        """activation: of `DecoderSpec`"""
        self.gate: Gate = "gelu" if activation == "gelu_tanh" else "silu"
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down.reduced(self.partial(x))

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        gate_up, total = self.gate_up.after_norm(x, residual, norm, eps)
        return self.down.reduced(self.down.gated_partial(gate_up, self.gate)), total

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the output."""
        return self.down.gated_partial(self.gate_up(x), self.gate)

    @property
    def max_small_batch_tokens(self) -> int:
        return min(self.gate_up.max_small_batch_tokens, self.down.max_small_batch_tokens)

    def forward_small_batch(
        self, residual: NormedResidual, norm: Tensor, eps: float, next_norm: Tensor
    ) -> NormedResidual:
        inner = self.gate_up.norm_linear(residual, eps, self.gate)
        return self.down.add_linear(residual, inner, next_norm)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)
