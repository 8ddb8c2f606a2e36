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
    form    to which it quantises weights that are not yet; None: it does not
    """

    method: str
    form: GroupForm | None = None


METHODS: Mapping[str | None, MethodEntry] = {
    None: MethodEntry("octavo.models.linear_methods:PackedMethod"),
    "int8": MethodEntry("octavo.models.linear_methods:Int8Method", GroupForm(8, 32, zero=128)),
    "int4": MethodEntry("octavo.models.linear_methods:Int4Method", GroupForm(4, 32, has_minima=True)),
}
