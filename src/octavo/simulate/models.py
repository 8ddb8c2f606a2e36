"""Sizes of models for simulations, by name or from a config.json."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint import catalog
from octavo.core.kv_cache_spec import ITEMSIZE, KVCacheSpec
from octavo.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. `num_heads` query heads share `num_kv_heads` K/V heads of size `head_dim`. Parameters, K and V
    have one dtype; sequences have at most `max_len` tokens."""

    name: str
    num_params: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.num_params * self.itemsize

    def kv_cache(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec.of(self, block_size, self.dtype)

    @property
    def flops_per_pair(self) -> int:
        """Multiplications and additions of one query with one key and its value, over all layers and heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


def _shape(
    name: str, billions: float, layers: int, hidden: int, heads: tuple[int, int], head_dim: int, max_len: int
) -> ModelShape:
    return ModelShape(name, round(billions * 1e9), layers, hidden, heads[0], heads[1], head_dim, max_len)


MODELS = {
    shape.name: shape
    for shape in (
        _shape("opt-13b", 13.0, 40, 5120, (40, 40), 128, 2048),
        _shape("opt-66b", 66.0, 64, 9216, (72, 72), 128, 2048),
        _shape("opt-175b", 173.0, 96, 12288, (96, 96), 128, 2048),
        _shape("llama-13b", 13.0, 40, 5120, (40, 40), 128, 2048),
        _shape("llama-3.1-8b", 8.03, 32, 4096, (32, 8), 128, 131072),
        _shape("llama-3.1-70b", 70.6, 80, 8192, (64, 8), 128, 131072),
        _shape("qwen2.5-0.5b", 0.494, 24, 896, (14, 2), 64, 32768),
        _shape("qwen2.5-7b", 7.62, 28, 3584, (28, 4), 128, 32768),
        _shape("qwen3-0.6b", 0.596, 28, 1024, (16, 8), 128, 40960),
        _shape("qwen3-8b", 8.19, 36, 4096, (32, 8), 128, 40960),
        _shape("smollm2-135m", 0.1345, 30, 576, (9, 3), 64, 8192),
    )
}
"""Published sizes; the three OPT models take 26, 132 and 346 GB as in table 1 of the paper."""


def find_model(name: str) -> ModelShape:
    """A model of `MODELS` or of the catalogue, or any model by directory or hub name: its config.json, without weights.

    Raises `ModelNotFoundError`, or the error of reading that model.
    """
    entry = catalog.find(name)
    names = [name.lower()] if entry is None else [entry.name, *entry.aliases]
    if (shape := next((MODELS[n] for n in names if n in MODELS), None)) is not None:
        return shape
    path = Path(name).expanduser()
    if "/" in name or path.exists():
        return _from_config(path.parent if path.name == "config.json" else path)
    near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(MODELS)}"
    raise ModelNotFoundError(f"no model {name!r} to simulate; pass a directory with a config.json, or a name; {hint}")


def _from_config(path: Path) -> ModelShape:
    from octavo.checkpoint.resolve import open_checkpoint
    from octavo.models.config import read_spec

    checkpoint = open_checkpoint(path, download=False, weights=False)
    spec = read_spec(checkpoint)
    return ModelShape(
        path.name or str(path),
        spec.num_params,
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.max_position_embeddings,
        spec.dtype,
    )
