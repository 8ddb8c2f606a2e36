"""Loading of safetensors and GGUF files: complete weights in the right order, or a one-line error."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoint import catalog
from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import CheckpointError, ModelError, ModelNotFoundError
from octavo.kernels.cpu import ops as cpu
from octavo.models.decoder import Decoder
from octavo.models.families import mistral
from octavo.models.loading import loader
from octavo.models.loading.loader import Model
from octavo.models.loading.stored_tensor import half_rotation_rows
from octavo.models.registry import find_family
from octavo.models.spec import DecoderSpec
from tests.models.tiny import (
    HYBRIDS,
    KINDS,
    PagedRun,
    assert_close,
    interleave,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    read_spec,
    split_merged,
    transformers_logits,
    write_tiny_gguf,
)

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


def tensors_of(decoder: Model) -> dict[str, Tensor]:
    return {weight.name: weight.target for weight in decoder.weights()}


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """By Transformers' names today."""
    family = find_family(read_spec(directory).architecture)
    tensors = load_file(directory / "model.safetensors")
    return split_merged({family.tensor_name(name): tensor for name, tensor in tensors.items()}, family)


def assert_same_tensors(actual: Model, expected: dict[str, Tensor]) -> None:
    found = list(actual.weights())
    plus_one = actual.spec.unit_offset_norms
    assert {weight.name for weight in found} == expected.keys()
    filled: dict[str, Tensor] = {}
    for weight in found:
        tensor = filled.setdefault(weight.name, torch.full(weight.shape, torch.nan, dtype=weight.target.dtype))
        part = tuple(slice(a, a + size) for a, size in zip(weight.start, weight.target.shape, strict=True))
        if weight.order is not None:
            part = (torch.tensor(weight.order)[part[0]], *part[1:])
        assert tensor[part].isnan().all()  # no two parts of a tensor overlap
        tensor[part] = weight.target
    for name, tensor in filled.items():
        adds = plus_one and name.endswith("norm.weight") and "linear_attn" not in name
        stored = expected[name] + 1 if adds else expected[name]
        assert torch.equal(tensor, stored.to(tensor.dtype)), name


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of the model's safetensors file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def split_in_shards(directory: Path, num_shards: int) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(sorted(tensors))}
    for shard in names:
        save_file({t: tensors[t] for t in tensors if weight_map[t] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_checkpoint("llama", tmp_path / "llama")


# -- safetensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *HYBRIDS])
def test_every_tensor_is_loaded_unchanged(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_checkpoint(kind, tmp_path / kind)
    expected = stored_tensors(directory)
    assert_same_tensors(load_tiny(directory), expected)
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 300)  # many chunks a tensor, the last one shorter
    assert_same_tensors(load_tiny(directory), expected)


def test_shards_load_the_same_model(llama: Path) -> None:
    expected = load_file(llama / "model.safetensors")
    split_in_shards(llama, 3)
    assert_same_tensors(load_tiny(llama), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_dtypes_are_converted(llama: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    edit(llama, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    assert_same_tensors(load_tiny(llama, dtype=wanted), load_file(llama / "model.safetensors"))


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "tied", tie_word_embeddings=True)
    extra = {
        "lm_head.weight": load_file(directory / "model.safetensors")["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    decoder = load_tiny(edit(directory, lambda tensors: tensors.update(extra)))
    assert isinstance(decoder, Decoder) and decoder.vocabulary.tied
    assert decoder.vocabulary.table.weight.any()


def renamed(pattern: str, replacement: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[re.sub(pattern, replacement, name)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("kind", "prefix", "extra"),
    [
        ("gpt2", "transformer.", {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.2.attn.masked_bias": torch.tensor(-1e4)}),
        ("opt", "model.", {}),
    ],
)
def test_names_of_older_checkpoints(kind: str, prefix: str, extra: dict[str, Tensor], tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(kind, tmp_path / kind)
    expected = load_file(directory / "model.safetensors")
    edit(directory, renamed("^" + re.escape(prefix), ""))
    assert_same_tensors(load_tiny(edit(directory, lambda tensors: tensors.update(extra))), expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_consolidated_files_of_mistral(sharded: bool, tmp_path: Path) -> None:
    """Mistral's own names, and rows of Q and K in the order of neighbouring rotary pairs."""
    directory = make_tiny_checkpoint("mistral", tmp_path / "mistral")
    config = json.loads((directory / "config.json").read_text())
    expected = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    own = {new: old for old, new in mistral.PARTS.items()}
    own |= {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers"}
    tensors = {}
    for name, tensor in expected.items():
        count = next((count for part, count in heads.items() if part in name), 0)
        stored = torch.from_numpy(interleave(tensor.numpy(), count)).contiguous() if count else tensor
        for new, old in own.items():
            name = name.replace(new, old)
        tensors[name] = stored
    file = "consolidated-00001-of-00001.safetensors" if sharded else "consolidated.safetensors"
    save_file(tensors, directory / file)
    if sharded:
        index = {"weight_map": dict.fromkeys(tensors, file)}
        (directory / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    assert_same_tensors(load_tiny(directory), expected)


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_text_weights_of_a_multimodal_checkpoint(layout: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("gemma3", tmp_path / "gemma3")
    expected = load_file(directory / "model.safetensors")
    edit(directory, renamed(r"^model\.", layout))
    vision = {"vision_tower.x.weight": torch.ones(3), "model.multi_modal_projector.y": torch.ones(2, 2)}
    edit(directory, lambda tensors: tensors.update(vision))
    text = json.loads((directory / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    assert_same_tensors(load_tiny(directory), expected)


# -- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_gguf_loads_the_same_model(kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # llama.cpp's Gemma 3 scales heads by their own width, and every sixth layer has no sliding window.
    sizes: dict[str, Any] = {
        "gemma3": {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6, "num_hidden_layers": 6},
        "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
        "gpt_oss": {"swiglu_limit": 7.0},
    }.get(kind, {})
    directory = make_tiny_checkpoint(kind, tmp_path / kind, tie_word_embeddings=tied, **sizes)
    path = write_tiny_gguf(directory, tmp_path / f"{kind}.gguf")
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 300)  # chunks that begin and end inside a head
    decoder = load_tiny(path)
    assert decoder.spec.tie_word_embeddings == tied
    assert_same_tensors(decoder, stored_tensors(directory))
    prompts = random_prompts(11, 5)
    expected = transformers_logits(directory, prompts)
    for actual, wanted in zip(PagedRun(decoder, prompts, block_size=8).run(4), expected, strict=True):
        assert_close(actual, wanted)


def test_gguf_llama_with_qkv_biases_only(tmp_path: Path) -> None:
    """Qwen2 stored with architecture "llama": rows and biases of Q and K are interleaved."""
    directory = make_tiny_checkpoint("qwen2", tmp_path / "qwen2")
    decoder = load_tiny(write_tiny_gguf(directory, tmp_path / "m.gguf", arch="llama"))
    assert isinstance(decoder.spec, DecoderSpec)
    assert (decoder.spec.architecture, decoder.spec.qkv_bias, decoder.spec.o_bias) == ("LlamaForCausalLM", True, False)
    assert_same_tensors(decoder, load_file(directory / "model.safetensors"))
    prompts = random_prompts(11, 5)
    for actual, wanted in zip(
        PagedRun(decoder, prompts, block_size=8).run(4), transformers_logits(directory, prompts), strict=True
    ):
        assert_close(actual, wanted)


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_gguf_is_decoded(quantisation: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "llama", **WIDE)
    path = write_tiny_gguf(directory, tmp_path / "llama.gguf", quantisation=quantisation)
    kind = gguf.GGMLQuantizationType[quantisation]
    expected = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim == 2:  # rows are quantised one by one, in any order
            tensor = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
        expected[name] = tensor
    assert_same_tensors(load_tiny(path), expected)


def test_half_rotation_rows_invert_the_converters_order() -> None:
    rows = torch.arange(30).numpy()
    order = half_rotation_rows(30, 5)
    assert order is not None
    assert (interleave(rows, 5)[order] == rows).all()
    assert order[:6].tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_gguf_gives_transformers_logits() -> None:
    try:
        path = catalog.cached_path("smollm2-135m-instruct")
    except ModelNotFoundError:
        pytest.skip("SmolLM2 is not in the cache; run `octavo models fetch smollm2-135m-instruct`")
    prompts = random_prompts(40, 7, vocab_size=49152)
    expected = transformers_logits(path.parent, prompts, gguf_file=path.name)
    run = PagedRun(load_tiny(path, cpu), prompts, block_size=16)
    first = run.step([33, 3])
    rest = run.run(1)
    for start, end, wanted in zip(first, rest, expected, strict=True):
        assert_close(torch.cat([start, end]), wanted)


# -- invalid checkpoints ----------------------------------------------------------------------------------------------


def load_error(path: Path) -> str:
    """The one-line message of the `CheckpointError`."""
    with pytest.raises(CheckpointError) as caught:
        load_tiny(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message or path.name in message
    return message


NORM, DOWN, BIAS = "model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda tensors: tensors.pop(DOWN), f"{DOWN} is missing"),
        (lambda tensors: tensors.update({BIAS: torch.ones(64)}), f"{BIAS} is unexpected"),
        (lambda tensors: tensors.update({NORM: torch.ones(63)}), f"{NORM} has shape [63], expected [64]"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()}), "has shape [37, 64], expected [64, 37]"),
        *(
            (
                lambda tensors, dtype=dtype: tensors.update({NORM: torch.ones(64, dtype=dtype)}),
                f"{NORM} has dtype {name}, expected F32, F16, BF16",
            )
            for dtype, name in ((torch.int8, "I8"), (torch.float64, "F64"), (torch.int32, "I32"))
        ),
        (
            lambda tensors: tensors[NORM][:2].copy_(torch.tensor([torch.inf, -torch.inf])),  # their sum is NaN
            f"{NORM} contains NaN or infinity",
        ),
    ],
    ids=range(9),
)
def test_tensors_that_do_not_fit_are_named(
    llama: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    assert message in load_error(edit(llama, change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is unexpected"),
        # Found without allocating the model:
        (
            {"vocab_size": 2**28, "max_position_embeddings": 2**28},
            "model.embed_tokens.weight has shape [97, 64], expected [268435456, 64]",
        ),
    ],
)
def test_config_of_another_model(llama: Path, changes: dict[str, int], message: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | changes))
    assert message in load_error(llama)


def test_a_problem_of_a_merged_tensor_is_reported_once(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("gpt2", tmp_path / "gpt2")
    name = "transformer.h.1.attn.c_attn"
    edit(directory, lambda tensors: tensors[f"{name}.bias"][::60].fill_(torch.nan))  # in Q, K and V
    assert load_error(directory).count(f"{name}.bias contains NaN") == 1
    edit(directory, lambda tensors: tensors.update({f"{name}.weight": tensors[f"{name}.weight"].T.contiguous()}))
    message = load_error(directory)
    assert message.count(f"{name}.weight has shape [180, 60], expected [60, 180]") == message.count("has shape") == 1


def test_ten_problems_are_listed_and_the_others_counted(llama: Path) -> None:
    edit(llama, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:13]])
    message = load_error(llama)
    assert message.count("is missing") == 10
    assert "and 3 more" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 36])
def test_non_finite_weights_are_an_error(llama: Path, value: float, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.2.mlp.gate_proj.weight"
    edit(llama, lambda tensors: tensors[name][row, 5].fill_(value))
    assert f"{name} contains NaN or infinity (as float32)" in load_error(llama)
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 300)
    edit(llama, lambda tensors: tensors[name][18, 5].fill_(value))  # in another chunk
    assert load_error(llama).count("NaN") == 1  # one for each weight


def test_finite_weights_whose_sum_overflows_are_loaded(llama: Path) -> None:
    edit(llama, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    assert load_tiny(llama).norm[0] == torch.tensor(3e38)


def test_weights_too_large_for_the_dtype(llama: Path) -> None:
    edit(llama, lambda tensors: tensors["model.norm.weight"][3].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"model.norm.weight contains NaN or infinity \(as float16\)"):
        load_tiny(llama, dtype=torch.float16)


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.01])
def test_truncated_file(llama: Path, keep: float) -> None:
    file = llama / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    assert "model.safetensors is cut short or damaged" in load_error(llama)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 2**60) + b"{",
        struct.pack("<Q", 16) + b"this is not JSON",
        struct.pack("<Q", 2) + b"{}",
        b"\x80\x04\x95",
        struct.pack("<Q", 72) + b'{"a":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,4]}}',
    ],
    ids=["length", "text", "empty", "pickle", "overflow"],
)
def test_corrupt_header(llama: Path, head: bytes) -> None:
    (llama / "model.safetensors").write_bytes(head)
    message = load_error(llama)
    assert "cut short or damaged" in message or "is missing" in message


def test_a_weight_in_two_shards(llama: Path) -> None:
    split_in_shards(llama, 2)
    second = llama / "model-00002-of-00002.safetensors"
    first = load_file(llama / "model-00001-of-00002.safetensors")
    name = sorted(first)[0]
    save_file(load_file(second) | {name: first[name]}, second)
    assert f"{name} is in two shards, model-00001-of-00002.safetensors and {second.name}" in load_error(llama)


def test_a_weight_with_an_old_and_a_new_name(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("gpt2", tmp_path / "model")
    edit(folder, lambda tensors: tensors.update({"ln_f.weight": tensors["transformer.ln_f.weight"].clone()}))
    assert "two tensors are named transformer.ln_f.weight" in load_error(folder)


def test_gguf_with_the_metadata_of_another_model(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1, "intermediate_size": 40}))
    message = load_error(write_tiny_gguf(llama, tmp_path / "m.gguf"))
    assert "model.layers.0.self_attn.k_proj.weight has shape [32, 64], expected [16, 64]" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [37, 64], expected [40, 64]" in message


def test_gguf_tensor_of_an_integer_type(llama: Path, tmp_path: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    assert "model.norm.weight has dtype I32" in load_error(write_tiny_gguf(llama, tmp_path / "m.gguf"))


def test_gguf_with_non_finite_scales(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "llama", **WIDE)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation="Q8_0")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    tensor.data.view("uint8").reshape(-1)[:2] = [0, 0x7C]  # float16 infinity
    reader.data.flush()
    assert "model.layers.1.mlp.up_proj.weight contains NaN or infinity" in load_error(path)


def test_pickle_checkpoints_are_rejected(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors or GGUF only"):
        open_checkpoint(llama)
