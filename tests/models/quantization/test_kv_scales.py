"""Scales of K and V in checkpoints: their names and shapes, and the `kv_cache_scheme` that announces them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import CheckpointError, ModelError
from octavo.models.config import spec_from_config
from tests.models.quantization.writers import VARIANTS, quantise
from tests.models.ranks import Ranks
from tests.models.tiny import load_tiny, make_tiny_checkpoint, read_spec

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ATTENTION = "model.layers.{}.self_attn."
NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale",),
]


def expected_scales(num_layers: int, num_heads: int) -> Tensor:
    """Numbers that bfloat16 has. [num_layers, 2, num_heads]"""
    return (1 + torch.arange(num_layers * 2 * num_heads).view(num_layers, 2, num_heads)) / 64


def add_scales(
    directory: Path,
    scales: Tensor,
    names: tuple[str, ...] = NAMES[0],
    shape: Callable[[Tensor], Tensor] = lambda scale: scale,
    damage: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
) -> None:
    """Write scales [num_layers, 2, num_heads] to a checkpoint. shape: of the tensor of a layer's K or V"""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer, of_layer in enumerate(scales):
        for name, scale in zip(names, of_layer, strict=False):
            tensors[ATTENTION.format(layer) + name] = shape(scale).clone()
    damage(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_scheme(directory: Path, scheme: Any, variant: str = "ct fp8 row") -> None:
    """Quantise a checkpoint, with this `kv_cache_scheme`."""
    quantise(directory, VARIANTS[variant])
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_scale_is_that_of_all_its_heads(names: tuple[str, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    scales = expected_scales(3, 2)
    add_scales(directory, scales, names, lambda scale: scale[0].to(dtype))
    found = load_tiny(directory).stored_kv_scales
    expected = scales[:, :, :1].expand(3, 2, 2)
    assert found is not None and torch.equal(found, expected[:, :1].expand_as(found) if len(names) == 1 else expected)


@pytest.mark.parametrize("shape", [lambda s: s, lambda s: s[:, None, None], lambda s: s[:1]])
def test_scales_of_heads(shape: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("qwen3", tmp_path / "model")
    scales = expected_scales(3, 5)
    add_scales(directory, scales, shape=shape)
    found = load_tiny(directory).stored_kv_scales
    assert found is not None and torch.equal(
        found, scales if len(shape(scales[0, 0])) == 5 else scales[..., :1] + 0 * scales
    )


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_scales_of_their_heads(size: int, tmp_path: Path) -> None:
    """Where ranks are more than heads, two have the same one."""
    directory = make_tiny_checkpoint("llama", tmp_path / "model", intermediate_size=40)
    scales = expected_scales(3, 2)
    add_scales(directory, scales)
    parts = Ranks(size).run(lambda tp: load_tiny(directory, tp=tp).stored_kv_scales)
    heads = [rank * 2 // size for rank in range(size)]
    for part, head in zip(parts, heads, strict=True):
        assert part is not None and torch.equal(part, scales[:, :, head : head + 1])


def test_without_scales_there_are_none(tmp_path: Path) -> None:
    assert load_tiny(make_tiny_checkpoint("llama", tmp_path / "llama")).stored_kv_scales is None
    assert load_tiny(make_tiny_checkpoint("gpt2", tmp_path / "gpt2")).stored_kv_scales is None


def put(name: str, value: Any) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({ATTENTION.format(1) + name: torch.tensor(value)})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((put("v_scale", value), f"v_scale is [{value}]; a scale is finite") for value in (NAN, INF, 0.0, -0.5)),
        (put("k_scale", [0.5, NAN]), "k_scale is [0.5, nan]; a scale is finite and above 0"),
        (put("k_scale", [0.5, 0.5, 0.5]), "k_scale has shape [3], expected [], [1] or [2]"),
        (put("k_scale", [[0.5, 0.5]]), "k_scale has shape [1, 2], expected [], [1] or [2]"),
        (put("k_scale", 1), "k_scale has dtype I64, expected F32, F16, BF16"),
        (put("attn.v_scale", 0.5), "attn.v_scale is there beside model.layers.1.self_attn.v_scale"),
        (put("kv_scale", 0.5), "kv_scale is there beside model.layers.1.self_attn.k_scale"),
        (lambda tensors: tensors.pop(ATTENTION.format(1) + "v_scale"), "v_scale is missing"),
        (lambda tensors: tensors.update({"model.layers.3.self_attn.k_scale": torch.ones(1)}), "k_scale is unexpected"),
    ],
)  # fmt: skip
def test_a_damaged_scale_is_named(damage: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    add_scales(directory, expected_scales(3, 2), damage=damage)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_tiny(directory)
    assert "model.layers." in str(caught.value) and "\n" not in str(caught.value)


def test_a_static_scheme_needs_scales(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    set_scheme(directory, STATIC)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.self_attn\.k_scale is missing; .*v_scale is missing; fetch"
    ):
        load_tiny(directory)
    add_scales(directory, expected_scales(3, 2))
    assert load_tiny(directory).stored_kv_scales is not None


def test_schemes(tmp_path: Path) -> None:
    """Static ones of two strategies, with the keys that llm-compressor writes; and a dynamic one, without scales."""
    defaults = {
        "actorder": None,
        "block_structure": None,
        "group_size": None,
        "observer": "minmax",
        "scale_dtype": None,
    }
    config = VARIANTS["ct fp8 row"].config
    for scheme, expected in (
        (STATIC | defaults, "static"),
        (STATIC | {"strategy": "attn_head"}, "static"),
        ({"num_bits": 8, "type": "float"}, "static"),
        (STATIC | {"dynamic": True}, "dynamic"),
        (None, ""),
    ):
        spec = spec_from_config(SIZES | {"quantization_config": config | {"kv_cache_scheme": scheme}})
        assert spec.kv_scheme == expected
        assert spec.stored_as.endswith("; K and V in fp8 (e4m3)") == bool(expected)
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    set_scheme(directory, STATIC | {"dynamic": True})
    assert load_tiny(directory).stored_kv_scales is None


def test_an_fp8_checkpoint_may_say_that_it_has_scales(tmp_path: Path) -> None:
    """As AutoFP8 wrote it. K and V in float8 have to be asked for, as in vLLM."""
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    set_scheme(directory, "static", "fp8 tensor")
    add_scales(directory, expected_scales(3, 2), NAMES[2], lambda scale: scale[0])
    assert read_spec(directory).kv_scheme == ""
    assert load_tiny(directory).stored_kv_scales is not None


SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"type": "int"}, "kv_cache_scheme.type 'int' is not supported; supported: float"),
        ({"num_bits": 4}, "kv_cache_scheme.num_bits 4 is not supported; supported: 8"),
        ({"symmetric": False}, "kv_cache_scheme.symmetric False is not supported"),
        ({"strategy": "channel"}, "kv_cache_scheme.strategy 'channel' is not supported; supported: tensor, attn_head"),
        ({"strategy": "token", "dynamic": True}, "kv_cache_scheme.strategy 'token' is not supported"),
        ({"dynamic": "local"}, "kv_cache_scheme.dynamic 'local' is not supported; supported: False, True"),
        ({"group_size": 64}, "kv_cache_scheme: group_size 64 is not supported"),
        ("static", "kv_cache_scheme is 'static'; expected an object"),
        ([8], "kv_cache_scheme is [8]; expected an object"),
    ],
)
def test_other_schemes_are_refused(scheme: Any, message: str) -> None:
    scheme = STATIC | scheme if isinstance(scheme, dict) else scheme
    config = VARIANTS["ct fp8 row"].config | {"kv_cache_scheme": scheme}
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        spec_from_config(SIZES | {"quantization_config": config})
    assert caught.value.param and "\n" not in str(caught.value)


def test_a_scheme_without_a_type_is_of_integers() -> None:
    config = VARIANTS["ct fp8 row"].config | {"kv_cache_scheme": {"num_bits": 8}}
    with pytest.raises(ModelError, match=r"kv_cache_scheme\.type 'int' is not supported"):
        spec_from_config(SIZES | {"quantization_config": config})
