"""FP8 e4m3 with a scale for each block, row or tensor, as in DeepSeek-V3 (arXiv 2412.19437) and Qwen3-FP8.

weight  [num_out, num_in] e4m3    weight_scale_inv  [num_out / 128, num_in / 128], rounded up; it multiplies
weight_scale  [], [1], [num_out] or [num_out, 1]    input_scale  [], of activations, which are not quantised here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.errors import cut
from octavo.integers import cdiv
from octavo.kernels.group_form import GroupForm
from octavo.models.quantization.form import (
    FILE,
    FLOATS,
    MAX_SIZE,
    REMEDY,
    KVScheme,
    Numbers,
    Parts,
    QuantisedWeight,
    TensorError,
    check_excluded,
    choose,
    invalid,
    is_excluded,
    read_names,
)

KEYS = KeyTable(
    read=("quant_method", "weight_block_size", "activation_scheme", "modules_to_not_convert", "ignored_layers", "fmt",
          "scale_fmt"),
    inert=("dequantize",),
    refused={"modules_to_convert": ([],), "expert_dtype": ("fp8",), "kv_cache_scheme": ("static",),
             "kv_cache_quant_method": ()},  # static: the files have scales of K and V
)  # fmt: skip
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class FP8:
    """block: rows and columns that share a scale; None: the shape of the scales shows it"""

    block: tuple[int, int] | None
    is_exponent: bool
    excluded: tuple[str, ...]
    keys: KeyUse
    parts: tuple[str, ...] = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
    kv_scheme: KVScheme = ""

    @property
    def description(self) -> str:
        blocks = "" if self.block is None else f" in blocks of {self.block[0]}x{self.block[1]}"
        return f"fp8 (e4m3){blocks}"

    def form(self, module: str, num_in: int) -> GroupForm | None:
        size = num_in if self.block is None else min(num_in, self.block[1])
        is_plain = module.endswith("lm_head") or is_excluded(module, self.excluded) or num_in % size
        return None if is_plain else GroupForm(8, size, is_float=True)

    def read(self, parts: Parts) -> QuantisedWeight:
        check_excluded(parts, self.excluded, "modules_to_not_convert")
        weight = parts.find("weight", ("F8_E4M3",))
        num_out, num_in = weight.shape
        name = "weight_scale" if "weight_scale" in parts.tensors else "weight_scale_inv"
        if name == "weight_scale" and "weight_scale_inv" in parts.tensors:
            raise TensorError(f"{cut(parts.module)} has both weight_scale and weight_scale_inv")
        rows, columns = self.block or DEFAULT_BLOCK
        shapes: dict[tuple[int, ...], tuple[int, int]] = {(cdiv(num_out, rows), cdiv(num_in, columns)): (rows, columns)}
        if self.block is None:
            shapes |= dict.fromkeys([(num_out,), (num_out, 1)], (1, num_in))
            shapes |= dict.fromkeys([(), (1,), (1, 1)], (num_out, num_in))
        dtypes = (*FLOATS, "F8_E8M0", *(("U8",) if self.is_exponent else ()))
        scale = parts.find(name, dtypes, *shapes)
        return QuantisedWeight(
            shape=(num_out, num_in),
            block=shapes[scale.shape],
            values=Numbers(parts.name("weight"), weight),
            scales=Numbers(parts.name(name), scale, is_exponent=scale.dtype == "U8"),
        )


def read_fp8(config: dict[str, Any]) -> FP8:
    """The format of an FP8 checkpoint. Raises as `formats.read_format`."""
    keys = KEYS.check(config, FILE, REMEDY)
    choose(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    choose(config, "fmt", ("e4m3",), "e4m3")
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    return FP8(
        block=read_block(config, "weight_block_size"),
        is_exponent=choose(config, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0",
        excluded=read_names(config, key),
        keys=keys,
    )


def read_block(config: dict[str, Any], key: str) -> tuple[int, int] | None:
    """Rows and columns of a block."""
    block = config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 1 <= n <= MAX_SIZE for n in block):
        raise invalid(key, block, f"two whole numbers from 1 to {MAX_SIZE}")
    rows, columns = block
    return rows, columns
