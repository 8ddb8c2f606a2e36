"""Chooses the format of a quantised checkpoint by `quant_method`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.errors import cut
from octavo.models.quantization.awq import read_awq
from octavo.models.quantization.compressed_tensors import read_compressed_tensors
from octavo.models.quantization.form import REMEDY, Format, unsupported
from octavo.models.quantization.fp8 import read_fp8
from octavo.models.quantization.gptq import read_gptq
from octavo.models.quantization.mxfp4 import read_mxfp4

FORMATS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def read_format(quantization: Any) -> Format | None:
    """The format that config.json's `quantization_config` describes; None: the files are not quantised.

    Raises `UnsupportedModelError` or `CheckpointError` for another method, or for a key that is not supported.
    """
    if not quantization:
        return None
    method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
    if not isinstance(method, str) or method not in FORMATS or not isinstance(quantization, dict):
        raise unsupported(
            f"weights quantised by {cut(repr(method))} are not supported; {REMEDY}, or files quantised by "
            f"{', '.join(FORMATS)}"
        )
    return FORMATS[method](quantization)
