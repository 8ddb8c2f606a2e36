"""Writes tiny quantised checkpoints, one integer at a time, from the documents of the formats.

`quantise` rewrites the linear layers of a tiny model. Beside it, a twin has the same weights dequantised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E4M3 = torch.float8_e4m3fn


@dataclass
class Variant:
    """config: `quantization_config`. write: (weight, random generator) -> (its tensors, the dequantised weight)."""

    config: dict[str, Any]
    write: Callable[[Tensor, torch.Generator], tuple[Tensors, Tensor]]
    sizes: dict[str, Any] = field(default_factory=dict)


def pack(numbers: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """[rows, columns] of integers from 0 -> [rows, words] int32: integers of a row, from the lowest bits of a word.

    order: which column of a word's is in each place
    """
    per_word = 32 // bits
    words = []
    for row in numbers.tolist():
        row = row + [0] * (-len(row) % per_word)
        fields = [row[i : i + per_word] for i in range(0, len(row), per_word)]
        words.append([sum(field[order[i] if order else i] << (bits * i) for i in range(per_word)) for field in fields])
    return as_int32(words)


def as_int32(words: list[list[int]]) -> Tensor:
    return torch.tensor([[(w + 2**31) % 2**32 - 2**31 for w in row] for row in words], dtype=torch.int32)


def spread(small: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Scales of blocks -> of elements."""
    wide = small.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def random_scales(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator, bits: int) -> Tensor:
    """Scales with which weights of `bits` bits have a size like that of the model's."""
    return ((0.5 + torch.rand(rows, columns, generator=generator)) * 0.6 / 2**bits).to(dtype)


def integers(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def random_zeros(rows: int, columns: int, bits: int, generator: torch.Generator) -> Tensor:
    """Zeros near the middle, so that weights are around 0, but for three: the least and the greatest."""
    quarter = 2**bits // 8
    zeros = integers(3 * quarter, 5 * quarter, (rows, columns), generator)
    zeros[0, 0], zeros[1, 0], zeros[-1, -1] = 0, 2**bits - 1, 0
    return zeros


def awq(group: int, dtype: torch.dtype = torch.float16, **keys: Any) -> Variant:
    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        num_out, num_in = weight.shape
        size = num_in if group == -1 else group
        values = integers(0, 16, (num_out, num_in), generator)
        zeros = random_zeros(num_out, num_in // size, 4, generator)
        scales = random_scales(num_out, num_in // size, dtype, generator, 4)
        tensors = {
            "qweight": pack(values.T, 4, AWQ_ORDER),
            "qzeros": pack(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        block = (1, size)
        return tensors, (values - spread(zeros, block, weight.shape)) * spread(scales.float(), block, weight.shape)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Variant(config | keys, write, EVEN)


def gptq(bits: int, group: int, *, desc_act: bool = False, sym: bool = True, **keys: Any) -> Variant:
    version = keys.get("checkpoint_format", "gptq")

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        num_out, num_in = weight.shape
        size = num_in if group == -1 else group
        num_groups = math.ceil(num_in / size)
        top = 2**bits
        values = integers(0, top, (num_out, num_in), generator)
        middle = torch.full((num_out, num_groups), top // 2)
        zeros = middle if sym else random_zeros(num_out, num_groups, bits, generator)
        scales = random_scales(num_out, num_groups, torch.float16, generator, bits)
        groups = torch.arange(num_in) // size
        if desc_act:
            groups = groups[torch.randperm(num_in, generator=generator)]
        qzeros = pack(zeros.T, bits)
        if version == "gptq":  # as GPTQModel: 1 less in each integer, borrowing from the next
            ones = sum(1 << shift for shift in range(0, 32, bits))
            qzeros = as_int32([[word - ones for word in row] for row in qzeros.tolist()])
        tensors = {
            "qweight": pack(values, bits).T.contiguous(),
            "qzeros": qzeros,
            "scales": scales.T.contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, (values - zeros[:, groups]) * scales.float()[:, groups]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym}
    return Variant(config | keys, write, EVEN)


def fp8(block: tuple[int, int] | str, dtype: torch.dtype = torch.float32, **keys: Any) -> Variant:
    """block: of a scale, or "tensor", "scalar" or "row"."""

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        shape = weight.shape
        size = {"row": (1, shape[1]), "tensor": tuple(shape), "scalar": tuple(shape)}.get(block, block)  # type: ignore[arg-type,call-overload]
        count = math.ceil(shape[0] / size[0]), math.ceil(shape[1] / size[1])
        values = (torch.randn(shape, generator=generator) * 100).to(E4M3)
        scales = random_scales(*count, torch.float32, generator, 8) / 10
        if dtype == torch.float8_e8m0fnu:
            scales = scales.log2().round().exp2()
        scales = scales.to(dtype)
        name = "weight_scale" if isinstance(block, str) else "weight_scale_inv"
        stored = {"tensor": scales[0], "scalar": scales[0, 0]}.get(block, scales)  # type: ignore[call-overload]
        tensors = {"weight": values, name: stored.clone()}
        if keys.get("activation_scheme") == "static":
            tensors["input_scale"] = torch.tensor(0.37)
        return tensors, values.float() * spread(scales.float(), size, shape)

    blocks = {} if isinstance(block, str) else {"weight_block_size": list(block)}
    return Variant({"quant_method": "fp8", "activation_scheme": "dynamic"} | blocks | keys, write)


def compressed_tensors(
    format_: str, bits: int, strategy: str, *, group: int = 0, dtype: torch.dtype = torch.bfloat16, **args: Any
) -> Variant:
    """A single group of modules. group: columns, or of blocks [rows, columns]; args: further keys of weights."""
    is_float, is_packed = args.get("type") == "float", format_ == "pack-quantized"
    symmetric = args.get("symmetric", True)

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        shape = weight.shape
        block = {
            "tensor": tuple(shape),
            "channel": (1, shape[1]),
            "group": (1, group),
            "block": tuple(args.get("block_structure", ())),
        }[strategy]
        count = math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
        half = 2 ** (bits - 1)
        if is_float:
            values = (torch.randn(shape, generator=generator) * 100).to(E4M3)
        else:
            values = integers(-half, half, tuple(shape), generator).to(torch.int8)
        scales = random_scales(*count, dtype, generator, bits) / (10 if is_float else 1)
        zeros = torch.zeros(count, dtype=torch.int8)
        if not symmetric:
            zeros = (
                torch.tensor([[half // 4]]) if strategy == "tensor" else random_zeros(*count, bits, generator) - half
            )
        groups = torch.arange(shape[1]) // block[1]
        if args.get("actorder") == "group":
            groups = groups[torch.randperm(shape[1], generator=generator)]
        tensors = {"weight_scale": scales[0] if strategy == "tensor" else scales}
        if is_packed:
            tensors |= {"weight_packed": pack(values.int() + half, bits), "weight_shape": torch.tensor(shape)}
        else:
            tensors["weight"] = values
        if args.get("actorder") == "group":
            tensors["weight_g_idx"] = groups.int()
        if not symmetric:
            pairs = zeros.T + half
            is_plain = not is_packed or strategy == "tensor"
            tensors["weight_zero_point"] = zeros.to(torch.int8) if is_plain else pack(pairs, bits).T.contiguous()
        rows = torch.arange(shape[0]) // block[0]
        wide = scales.float()[rows][:, groups]
        return tensors, (values.float() - zeros[rows][:, groups]) * wide

    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False} | args
    if group:
        weights["group_size"] = group
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return Variant(config, write, EVEN if group and not isinstance(group, list) else {})


EVEN = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
"""Sizes that groups and words divide."""

VARIANTS: dict[str, Variant] = {
    "awq g32": awq(32),
    "awq rows": awq(-1, torch.float32, version="GEMM", modules_to_not_convert=None),
    "gptq 4": gptq(4, 32),
    "gptq 4, zeros": gptq(4, 32, sym=False),
    "gptq 4, order": gptq(4, 32, desc_act=True, sym=False, checkpoint_format="gptq", true_sequential=True),
    "gptq 4, rest": gptq(4, 40),  # the last group has 24 columns, or 16
    "gptq 8 v2, order": gptq(8, 16, desc_act=True, sym=False, checkpoint_format="gptq_v2"),
    "gptq 8, rows": gptq(8, -1, sym=False, lm_head=False, dynamic={"-:.*lm_head.*": {}}),
    "fp8 blocks": fp8((16, 24), fmt="e4m3"),
    "fp8 bf16": fp8((128, 128), torch.bfloat16, modules_to_not_convert=["lm_head", "model.norm"]),
    "fp8 e8m0": fp8((16, 24), torch.float8_e8m0fnu, scale_fmt="ue8m0"),
    "fp8 tensor": fp8("tensor", activation_scheme="static"),
    "fp8 scalar": fp8("scalar", torch.bfloat16),
    "fp8 row": fp8("row"),
    "ct fp8 tensor": compressed_tensors("float-quantized", 8, "tensor", type="float"),
    "ct fp8 row": compressed_tensors("float-quantized", 8, "channel", type="float", dtype=torch.float32),
    "ct fp8 block": compressed_tensors("naive-quantized", 8, "block", type="float", block_structure=[16, 24]),
    "ct int8 row": compressed_tensors("int-quantized", 8, "channel"),
    "ct int8 zeros": compressed_tensors("int-quantized", 8, "channel", symmetric=False),
    "ct int8 group": compressed_tensors("naive-quantized", 8, "group", group=16, symmetric=False),
    "ct int4 group": compressed_tensors("pack-quantized", 4, "group", group=32),
    "ct int4 zeros": compressed_tensors("pack-quantized", 4, "group", group=16, symmetric=False),
    "ct int4 order": compressed_tensors("pack-quantized", 4, "group", group=32, actorder="group", symmetric=False),
    "ct int4 row": compressed_tensors("pack-quantized", 4, "channel", symmetric=False, group=0),
    "ct int8 packed": compressed_tensors("pack-quantized", 8, "channel", symmetric=False),
    "ct int4 tensor": compressed_tensors("pack-quantized", 4, "tensor", symmetric=False),
}


def quantise(
    directory: Path,
    variant: Variant,
    *,
    choose: Callable[[str], Variant | None] | None = None,
    head: bool = False,
) -> Path:
    """Quantise the linear layers of a model in place -> the twin with dequantised weights, in `directory`/twin.

    choose: the variant of a module, None to leave it; `variant` gives the file's configuration
    """
    twin = directory / "twin"
    twin.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": variant.config}))
    generator = torch.Generator().manual_seed(0)
    plain = load_file(directory / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in sorted(plain.items()):
        module, _, part = name.rpartition(".")
        is_linear = tensor.ndim == 2 and part == "weight" and "embed" not in module
        one = (choose(module) if choose else variant) if is_linear and (head or module != "lm_head") else None
        if one is None:
            stored[name] = tensor
        else:
            tensors, plain[name] = one.write(tensor, generator)
            stored |= {f"{module}.{key}": value for key, value in tensors.items()}
    for path, tensors in ((directory, stored), (twin, plain)):
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    return twin
