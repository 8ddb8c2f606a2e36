"""Scales of K and V in the files of a checkpoint, for pools in float8: K is float8 * its scale.

Each name is one that vLLM's loader knows. A scale is a layer's, or that of each K/V head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import cut
from octavo.models.loading.stored_tensor import FLOAT_DTYPES, StoredTensor
from octavo.models.quantization.form import WHOLE, TensorError
from octavo.models.spec import ModelSpec


def take_kv_scales(stored: dict[str, StoredTensor], spec: ModelSpec) -> tuple[Tensor | None, list[str]]:
    """Take the scales out of a checkpoint's tensors -> [num_layers, 2, num_kv_heads] float32, and their problems.

    None: there are no scales. Recurrent layers have scales of 1. A problem is a scale that is missing, there twice, of
    another dtype or shape, not finite, or not above 0.
    """
    scales = torch.ones(spec.num_layers, 2, spec.num_kv_heads)
    missing, problems = [], []
    num_taken = 0
    for layer in range(spec.num_layers):
        for index, names in enumerate([] if layer in spec.recurrent_layers else _names(spec, layer)):
            found = [name for name in names if name in stored]
            num_taken += len(found)
            if not found:
                missing.append(f"{cut(names[0])} is missing")
            elif len(found) > 1:
                problems.append(f"{cut(found[1])} is there beside {cut(found[0])}")
            else:
                try:
                    scales[layer, index] = _read(found[0], stored[found[0]], spec.num_kv_heads)
                except TensorError as problem:
                    problems.append(str(problem))
        for name in [name for names in _names(spec, layer) for name in names]:
            stored.pop(name, None)
    if num_taken or spec.kv_scheme == "static":
        problems += missing
    return scales if num_taken else None, problems


def _names(spec: ModelSpec, layer: int) -> tuple[list[str], list[str]]:
    """Names of a layer's scale of K, and of V: llm-compressor's, vLLM's, and older ones, of which one is both's."""
    prefix = spec.names.layer.format(layer)
    attention = f"{prefix}{spec.names.qkv[0].rpartition('.')[0]}"
    k, v = ([f"{attention}.{part}_scale", f"{attention}.attn.{part}_scale"] for part in "kv")
    if len(spec.names.qkv) == 3:
        for names, projection in zip((k, v), spec.names.qkv[1:], strict=True):
            names.append(f"{prefix}{projection}.output_scale")
    return [*k, f"{attention}.kv_scale"], [*v, f"{attention}.kv_scale"]


def _read(name: str, tensor: StoredTensor, num_kv_heads: int) -> Tensor:
    """[1] or [num_kv_heads] float32"""
    if tensor.dtype not in FLOAT_DTYPES:
        raise TensorError(f"{cut(name)} has dtype {tensor.dtype}, expected {', '.join(FLOAT_DTYPES)}")
    if tensor.shape not in ((), (1,), (num_kv_heads,), (num_kv_heads, 1, 1)):
        raise TensorError(f"{cut(name)} has shape {cut(list(tensor.shape))}, expected [], [1] or [{num_kv_heads}]")
    scale = tensor.read(WHOLE).float().flatten()
    if not (scale.isfinite() & (scale > 0)).all():
        raise TensorError(f"{cut(name)} is {cut(scale.tolist())}; a scale is finite and above 0")
    return scale
