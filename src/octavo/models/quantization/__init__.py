"""Methods of linear layers, by the name of `EngineArgs.quantization`, and the formats of quantised checkpoints.

Imports no torch: memory plans use the table of methods. To add a method: a `linear_methods.LinearMethod`, and a line
here. To add a format: a module with a `form.Format`, and a line in `formats.FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class MethodEntry(NamedTuple):
    """A method of linear layers.

    method        the `LinearMethod` as "module:class"
    packed_bytes  (num_out, num_in, itemsize of the dtype) -> bytes of a weight [num_out, num_in], without padding
    """

    method: str
    packed_bytes: Callable[[int, int, int], int]


METHODS: Mapping[str | None, MethodEntry] = {
    None: MethodEntry(
        "octavo.models.linear_methods:PackedMethod", lambda num_out, num_in, itemsize: num_out * num_in * itemsize
    ),
    # For each output, a scale and what oneDNN may keep.
    "int8": MethodEntry(
        "octavo.models.linear_methods:Int8Method", lambda num_out, num_in, itemsize: num_out * (num_in + 8)
    ),
}
