"""Products with quantised weights: few numbers are read, and turned into the model's dtype in registers.

    form                           up to a limit of rows     more rows
    integers, on Hopper            `grouped_hopper`          `grouped_tiles_hopper`
    float8_e4m3fn, on Hopper       `grouped_hopper`          as below, or `float8_tiles_hopper`
    4 bits, 8 bits                 `grouped_product`         `dequantise` a part of the weight, cuBLAS
    float8_e4m3fn, on Hopper, Ada  `grouped_product`,        x in float8: `quantise`, cuBLAS; without it,
                                   x in 2 parts              `grouped_product`
    float8_e4m3fn, elsewhere       `grouped_product`         as 4 bits

On Hopper, a QKV projection of few rows also rotates heads and writes K and V: `grouped_qkv_hopper`.

A value less its zero is exact in bfloat16 and float16. A group's scale multiplies the sum over its inputs, in float32.

A float8 weight is stored by rows, each 16 inputs in the order [lane 4, half 2, odd 2] of those below. The matrix
instructions read it from shared memory as it is, because few rows of x are turned into float8, too: into two numbers
whose sum is exact in bfloat16. More rows are rounded to one. In `grouped_hopper`, x stays in bfloat16.

Integers are stored in the order in which the matrix instructions hold them in registers, so that a thread reads 16
bytes and uses them itself. A tile has 128 outputs and 32 inputs; a 32-bit word has values of one output:

    output  64 * rep + 16 * block + 8 * upper + line
    input   16 * step + 8 * half + 2 * lane + odd
    4 bits  words [block 4, line 8, lane 4, rep 2, upper 2], values in a word [odd 2, step 2, half 2]
    8 bits  words [rep 2, block 4, line 8, lane 4, upper 2, step 2], values in a word [odd 2, half 2]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.groups import GroupForm, Groups, PackedHead
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.triton.activation import gelu_mul, silu_mul
from octavo.kernels.triton.capability import kernels_for
from octavo.kernels.triton.kv.write import rope_kv_write
from octavo.kernels.triton.launch import or_placeholder, pdl_options
from octavo.kernels.triton.linear.grouped_kernels import (
    FLOAT8_GROUP,
    INTERPRETED,
    TILE_OUTPUTS,
    dequantise,
    grouped_product,
    quantise,
)
from octavo.kernels.triton.linear.norm_quantise import add_norm_quantise
from octavo.kernels.triton.linear.skinny import finished_counters
from octavo.kernels.triton.linear.tuning import (
    CUBLAS_WEIGHT_BYTES,
    MAX_HOPPER_TOKENS_GROUPED,
    MAX_ROWS_TWO_PARTS,
    MAX_SMALL_BATCH_GROUPED,
    MIN_ROWS_CUBLAS,
    GroupedTuning,
    HopperTuning,
    float8_tiles_tuning,
    fuses_qkv,
    grouped_hopper_tuning,
    grouped_tiles_tuning,
    grouped_tuning,
)
from octavo.kernels.triton.norms import add_rms_norm

GROUP_SIZES = (32, 64, 128)


def keeps_groups(form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
    """True if `pack_groups` packs such a weight for a model of this dtype; of e2m1, `pack_experts` alone."""
    sizes = (32,) if form.is_e2m1 else (FLOAT8_GROUP,) if form.is_float else GROUP_SIZES
    return (
        dtype in (torch.bfloat16, torch.float16)
        and form.bits in (4, 8)
        and not (form.has_minima or form.is_nested)
        and (form.group_size == num_in or form.group_size in sizes)
        and num_in % 32 == 0
    )


def pack_groups(groups: Groups) -> PackedHead | None:
    """The weight for products in bfloat16 or float16; None if `keeps_groups` does not name its form, or for its scales.

    Scales have 16 bits, or 32 bits and their groups no zeros.
    """
    form, (num_out, num_in) = groups.form, groups.shape
    scales, zeros = groups.scales.float() if form.is_float else groups.scales, groups.zeros
    if form.is_e2m1 or not keeps_groups(form, num_in, torch.bfloat16) or (zeros is not None and scales.itemsize != 2):
        return None
    size = form.group_size
    if zeros is not None and size not in GROUP_SIZES:  # one group: repeated, so that there are several
        size = next(s for s in reversed(GROUP_SIZES) if num_in % s == 0)
        scales, zeros = (plane.repeat_interleave(num_in // size, 1) for plane in (scales, zeros))
    by_row = size not in GROUP_SIZES or (form.is_float and size != FLOAT8_GROUP)
    paired = zeros is None and scales.itemsize == 2 and not by_row
    columns = 128 if by_row else size
    rows, width = cdiv(num_out, TILE_OUTPUTS) * TILE_OUTPUTS, columns * (2 if paired else 1)
    width = cdiv(num_in, width) * width
    blocks = by_row
    if form.is_float and not by_row:
        firsts = scales[::TILE_OUTPUTS].repeat_interleave(TILE_OUTPUTS, 0)
        blocks = torch.equal(firsts[:num_out], scales)
        scales = torch.cat([scales, scales[-1:].expand(rows - num_out, -1)])

    def padded(plane: Tensor, num: int) -> Tensor:
        return F.pad(plane, (0, num - plane.shape[1], 0, rows - len(plane)))

    values = padded(groups.values.view(torch.uint8), width)
    if form.is_float:
        multiplies_float8(values.device, by_row)  # found out now: not while a CUDA graph is captured
        words = float8_columns(values).view(torch.float8_e4m3fn)
    else:
        words = _words(values, form.bits)
    if by_row:
        planes = padded(scales.float(), 1).view(-1)
    elif paired:
        planes = padded(scales, width // columns).view(torch.int32).T.contiguous()
    elif zeros is not None:
        bits = padded(scales, width // columns).view(torch.int16).int() & 0xFFFF
        planes = (bits | padded(zeros, width // columns).int() << 16).T.contiguous()
    else:
        planes = padded(scales.float(), width // columns).view(torch.int32).T.contiguous()
    kind = "row" if by_row else "pair" if paired else "zero" if zeros is not None else "wide"
    words = words.view(rows // TILE_OUTPUTS, -1)
    return GroupedWeight(form, num_out, num_in, words, planes, kind, columns, scales.dtype, blocks)


def float8_columns(values: Tensor) -> Tensor:
    """values [rows, inputs] -> the same in the order of the columns of a float8 weight."""
    return values.view(len(values), -1, 2, 4, 2).transpose(2, 3).reshape(len(values), -1)


def _words(values: Tensor, bits: int) -> Tensor:
    """values [outputs, inputs] uint8 -> int32, in the order of the matrix instructions."""
    values = values.view(-1, 2, 4, 2, 8, values.shape[1] // 32, 2, 2, 4, 2)  # tile, rep, block, upper, line; ...
    if bits == 4:
        low, high = values.permute(0, 5, 2, 4, 8, 1, 3, 9, 6, 7).unbind(-1)
        values = low | high << 4
    else:
        values = values.permute(0, 5, 1, 2, 4, 8, 3, 6, 9, 7)
    return values.reshape(len(values), -1).view(torch.int32)


@functools.cache
def multiplies_float8(device: torch.device, by_row: bool) -> bool:
    """True if torch's library multiplies float8 matrices with a scale for each 128 inputs, or for each row."""
    if device.type != "cuda" or not kernels_for(device).float8:
        return False
    ones, scales = torch.ones(128, 128, device=device).to(torch.float8_e4m3fn), torch.ones(1, 128, device=device)
    try:
        float8_product(ones, ones, scales, scales, by_row, torch.bfloat16)
    except (AttributeError, RuntimeError, ValueError):  # another torch, CUDA or GPU
        return False
    return True


def float8_product(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, by_row: bool, dtype: torch.dtype
) -> Tensor:
    """The library's product x @ weight.T. x_scales, scales: of each group of inputs and each row, [groups, rows]"""
    recipe = F.ScalingType.RowWise if by_row else F.ScalingType.BlockWise1x128
    return F.scaled_mm(x, weight.T, x_scales.T, recipe, scales if by_row else scales.T, recipe, output_dtype=dtype)


def _fits_hopper(x: Tensor) -> bool:
    """True for a matrix in bfloat16 on Hopper that TMA copies."""
    copies = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return kernels_for(x.device).hopper and x.dtype == torch.bfloat16 and copies


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A quantised weight [num_out, num_in] on a GPU, and its products.

    words    [tiles, words of a tile's columns] int32, see above; [tiles, 128 * inputs] float8
    planes   what each group or pair of groups of an output has, [groups or pairs, outputs] int32; or [outputs] float32
    kind     of the planes:
             row   one group: scales in float32
             pair  the scales of two groups
             zero  a scale, and a zero in the upper half
             wide  a scale in float32
    columns  inputs of a group; with one group, inputs of a step
    blocks   128 outputs have the same scales, or one group
    """

    form: GroupForm
    num_out: int
    num_in: int
    words: Tensor
    planes: Tensor
    kind: str
    columns: int
    scales_dtype: torch.dtype
    blocks: bool

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.planes.nbytes

    @property
    def scaled_inputs(self) -> int:
        """Inputs of a step at least: of a group, or of a pair."""
        return self.columns * (2 if self.kind == "pair" else 1)

    @property
    def float8_group(self) -> int:
        """Inputs of x that share a scale, where x is rounded to float8."""
        return self.num_in if self.kind == "row" else FLOAT8_GROUP

    @property
    def format(self) -> str:
        return "float8" if self.form.is_float else f"int{self.form.bits}"

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        float32_out: bool = False,
        out: Tensor | None = None,
        tuning: GroupedTuning | None = None,
    ) -> Tensor:
        """x @ weight.T + bias; x [num_rows, num_in] -> [num_rows, num_out] in x's dtype, float32 if `float32_out`.

        out  rows of it may be further apart than num_out; written and returned
        """
        num_rows = len(x)
        has_parts = self.form.is_float and kernels_for(x.device).float8
        parts = (2 if num_rows <= MAX_ROWS_TWO_PARTS else 1) if has_parts else 0
        streams = tuning is None and self._streams(x, out)
        if not float32_out and tuning is None and not streams:
            if parts == 0 and self._tiles_fit(x, out):
                return self._by_tiles(x, bias, out)
            if parts == 1 and multiplies_float8(x.device, self.kind == "row"):
                return self._by_float8(x, bias, out)
            if parts == 0 and num_rows >= MIN_ROWS_CUBLAS:
                return self._by_cublas(x, bias, out)
        if out is None:
            out = torch.empty(num_rows, self.num_out, dtype=torch.float32 if float32_out else x.dtype, device=x.device)
        self._launch(x, bias, parts=None if streams else parts, out=out, tuning=tuning)
        return out

    def gated(self, gate_up: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """The product with a gated MLP's activation of gate_up [num_rows, 2 * num_in]; float8 does not store it."""
        if not self._rounds_input(gate_up):
            return self(silu_mul(gate_up) if gate == "silu" else gelu_mul(gate_up), bias)
        return self._by_float8(gate_up, bias, None, gate)

    def add_norm_linear(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(the product with the RMS norm of x + residual, the sum); float8 does not store the norm."""
        if not self._rounds_input(x):
            normed, total = add_rms_norm(x, residual, norm, eps)
            return self(normed, bias), total
        rounded, total = add_norm_quantise(x, residual, norm, eps, self.float8_group)
        return self._by_rounded(total, *rounded, bias, None), total

    def _rounds_input(self, x: Tensor) -> bool:
        """True if so many rows are rounded to float8 before a product; fewer may be, too, but not fused."""
        many = len(x) > MAX_HOPPER_TOKENS_GROUPED[self.format]
        return many and self.form.is_float and multiplies_float8(x.device, self.kind == "row")

    def dequantised(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Outputs [first, last) of the weight, rounded to dtype; first is a multiple of 128."""
        weight = torch.empty(last - first, self.num_in, dtype=dtype, device=self.words.device)
        dequantise(self.words, self.planes, weight, first, self.constants())
        return weight

    def gather_rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in] in bfloat16."""
        if self.form.is_float:
            wide = self.words.view(torch.uint8).view(len(self.words) * TILE_OUTPUTS, -1)[indices]
            wide = wide.view(len(wide), -1, 4, 2, 2).transpose(2, 3).reshape(len(wide), -1)
            return self._scaled(wide.view(torch.float8_e4m3fn).float(), indices)
        tile, rep, block = indices // 128, indices // 64 % 2, indices // 16 % 4
        upper, line = indices // 8 % 2, indices % 8
        if self.form.bits == 4:  # [rows, inputs / 32, lane, odd, step, half]
            words = self.words.view(len(self.words), -1, 4, 8, 4, 2, 2)[tile, :, block, line, :, rep, upper]
            values = words.unsqueeze(-1) >> torch.arange(0, 32, 4, device=words.device) & 15
            values = values.reshape(*words.shape, 2, 2, 2).permute(0, 1, 4, 5, 2, 3)
        else:  # [rows, inputs / 32, lane, step, odd, half]
            words = self.words.view(len(self.words), -1, 2, 4, 8, 4, 2, 2)[tile, :, rep, block, line, :, upper]
            values = words.contiguous().view(torch.uint8).reshape(*words.shape, 2, 2).permute(0, 1, 3, 5, 2, 4)
        return self._scaled(values.reshape(len(indices), -1).float() - self.form.zero, indices)

    def _scaled(self, wide: Tensor, indices: Tensor) -> Tensor:
        """Some rows' values less the form's zero, [num_indices, inputs rounded up] -> the rows in bfloat16."""
        if self.kind == "row":
            return (wide[:, : self.num_in] * self.planes[indices, None]).bfloat16()
        planes = self.planes[:, indices].T.contiguous()
        wide = wide.view(len(wide), -1, self.columns)
        if self.kind == "zero":
            wide += self.form.zero - (planes >> 16).unsqueeze(2)
            scales = planes.to(torch.int16).view(self.scales_dtype)  # the lower half
        else:
            scales = planes.view(self.scales_dtype if self.kind == "pair" else torch.float32)
        return (wide * scales.float().unsqueeze(2)).bfloat16().flatten(1)[:, : self.num_in]

    # -- small-batch path, see `skinny` --------------------------------------------------------------------------------

    @property
    def max_small_batch_tokens(self) -> int:
        if kernels_for(self.words.device).hopper:
            return MAX_HOPPER_TOKENS_GROUPED[self.format]
        return MAX_ROWS_TWO_PARTS if self.form.is_float else MAX_SMALL_BATCH_GROUPED

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """`reference.norm_linear` for at most `max_small_batch_tokens`."""
        if gate and self.num_out % (2 * TILE_OUTPUTS) != 0:
            y = self.norm_linear(residual, eps, bias)
            return silu_mul(y) if gate == "silu" else gelu_mul(y)
        y = residual.x.new_empty(len(residual.x), self.num_out // (2 if gate else 1))
        self._launch(residual.weighted, bias, gate, out=y, squares=residual.squares, eps=eps)
        return y

    def add_linear(self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor) -> NormedResidual:
        """`reference.add_linear` for at most `max_small_batch_tokens`."""
        y = torch.empty_like(residual.x)
        norm_outputs = self._launch(x, bias, out=y, residual=residual.x, norm=norm)
        assert norm_outputs is not None
        return NormedResidual(y, *norm_outputs)

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        bias: Tensor | None,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
        kv_scales: Tensor | None = None,
        tuning: HopperTuning | None = None,
    ) -> Tensor:
        """`reference.project_qkv` for at most `max_small_batch_tokens`."""
        norms: Any = {"q_norm": q_norm, "k_norm": k_norm}
        if fuses_qkv(kv_layer, kv_scales) and self._streams(residual.weighted, None):
            from octavo.kernels.triton.linear import grouped_qkv_hopper  # only where the GPU has its instructions

            norms |= {"norm_eps": norm_eps}
            tuning = tuning or self._hopper_tuning(self.num_out, len(residual.x), False)
            return grouped_qkv_hopper.launch(residual, eps, self, bias, kv_layer, batch, cos_sin, tuning, **norms)
        norms |= {"eps": norm_eps, "kv_scales": kv_scales}
        q, k, v = split_heads(self.norm_linear(residual, eps, bias), kv_layer)
        return rope_kv_write(q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, **norms)

    def _hopper_tuning(self, num_out: int, num_tokens: int, gated: bool) -> HopperTuning:
        return grouped_hopper_tuning(num_out, self.num_in, self.form.bits, self.scaled_inputs, num_tokens, gated)

    def _streams(self, x: Tensor, out: Tensor | None) -> bool:
        """True if Hopper's kernel for few rows computes the product, into a whole tensor."""
        few = len(x) <= MAX_HOPPER_TOKENS_GROUPED[self.format]
        return few and (out is None or out.is_contiguous()) and _fits_hopper(x)

    def _tiles_fit(self, x: Tensor, out: Tensor | None) -> bool:
        """True if Hopper's kernels for many rows take such an x and write out."""
        return self.num_out % 8 == 0 and _fits_hopper(x) and (out is None or _fits_hopper(out))

    # -- launches ------------------------------------------------------------------------------------------------------

    def constants(self) -> dict[str, object]:
        """What the kernels know of the weight when they are compiled."""
        return {
            "FORMAT": self.format,
            "PLANES": self.kind,
            "COLUMNS": self.columns,
            "ZERO": self.form.zero,
            "SCALES": "bfloat16" if self.scales_dtype == torch.bfloat16 else "float16",
        }

    def _by_tiles(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        from octavo.kernels.triton.linear import grouped_tiles_hopper  # only where the GPU has its instructions

        out = x.new_empty(len(x), self.num_out) if out is None else out
        tuning = grouped_tiles_tuning(self.form.bits, self.scaled_inputs, len(x))
        grouped_tiles_hopper.launch(self, x, bias, tuning, out=out)
        return out

    def _by_float8(self, x: Tensor, bias: Tensor | None, out: Tensor | None, gate: Gate = "") -> Tensor:
        """gate: as of `quantise`"""
        return self._by_rounded(x, *quantise(x, self.float8_group, gate), bias, out)

    def _by_rounded(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """values, scales: of `quantise`    x: has the rows and dtype of the result"""
        by_row = self.kind == "row"
        tuning = float8_tiles_tuning(len(x), by_row) if self.blocks and self._tiles_fit(x, out) else None
        if tuning is not None:
            from octavo.kernels.triton.linear import float8_tiles_hopper  # only where the GPU has its instructions

            out = x.new_empty(len(x), self.num_out) if out is None else out
            float8_tiles_hopper.launch(self, values, scales, bias, tuning, out=out)
            return out
        weight = self.words.view(len(self.words) * TILE_OUTPUTS, -1)
        planes = self.planes.view(1, -1) if by_row else self.planes.view(torch.float32)
        y = float8_product(values, weight, scales, planes, by_row, x.dtype)[: len(x), : self.num_out]
        if bias is not None:
            y += bias
        return y if out is None else out.copy_(y)

    def _by_cublas(self, x: Tensor, bias: Tensor | None, out: Tensor | None, step_bytes: int = 0) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), self.num_out)
        step_bytes = step_bytes or CUBLAS_WEIGHT_BYTES
        step = max(step_bytes // (2 * self.num_in * TILE_OUTPUTS), 1) * TILE_OUTPUTS
        for first in range(0, self.num_out, step):
            last = min(first + step, self.num_out)
            weight = self.dequantised(first, last, x.dtype)
            part = None if bias is None else bias[first:last]
            if step >= self.num_out and part is None:
                return torch.mm(x, weight.T, out=out)
            out[:, first:last] = F.linear(x, weight, part)
        return out

    def _launch(
        self,
        x: Tensor,
        bias: Tensor | None,
        gate: Gate = "",
        *,
        parts: int | None = None,
        out: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tuning: GroupedTuning | HopperTuning | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Writes out; with a norm -> (weighted, squares). Launches on a device must not overlap, see `skinny`."""
        if isinstance(tuning, HopperTuning) or (tuning is None and parts is None and self._streams(x, out)):
            from octavo.kernels.triton.linear import grouped_hopper  # only where the GPU has its instructions

            tuning = tuning or self._hopper_tuning(out.shape[1], len(x), bool(gate))
            return grouped_hopper.launch(
                self, x, bias, gate, tuning, out=out, squares=squares, eps=eps, residual=residual, norm=norm
            )
        step_inputs = self.scaled_inputs
        num_tokens, num_out = len(x), self.num_out // (2 if gate else 1)
        if parts is None:
            parts = 2 if self.form.is_float and kernels_for(x.device).float8 else 0
        # With a gate, steps take twice the room: there are fewer, so that two programs fit into a multiprocessor.
        room = kernels_for(x.device).shared_bytes // (2 if gate and tuning is None else 1)
        tuning = tuning or grouped_tuning(num_out, self.num_in, step_inputs, num_tokens, parts)
        tiles, token_tiles = cdiv(num_out, TILE_OUTPUTS), cdiv(num_tokens, tuning.tokens)
        norm_outputs = None
        if norm is not None:
            assert token_tiles == 1
            norm_outputs = torch.empty_like(out), out.new_empty(tiles, tuning.tokens, dtype=torch.float32)
        num_sums = tuning.splits * num_tokens * self.num_out if tuning.splits > 1 else 0
        bits = TILE_OUTPUTS * self.form.bits * (2 if gate else 1) + tuning.tokens * x.itemsize * 8
        stage_bytes = bits // 8 * step_inputs + 1024
        stages = max(1, min(tuning.stages, room // stage_bytes))
        grouped_product[(token_tiles * tiles, tuning.splits)](
            x,
            self.words.view(torch.uint8) if self.form.is_float and not parts else self.words,
            self.planes,
            *or_placeholder(out, bias, squares, residual, norm),
            out,
            *or_placeholder(out, *(norm_outputs or (None, None))),
            torch.empty(num_sums, dtype=torch.float32, device=x.device),
            finished_counters(x.device),
            num_tokens,
            num_out,
            self.num_in,
            x.stride(0),
            out.stride(0),
            0 if squares is None else len(squares),
            eps,
            **self.constants(),
            EVEN=x.shape[1] % step_inputs == 0,
            CHUNK=self.columns if parts else min(tuning.chunk, self.columns),
            PAIRS=step_inputs // self.columns,
            TOKENS=tuning.tokens,
            SPLITS=tuning.splits,
            STAGES=stages,
            GATE=gate,
            SCALED=squares is not None,
            WITH_BIAS=bias is not None,
            WITH_RESIDUAL=residual is not None,
            WITH_NORM=norm is not None,
            NATIVE=not INTERPRETED and x.dtype == torch.bfloat16,
            PARTS=parts,
            num_warps=tuning.num_warps,
            **pdl_options(x.device),
        )
        return norm_outputs
