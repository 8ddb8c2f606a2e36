"""MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores the weights of its experts.

blocks  [num_out, num_in / 32, 16] uint8, two codes of e2m1 each, the low bits first
scales  [num_out, num_in / 32] uint8, exponents
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.integers import cdiv
from octavo.kernels.group_form import GroupForm
from octavo.models.quantization.form import (
    FILE,
    REMEDY,
    KVScheme,
    Numbers,
    Parts,
    QuantisedWeight,
    check_excluded,
    is_excluded,
    read_names,
)

KEYS = KeyTable(read=("quant_method", "modules_to_not_convert"), inert=("dequantize",))
FORM = GroupForm(4, 32, is_float=True)


@dataclass(frozen=True, slots=True)
class MXFP4:
    excluded: tuple[str, ...]
    keys: KeyUse
    parts: tuple[str, ...] = ("blocks", "scales")
    kv_scheme: KVScheme = ""

    @property
    def description(self) -> str:
        return "mxfp4 (e2m1), 4 bits in groups of 32"

    def form(self, module: str, num_in: int) -> GroupForm | None:
        is_plain = ".mlp.experts." not in module or is_excluded(module, self.excluded) or num_in % FORM.group_size
        return None if is_plain else FORM

    def read(self, parts: Parts) -> QuantisedWeight:
        check_excluded(parts, self.excluded, "modules_to_not_convert")
        blocks = parts.find("blocks", ("U8",))
        num_out, num_bytes = blocks.shape
        scales = parts.find("scales", ("U8",), (num_out, cdiv(num_bytes, 16)))
        return QuantisedWeight(
            shape=(num_out, 2 * num_bytes),
            block=(1, FORM.group_size),
            values=Numbers(parts.name("blocks"), blocks, bits=4, is_e2m1=True),
            scales=Numbers(parts.name("scales"), scales, is_exponent=True),
        )


def read_mxfp4(config: dict[str, Any]) -> MXFP4:
    """The format of an MXFP4 checkpoint. Raises as `formats.read_format`."""
    keys = KEYS.check(config, FILE, REMEDY)
    return MXFP4(read_names(config, "modules_to_not_convert"), keys)
