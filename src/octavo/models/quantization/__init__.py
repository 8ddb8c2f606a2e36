"""Methods of linear layers, by the name of `EngineArgs.quantization`, and the formats of quantised checkpoints.

Imports no torch: memory plans use the table of methods. To add a method: a `linear_methods.LinearMethod`, and a line
here. To add a format: a module with a `form.Format`, and a line in `formats.FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from octavo.kernels.group_form import GroupForm


class MethodEntry(NamedTuple):
    """A method of linear layers.

    method  the `LinearMethod` as "module:class"
    forms   to which it rounds weights of 16 bits, by device; empty: it does not. On a CPU, a head has 8 bits
    finer   on a CPU, those of linear layers that lose more, by role in `ModelSpec.linears`
    """

    method: str
    forms: Mapping[str, GroupForm] = {}
    finer: Mapping[str, GroupForm] = {}

    def form(self, device: str, role: str) -> GroupForm:
        """That of a linear layer, if there are forms for the device."""
        form = self.forms[device]
        return self.finer.get(role, form) if device == "cpu" else form

    def head_form(self, device: str) -> GroupForm | None:
        return METHODS["int8"].forms[device] if self.forms and device == "cpu" else None


BITS_8 = GroupForm(8, 32, zero=128)
PACKED = "octavo.models.linear_methods:PackedMethod"
METHODS: Mapping[str | None, MethodEntry] = {
    None: MethodEntry(PACKED),
    "int8": MethodEntry(PACKED, {"cpu": BITS_8, "cuda": GroupForm(8, 128, zero=128)}),
    "int4": MethodEntry(
        PACKED,
        {"cpu": GroupForm(4, 32, has_minima=True), "cuda": GroupForm(4, 32, has_zeros=True)},
        {"qkv": BITS_8, "down": BITS_8},
    ),
    "fp8": MethodEntry(PACKED, {"cuda": GroupForm(8, 128, is_float=True)}),
}
