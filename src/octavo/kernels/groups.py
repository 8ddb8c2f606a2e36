"""A quantised weight: groups of its numbers share a scale. Loaders fill it, each platform packs it for its products.

weight = scale * (value - zero) - minimum       of e2m1: scale * E2M1[value]

scale    scales, or scales * super_scales
zero     GroupForm.zero, or zeros
minimum  0, minima, or minima * super_minima
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from octavo.kernels.group_form import SUPER_SIZE, GroupForm

if TYPE_CHECKING:
    from octavo.kernels.metadata import RaggedBatch
    from octavo.kernels.reference.experts import ExpertGate, Routing
    from octavo.kernels.reference.norms import Gate, NormedResidual

__all__ = ["SUPER_SIZE", "FusedWeight", "GroupForm", "Groups", "PackedExperts", "PackedHead", "PackedWeight"]


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The values of the 16 codes (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A quantised weight, or some rows of one.

    values        [num_out, num_in] uint8, below 2 ** bits; of floats of 8 bits: float8_e4m3fn
    scales        [num_out, num_groups] float16, bfloat16 or float32; nested: uint8 or int8
    zeros         [num_out, num_groups] uint8
    minima        [num_out, num_groups] float16; nested: uint8
    super_scales  [num_out, num_in / 256] float16
    super_minima  the same
    order         [num_in] int32: column i is the model's column order[i]; None: i. Not cut with the rows
    """

    form: GroupForm
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.values.shape
        return num_out, num_in

    @classmethod
    def empty(cls, form: GroupForm, num_out: int, num_in: int, device: torch.device | str) -> Groups:
        """An uninitialised weight; scales that are not nested are float32."""

        def plane(per: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_out, num_in // per, dtype=dtype, device=device)

        integers = torch.uint8 if form.has_minima else torch.int8
        minima, supers = torch.uint8 if form.is_nested else torch.float16, torch.float16
        return cls(
            form,
            values=plane(1, torch.float8_e4m3fn if form.is_float and not form.is_e2m1 else torch.uint8),
            scales=plane(form.group_size, integers if form.is_nested else torch.float32),
            zeros=plane(form.group_size, torch.uint8) if form.has_zeros else None,
            minima=plane(form.group_size, minima) if form.has_minima else None,
            super_scales=plane(SUPER_SIZE, supers) if form.is_nested else None,
            super_minima=plane(SUPER_SIZE, supers) if form.is_nested and form.has_minima else None,
            order=torch.empty(num_in, dtype=torch.int32, device=device) if form.ordered_in else None,
        )

    def planes(self) -> Iterator[Tensor]:
        """The tensors of rows that there are, in the order of their declaration."""
        for field in fields(self)[1:-1]:
            plane = getattr(self, field.name)
            if plane is not None:
                yield plane

    def map(self, change: Callable[[Tensor], Tensor]) -> Groups:
        """The same form with each plane changed."""
        planes = {field.name: getattr(self, field.name) for field in fields(self)[1:-1]}
        changed = {name: change(plane) for name, plane in planes.items() if plane is not None}
        return Groups(self.form, **changed, order=self.order)

    def rows(self, first: int, last: int) -> Groups:
        """Rows [first, last), as views."""
        return self.map(lambda plane: plane[first:last])

    def columns(self, first: int, last: int) -> Groups:
        """Inputs [first, last), whole groups, as views."""
        num_in = self.shape[1]
        return self.map(lambda plane: plane[:, first * plane.shape[1] // num_in : last * plane.shape[1] // num_in])

    def in_groups(self, size: int) -> Groups:
        """The same numbers in smaller groups, not nested; size: a divisor of this form's."""
        per = self.form.group_size // size
        if per == 1:
            return self
        form = replace(self.form, group_size=size)
        return replace(self.map(lambda plane: plane.repeat_interleave(per, 1)), form=form, values=self.values)

    def copy_(self, source: Groups) -> None:
        for plane, other in zip(self.planes(), source.planes(), strict=True):
            plane.copy_(other)
        if self.order is not None and source.order is not None:
            self.order.copy_(source.order)

    def is_finite(self) -> bool:
        """True if no number is NaN or infinite."""
        for plane in self.planes():
            if plane.dtype == torch.float8_e4m3fn:
                if ((plane.view(torch.uint8) & 127) == 127).any():  # its NaN; it has no infinity
                    return False
            elif plane.is_floating_point() and not plane.isfinite().all():
                return False
        return True

    def with_narrow_scales(self) -> Groups:
        """float32 scales as float16 or bfloat16, if that changes none of them."""
        for dtype in (torch.float16, torch.bfloat16) if self.scales.dtype == torch.float32 else ():
            narrow = self.scales.to(dtype)
            if torch.equal(narrow.float(), self.scales):
                return replace(self, scales=narrow)
        return self

    def dequantised(self) -> Tensor:
        """The weight, [num_out, num_in] float32, its columns in the model's order."""
        per_super = SUPER_SIZE // self.form.group_size

        def of_groups(plane: Tensor, supers: Tensor | None) -> Tensor:
            return plane.float() if supers is None else plane.float() * supers.float().repeat_interleave(per_super, 1)

        num_out, num_in = self.shape
        values = E2M1.to(self.values.device)[self.values.int()] if self.form.is_e2m1 else self.values.float()
        values = values.view(num_out, -1, self.form.group_size)
        values -= self.form.zero if self.zeros is None else self.zeros.float().unsqueeze(2)
        values *= of_groups(self.scales, self.super_scales).unsqueeze(2)
        if self.minima is not None:
            values -= of_groups(self.minima, self.super_minima).unsqueeze(2)
        weight = values.view(num_out, num_in)
        return weight if self.order is None else weight[:, self.order.argsort()]


class PackedWeight(Protocol):
    """A weight [num_out, num_in] in the layout of its product."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T + bias; x [num_rows, num_in] -> [num_rows, num_out].

        x has the model's dtype. The result has it, too, or float32 if `float32_out`. It is written to `out` if given,
        whose rows may be further apart.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        ...


class PackedHead(PackedWeight, Protocol):
    """The weight of an LM head: its `float32_out` results are unrounded, and its rows can be read as embeddings."""

    def gather_rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in] in x's dtype."""
        ...


class FusedWeight(PackedWeight, Protocol):
    """A weight with products of few rows that are fused with what is around them."""

    @property
    def max_small_batch_tokens(self) -> int:
        """Up to so many rows the fused products are faster than separate operations."""
        ...

    def gated(self, gate_up: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """The product with a gated MLP's activation, `reference.silu_mul` or `gelu_mul`, for any number of rows."""
        ...

    def add_norm_linear(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(the product with the norm, the sum) of `reference.add_rms_norm`, for any number of rows."""
        ...

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        """See `reference.norm_linear`."""
        ...

    def add_linear(self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor) -> NormedResidual:
        """See `reference.add_linear`."""
        ...

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        bias: Tensor | None,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
        kv_scales: Tensor | None,
    ) -> Tensor:
        """See `reference.project_qkv`."""
        ...


class PackedExperts(Protocol):
    """The weights of all experts of a layer for one of their two products, in its layout."""

    def experts_in(self, x: Tensor, bias: Tensor | None, routing: Routing, gate: ExpertGate) -> Tensor:
        """See `reference.experts_in`."""
        ...

    def experts_out(self, h: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
        """See `reference.experts_out`."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        ...
