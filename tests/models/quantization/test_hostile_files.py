"""Damaged and hostile quantised checkpoints: each ends in one line that names the tensor, or the key."""

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

from octavo.errors import CheckpointError, ModelError, UnsupportedModelError
from octavo.models.config import spec_from_config
from octavo.models.families import mistral
from tests.models.quantization.writers import VARIANTS, quantise
from tests.models.tiny import load_tiny, make_tiny_checkpoint

M = "model.layers.1.mlp.up_proj"
Damage = Callable[[dict[str, Tensor]], Any]


def put(part: str, index: Any, value: float) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{M}.{part}"][index] = value

    return damage


def change(part: str, new: Callable[[Tensor], Tensor]) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{M}.{part}"] = new(tensors[f"{M}.{part}"]).contiguous()

    return damage


def drop(part: str) -> Damage:
    return lambda tensors: tensors.pop(f"{M}.{part}")


def add(name: str, tensor: Tensor) -> Damage:
    return lambda tensors: tensors.update({name: tensor})


NAN, INF = float("nan"), float("inf")
CASES: dict[str, tuple[str, Damage, str]] = {
    **{
        f"{variant}: scale {value}": (variant, put(part, index, value), f"{M}.{part} contains 0, NaN or infinity")
        for variant, part, index in [
            ("awq g32", "scales", (1, 90)),
            ("gptq 4, order", "scales", (1, 90)),
            ("fp8 row", "weight_scale", (35, 0)),
            ("fp8 tensor", "weight_scale", 0),
            ("ct int4 group", "weight_scale", (90, 1)),
        ]
        for value in (NAN, INF, 0.0)
    },
    "nan in fp8": ("fp8 row", put("weight", (35, 60), NAN), f"{M}.weight contains NaN or infinity"),
    "no zeros": ("awq g32", drop("qzeros"), f"{M}.qzeros is missing"),
    "no scales": ("gptq 4", drop("scales"), f"{M}.scales is missing"),
    "no weight": ("gptq 4", drop("qweight"), f"{M}.qweight is missing"),
    "no order": ("gptq 4, order", drop("g_idx"), f"{M}.g_idx is missing"),
    "no order, packed": ("ct int4 order", drop("weight_g_idx"), f"{M}.weight_g_idx is missing"),
    "no scale": ("fp8 blocks", drop("weight_scale_inv"), f"{M}.weight_scale_inv is missing"),
    "no shape": ("ct int4 group", drop("weight_shape"), f"{M}.weight_shape is missing"),
    "no packed zeros": ("ct int4 zeros", drop("weight_zero_point"), f"{M}.weight_zero_point is missing"),
    "zeros too few": ("awq g32", change("qzeros", lambda t: t[:1]), f"{M}.qzeros has shape [1, 12], expected [2, 12]"),
    "scales too few": ("gptq 4", change("scales", lambda t: t[:1]), f"{M}.scales has shape [1, 96], expected [2, 96]"),
    "scales of another form": (
        "fp8 blocks",
        change("weight_scale_inv", lambda t: t[:, :1]),
        f"{M}.weight_scale_inv has shape [3, 1], expected [3, 3]",
    ),
    "scales of a row": (
        "fp8 row",
        change("weight_scale", lambda t: t[:7]),
        f"{M}.weight_scale has shape [7, 1], expected [1, 1] or [37] or [37, 1] or [] or [1]",
    ),
    "groups that do not divide": ("awq g32", change("qweight", lambda t: t[:40]), "which groups of 32 do not divide"),
    "a weight of another size": (
        "gptq 4",
        change("qweight", lambda t: t[:, :88]),
        f"{M}.qzeros has shape [2, 12], expected [2, 11]",
    ),
    "a vector": ("awq g32", change("qweight", lambda t: t[:, 0]), f"{M}.qweight has shape [64], expected two"),
    "nothing": ("awq g32", change("qweight", lambda t: t[:, :0]), f"{M}.qweight has shape [64, 0], expected two"),
    "halves": ("awq g32", change("qweight", lambda t: t.half()), f"{M}.qweight has dtype F16, expected I32"),
    "integer scales": ("awq g32", change("scales", lambda t: t.int()), f"{M}.scales has dtype I32, expected F32"),
    "bytes for e4m3": ("fp8 row", change("weight", lambda t: t.view(torch.uint8)), f"{M}.weight has dtype U8"),
    "e5m2": ("fp8 row", change("weight", lambda t: t.to(torch.float8_e5m2)), f"{M}.weight has dtype F8_E5M2"),
    "order too large": ("gptq 4, order", put("g_idx", 5, 2), f"{M}.g_idx has groups 0 to 2, of 2"),
    "order below 0": ("ct int4 order", put("weight_g_idx", 63, -1), f"{M}.weight_g_idx has groups -1 to 1, of 2"),
    "a huge shape": ("ct int4 group", put("weight_shape", 1, 2**62), f"{M}.weight_packed has shape [96, 8], which"),
    "a shape below 0": ("ct int4 group", put("weight_shape", 0, -96), f"{M}.weight_packed has shape [96, 8], which"),
    "a shape of three": (
        "ct int4 group",
        change("weight_shape", lambda t: torch.tensor([96, 64, 1])),
        f"{M}.weight_shape has shape [3], expected [2]",
    ),
    "a smaller model": (
        "ct int8 row",
        lambda t: t.update({f"{M}.weight": t[f"{M}.weight"][:5], f"{M}.weight_scale": t[f"{M}.weight_scale"][:5]}),
        f"{M}.weight has shape [5, 64], expected [37, 64]",
    ),
    "both weights": ("awq g32", add(f"{M}.weight", torch.zeros(96, 64)), f"{M}.weight is there beside {M}.qweight"),
    "both, packed": ("ct int4 group", add(f"{M}.weight", torch.zeros(96, 64)), f"{M}.weight is there beside"),
    "both scales": ("fp8 row", add(f"{M}.weight_scale_inv", torch.ones(37)), f"{M} has both weight_scale and"),
    "of another method": ("fp8 row", add(f"{M}.qzeros", torch.zeros(3)), f"{M}.qzeros is unexpected"),
    "an ignored module": (
        "ct int8 row",
        add("lm_head.weight_scale", torch.ones(97)),
        "lm_head is quantised, although ignore",
    ),
    "an excluded module": (
        "fp8 bf16",
        add("lm_head.weight_scale_inv", torch.ones(1, 1)),
        "lm_head is quantised, although modules_to_not_convert lists it",
    ),
    "scales of the cache": ("fp8 row", add(f"{M}.k_scale", torch.ones(1)), f"{M}.k_scale is unexpected"),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    name, damage, message = CASES[case]
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS[name].sizes)
    quantise(directory, VARIANTS[name])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_tiny(directory)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_module_without_a_group_is_named(tmp_path: Path) -> None:
    variant = VARIANTS["ct int8 row"]
    group = variant.config["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    quantise(directory, variant)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = variant.config | {"config_groups": {"group_0": group}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj is quantised, but no config_groups has it"):
        load_tiny(directory)


def test_mistrals_own_order_of_rows_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("mistral", tmp_path / "model")
    quantise(directory, VARIANTS["fp8 row"])
    path = directory / "model.safetensors"
    own = {name.replace("model.layers", "layers"): tensor for name, tensor in load_file(path).items()}
    for old, new in mistral.PARTS.items():
        own = {name.replace(new, old): tensor for name, tensor in own.items()}
    save_file(own, path)
    message = r"layers\.0\.self_attn\.k_proj\.weight is quantised with its rows in Mistral's own order"
    with pytest.raises(CheckpointError, match=message):
        load_tiny(directory)


SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8"}


def ct(group: Any = None, weights: Any = None, **keys: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with changed keys at the three levels."""
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | (weights or {})
    scheme = {"targets": ["Linear"], "weights": args} | (group or {})
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": scheme}} | keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"quant_method": name}, f"weights quantised by '{name}' are not supported; use the unquantised checkpoint")
            for name in ("bitsandbytes", "modelopt", "auto-round", "torchao", "quark", "hqq", "fbgemm_fp8")
        ),
        ({"bits": 4}, "weights quantised by '?' are not supported"),
        ("awq", "weights quantised by 'awq' are not supported"),
        ({"quant_method": ["awq"]}, "weights quantised by"),
        (AWQ | {"bits": 3}, "bits 3 is not supported; supported: 4"),
        (AWQ | {"bits": 4.0}, "bits 4.0 is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        (AWQ | {"format": "marlin"}, "format 'marlin' is not supported"),
        (AWQ | {"zero_point": False}, "zero_point False is not supported"),
        (AWQ | {"group_size": 0}, "group_size is 0; expected -1 or a whole number"),
        (AWQ | {"group_size": 2**40}, "group_size is 1099511627776; expected"),
        (AWQ | {"group_size": True}, "group_size is True; expected"),
        (AWQ | {"desc_act": True}, "desc_act True is not supported"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; expected a list"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"bits": 2}, "bits 2 is not supported"),
        ({"quant_method": "gptq"}, "bits None is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True is not supported"),
        (GPTQ | {"desc_act": 1}, "desc_act 1 is not supported"),
        (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic '+:.*up.*' is not supported"),
        (GPTQ | {"dynamic": [1]}, "dynamic is [1]; expected an object"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported"),
        (FP8 | {"activation_scheme": "block"}, "activation_scheme 'block' is not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is [128]; expected two whole numbers"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        (FP8 | {"weight_block_size": "128"}, "weight_block_size is '128'"),
        (FP8 | {"modules_to_convert": ["embed"]}, "modules_to_convert ['embed'] is not supported"),
        (FP8 | {"kv_cache_scheme": "dynamic"}, "kv_cache_scheme 'dynamic' is not supported"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config {'format': 'sparse-24-bitmask'} is not"),
        (ct(transform_config={"config_groups": {"a": 1}}), "transform_config {'config_groups': {'a': 1}} is not"),
        (ct(config_groups={}), "config_groups is {}; expected an object of groups"),
        (ct(config_groups={"W8A8": ["Linear"]}), "W8A8.weights is missing; expected an object"),
        (ct({"weights": None}), "g.weights is missing"),
        (ct({"output_activations": {"num_bits": 8}}), "output_activations {'num_bits': 8} is not supported"),
        *((ct(format=name), f"format '{name}' is not") for name in ("dense", "marlin-24", "nvfp4-pack-quantized")),
        (ct({"format": "mxfp4-pack-quantized"}), "format 'mxfp4-pack-quantized' is not supported"),
        (ct(weights={"num_bits": 2}), "num_bits 2 is not supported; supported: 4, 8"),
        (ct(weights={"type": "float"}), "g: float weights of 4 bits are not supported in pack-quantized"),
        (ct(weights={"type": "float", "num_bits": 8}), "g: float weights of 8 bits are not supported in pack-"),
        (ct(weights={"strategy": "tensor_group"}), "strategy 'tensor_group' is not supported"),
        (ct(weights={"strategy": "block", "block_structure": [8, 8]}), "strategy 'block' is not supported"),
        (ct(weights={"group_size": None}), "group_size is missing; expected"),
        (ct(weights={"group_size": -1}), "group_size is -1; expected"),
        (ct(weights={"dynamic": True}), "dynamic True is not supported"),
        (ct(weights={"actorder": "other"}), "actorder 'other' is not supported"),
        (ct(ignore="lm_head"), "ignore is 'lm_head'; expected a list of names"),
        (ct(ignore=["re:(a+)+$"]), "the pattern 're:(a+)+$' is not supported: it may take long to match"),
        (ct(ignore=["re:.*.*.*.*.*.*.*x"]), "it may take long to match"),
        (ct(ignore=["re:" + "(a|a)" * 90]), "it may take long to match"),
        (ct({"targets": ["re:[a"]}), "targets is 're:[a'; expected a pattern"),
    ],
)  # fmt: skip
def test_keys_that_are_not_supported_are_named(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        spec_from_config(SIZES | {"quantization_config": config})
    assert caught.value.param and "\n" not in str(caught.value)
    assert isinstance(caught.value, UnsupportedModelError | CheckpointError)


def test_the_configuration_of_a_real_file_is_accepted() -> None:
    """As llm-compressor writes it, with each key at its default."""
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    sparsity = {"format": "dense", "global_sparsity": 0.14, "ignore": [], "sparsity_structure": "unstructured"}
    keys = {"kv_cache_scheme": None, "transform_config": {}, "global_compression_ratio": 1.2, "version": "0.12"}
    activations = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    config = ct({"input_activations": activations}, weights, sparsity_config=sparsity, **keys)
    spec = spec_from_config(SIZES | {"quantization_config": config})
    assert spec.stored_as == "compressed-tensors: pack-quantized, 4 bits in groups of 32"


def test_patterns_that_real_files_have_are_accepted() -> None:
    names = ["lm_head", "re:.*lm_head", "re:.*mlp.gate$", r"re:.*\.layers\.\d+\.mlp\.(gate|up)_proj", "re:visual.*"]
    assert spec_from_config(SIZES | {"quantization_config": ct(ignore=names)}).stored_as


def test_gpt2_is_refused_by_name() -> None:
    """Its weights are transposed, and a square one would fit in either order."""
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 64, "n_head": 4, "n_layer": 2}
    with pytest.raises(UnsupportedModelError, match="quantised weights of GPT2LMHeadModel are not supported"):
        spec_from_config(config | {"quantization_config": GPTQ})
