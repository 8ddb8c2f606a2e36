"""What other programs write and read: their packing and their dequantised weights, for the formats that they have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.quantization.writers import Variant, fp8, quantise
from tests.models.tiny import load_tiny, make_tiny_checkpoint

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def assert_loads_as(variant: Variant, tmp_path: Path, **sizes: Any) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **sizes)
    expected: dict[str, Tensor] = {}

    def write(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, plain = variant.write(weight, generator)
        expected[f"{len(expected)}"] = plain
        return tensors, plain

    quantise(directory, Variant(variant.config, write))
    linear = sorted((w for w in load_tiny(directory).weights() if "proj" in w.name), key=lambda weight: weight.name)
    assert len(linear) == len(expected) == 21
    for weight, plain in zip(linear, expected.values(), strict=True):
        assert torch.equal(weight.target, plain), weight.name


@pytest.mark.parametrize("block", [(16, 24), (128, 128)])
def test_transformers_dequantises_fp8_alike(block: tuple[int, int], tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    variant = fp8(block)

    def write(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, _ = variant.write(weight, generator)
        theirs = _dequantize_fp8_weight(tensors["weight"], tensors["weight_scale_inv"], list(block), torch.float32)
        return tensors, theirs

    assert_loads_as(Variant(variant.config, write), tmp_path)


INT4, INT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("format_", "weights", "sizes"),
    [
        ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32}, SIZES),
        ("pack-quantized", INT4 | {"strategy": "group", "group_size": 16, "symmetric": False}, SIZES),
        ("pack-quantized", INT4 | {"strategy": "channel", "symmetric": False}, {}),
        ("pack-quantized", INT8 | {"strategy": "channel"}, {}),
        ("pack-quantized", INT8 | {"strategy": "group", "group_size": 32, "symmetric": False}, SIZES),
        ("int-quantized", INT8 | {"strategy": "channel", "symmetric": False}, {}),
        ("int-quantized", INT8 | {"strategy": "tensor"}, {}),
        ("float-quantized", FP8 | {"strategy": "tensor"}, {}),
        ("float-quantized", FP8 | {"strategy": "channel"}, {}),
        ("naive-quantized", FP8 | {"strategy": "block", "block_structure": [16, 24]}, {}),
    ],
)
def test_compressed_tensors_packs_and_dequantises_alike(
    format_: str, weights: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format_)

    def write(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        shape = weight.shape
        block = {
            "tensor": tuple(shape),
            "channel": (1, shape[1]),
            "group": (1, args.group_size),
            "block": tuple(args.block_structure or ()),
        }[args.strategy]
        count = math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
        state = {"weight": weight, "weight_scale": torch.rand(count, generator=generator) * 0.03 + 0.01}
        if not args.symmetric:
            quarter = 2**args.num_bits // 4
            state["weight_zero_point"] = torch.randint(-quarter, quarter, count, generator=generator).to(torch.int8)
        if args.strategy == "tensor":
            state["weight_scale"] = state["weight_scale"][0]
        packed = compressor.compress(state, scheme)
        return dict(packed), compressor.decompress(packed, scheme)["weight"]

    config = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    assert_loads_as(Variant(config, write), tmp_path, **sizes)
