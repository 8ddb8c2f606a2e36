"""Loading of experts: their layouts give one model, and a file with one thing wrong ends in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError, ModelError
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.models.experts import Experts
from octavo.models.linear_methods import PackedMethod, find_linear_method
from tests.models.loading.test_loader import assert_same_tensors, edit, stored_tensors
from tests.models.tiny import PagedRun, load_tiny, make_tiny_checkpoint, random_prompts, write_tiny_gguf

PROMPTS = random_prompts(23, 9)
MLP = "model.layers.0.mlp"
OTHERS = {"mixtral": {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}}
Tensors = dict[str, Tensor]
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def merge(tensors: Tensors, prefix: str = MLP) -> None:
    """Transformers 5's layout of a layer's experts: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    num = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3

    def take(role: str) -> Tensor:
        return torch.stack([tensors.pop(f"{prefix}.experts.{i}.{role}_proj.weight") for i in range(num)])

    tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat([take("gate"), take("up")], dim=1)
    tensors[f"{prefix}.experts.down_proj"] = take("down")


def merge_all(tensors: Tensors) -> None:
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        merge(tensors, layer)


def rename(old: dict[str, str]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            new = name.replace("block_sparse_moe", "mlp")
            for part, role in old.items():
                new = new.replace(f".{part}.", f".{role}.")
            tensors[new] = tensors.pop(name)

    return change


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe"])
def test_merged_tensors_are_the_same_model(kind: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(kind, tmp_path / "model")
    expected, logits = stored_tensors(directory), PagedRun(load_tiny(directory), PROMPTS, block_size=4).run(7)
    edit(directory, rename(OTHERS.get(kind, {})))
    edit(directory, merge_all)
    model = load_tiny(directory)
    assert_same_tensors(model, expected)
    for actual, wanted in zip(PagedRun(model, PROMPTS, block_size=4).run(7), logits, strict=True):
        assert torch.equal(actual, wanted)


def test_one_expert(tmp_path: Path) -> None:
    """Whose merged projections have the shape of an MLP's."""
    directory = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", num_experts=1, num_experts_per_tok=1)
    (expected, actual) = (
        torch.cat(PagedRun(load_tiny(directory, cpu, torch.bfloat16, **options), PROMPTS, block_size=4).run(7))
        for options in ({}, {"linear_method": PackedMethod})
    )
    assert float((actual - expected).norm() / expected.norm()) < 0.05


# -- one thing wrong --------------------------------------------------------------------------------------------------


def load_error(path: Path) -> str:
    """The message: one line, which names the file."""
    with pytest.raises(CheckpointError) as caught:
        load_tiny(path)
    message = str(caught.value)
    assert "\n" not in message and path.name in message and len(message) < 2000
    return message


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{MLP}.{name}")


def reshaped(name: str, new: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"{MLP}.{name}": new(tensors[f"{MLP}.{name}"]).contiguous()})


def merged(change: Callable[[Tensors], Any]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        merge(tensors)
        change(tensors)

    return changed


def add(**tensors: Tensor) -> Callable[[Tensors], Any]:
    return lambda stored: stored.update({f"{MLP}.experts.{name}": tensor for name, tensor in tensors.items()})


# A tiny Qwen3-Next: 6 experts, inner size 20, hidden size 48, a shared expert of 28.
FILES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "an expert without up": (without("experts.3.up_proj.weight"), f"{MLP}.experts.3.up_proj.weight is missing"),
    "fewer experts": (
        lambda tensors: [without(f"experts.5.{role}_proj.weight")(tensors) for role in ("gate", "up", "down")],
        f"{MLP}.experts.5.gate_proj.weight is missing",
    ),
    "more experts": (
        add(**{f"6.{role}_proj.weight": torch.ones(1, 1) for role in ("gate", "up", "down")}),
        f"{MLP}.experts.6.down_proj.weight is unexpected",
    ),
    "an expert's width": (
        reshaped("experts.2.up_proj.weight", lambda t: t[:19]),
        f"{MLP}.experts.2.up_proj.weight has shape [19, 48], expected [20, 48]",
    ),
    "a bias": (add(**{"0.up_proj.bias": torch.ones(20)}), f"{MLP}.experts.0.up_proj.bias is unexpected"),
    "router rows": (reshaped("gate.weight", lambda t: t[:5]), f"{MLP}.gate.weight has shape [5, 48], expected [6, 48]"),
    "router transposed": (
        reshaped("gate.weight", lambda t: t.T),
        f"{MLP}.gate.weight has shape [48, 6], expected [6, 48]",
    ),
    "no router": (without("gate.weight"), f"{MLP}.gate.weight is missing"),
    "router of NaN": (reshaped("gate.weight", lambda t: t.fill_(torch.nan)), f"{MLP}.gate.weight contains NaN"),
    "an expert of NaN": (
        reshaped("experts.4.down_proj.weight", lambda t: t.index_fill(1, torch.tensor(19), torch.nan)),
        f"{MLP}.experts.4.down_proj.weight contains NaN or infinity",
    ),
    "no shared expert": (
        without("shared_expert.up_proj.weight"),
        f"{MLP}.shared_expert.up_proj.weight is missing",
    ),
    "shared expert's width": (
        reshaped("shared_expert.down_proj.weight", lambda t: t[:, :20]),
        f"{MLP}.shared_expert.down_proj.weight has shape [48, 20], expected [48, 28]",
    ),
    "no gate of the shared expert": (
        without("shared_expert_gate.weight"),
        f"{MLP}.shared_expert_gate.weight is missing",
    ),
    "shape of the shared expert's gate": (
        reshaped("shared_expert_gate.weight", lambda t: t.flatten()),
        f"{MLP}.shared_expert_gate.weight has shape [48], expected [1, 48]",
    ),
    "merged, fewer experts": (
        merged(reshaped("experts.gate_up_proj", lambda t: t[:5])),
        f"{MLP}.experts.5.gate_proj.weight is missing",
    ),
    "merged, more experts": (
        merged(reshaped("experts.gate_up_proj", lambda t: torch.cat([t, t[:1]]))),
        f"{MLP}.experts.6.gate_proj.weight is unexpected",
    ),
    "merged, odd rows": (
        merged(reshaped("experts.gate_up_proj", lambda t: t[:, :39])),
        f"{MLP}.experts.0.gate_proj.weight is missing",
    ),
    "merged, fewer rows": (
        merged(reshaped("experts.gate_up_proj", lambda t: t[:, :38])),
        f"{MLP}.experts.0.gate_proj.weight has shape [19, 48], expected [20, 48]",
    ),
    "merged, width": (
        merged(reshaped("experts.gate_up_proj", lambda t: t[..., :40])),
        f"{MLP}.experts.0.gate_proj.weight has shape [20, 40], expected [20, 48]",
    ),
    "merged, transposed": (
        merged(reshaped("experts.down_proj", lambda t: t.mT)),
        f"{MLP}.experts.0.down_proj.weight has shape [20, 48], expected [48, 20]",
    ),
    "merged, four dimensions": (
        merged(reshaped("experts.down_proj", lambda t: t[..., None].expand(-1, -1, -1, 2))),
        f"{MLP}.experts.0.down_proj.weight has shape [48, 40], expected [48, 20]",
    ),
    "merged, one expert": (
        merged(reshaped("experts.down_proj", lambda t: t[0])),
        f"{MLP}.experts.0.down_proj.weight",
    ),
    "merged, NaN": (
        merged(reshaped("experts.gate_up_proj", lambda t: t.index_fill(1, torch.tensor(20), torch.nan))),
        f"{MLP}.experts.0.up_proj.weight contains NaN or infinity",
    ),
    "merged without down": (merged(without("experts.down_proj")), f"{MLP}.experts.0.down_proj.weight is missing"),
    "merged, 10 ** 9 experts": (
        merged(reshaped("experts.gate_up_proj", lambda t: t.new_empty(10**9, 0, 48))),
        f"{MLP}.experts.0.gate_proj.weight is missing",
    ),
    "many layers of many experts without numbers": (  # a header of 100 kB, of which 8 million parts could be cut
        lambda tensors: tensors.update(
            {f"model.layers.{9 + i}.mlp.experts.gate_up_proj": torch.empty(4096, 0, 48) for i in range(1000)}
        ),
        "model.layers.1000.mlp.experts.gate_up_proj is unexpected",
    ),
    "merged beside an expert": (
        merged(add(**{"2.up_proj.weight": torch.ones(20, 48)})),
        f"two tensors are named {MLP}.experts.2.up_proj.weight",
    ),
    "merged beside merged": (
        merged(add(gate_proj=torch.ones(6, 20, 48))),
        f"two tensors are named {MLP}.experts.0.gate_proj.weight",
    ),
    **{
        f"{name} of {value}": (
            lambda tensors, name=name, value=value: (
                tensors[f"model.layers.1.linear_attn.{name}"].view(-1)[1:2].fill_(value)
            ),
            f"model.layers.1.linear_attn.{name} contains NaN or infinity",
        )
        for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight")
        for value in (torch.nan, torch.inf)
    },
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = make_tiny_checkpoint("qwen3_next", tmp_path_factory.mktemp("hybrid") / "model")
    return directory, {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def directory(hybrid: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of a tiny Qwen3-Next."""
    (folder := tmp_path / "model").mkdir()
    for name, data in hybrid[1].items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("case", FILES)
def test_a_file_with_one_thing_wrong(directory: Path, case: str) -> None:
    change, message = FILES[case]
    assert message in load_error(edit(directory, change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 5}, f"{MLP}.gate.weight has shape [6, 48], expected [5, 48]"),
        ({"num_experts": 7}, f"{MLP}.experts.6.gate_proj.weight is missing"),
        ({"num_experts": 4096}, f"{MLP}.gate.weight has shape [6, 48], expected [4096, 48]"),
        ({"num_experts": 10**9}, "config.json: num_experts is 1000000000; expected"),
        ({"num_experts": 0}, "config.json: num_experts is 0; expected"),
        ({"num_experts_per_tok": 7}, "config.json: num_experts_per_tok is 7; expected"),
        ({"num_experts_per_tok": 0}, "config.json: num_experts_per_tok is 0; expected"),
        ({"moe_intermediate_size": 10**9}, "config.json: moe_intermediate_size is 1000000000; expected"),
        ({"shared_expert_intermediate_size": 27}, f"{MLP}.shared_expert.up_proj.weight has shape [28, 48], expected"),
        ({"mlp_only_layers": []}, "model.layers.2.mlp.gate.weight is missing"),
        ({"mlp_only_layers": [0, 2]}, f"{MLP}.gate_proj.weight is missing"),
    ],
    ids=str,
)
def test_a_config_of_other_experts(directory: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as caught:
        load_tiny(directory)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 2000


# A tiny Qwen3-MoE of 6 experts, whose file merges those of each name.
GGUF_FILES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "fewer experts": (without("experts.5.up_proj.weight"), f"{MLP}.experts.5.up_proj.weight is missing"),
    "more experts": (add(**{"6.up_proj.weight": torch.ones(20, 40)}), f"{MLP}.experts.6.up_proj.weight is unexpected"),
    "router rows": (reshaped("gate.weight", lambda t: t[:5]), f"{MLP}.gate.weight has shape [5, 40], expected [6, 40]"),
    "no gates": (
        lambda tensors: [without(f"experts.{i}.gate_proj.weight")(tensors) for i in range(6)],
        f"{MLP}.experts.0.gate_proj.weight is missing",
    ),
    "rows": (
        lambda tensors: [reshaped(f"experts.{i}.up_proj.weight", lambda t: t[:19])(tensors) for i in range(6)],
        f"{MLP}.experts.0.up_proj.weight has shape [19, 40], expected [20, 40]",
    ),
    "NaN": (
        reshaped("experts.4.down_proj.weight", lambda t: t.fill_(torch.nan)),
        f"{MLP}.experts.4.down_proj.weight contains NaN or infinity",
    ),
}


@pytest.mark.parametrize("case", GGUF_FILES)
def test_a_gguf_file_with_one_thing_wrong(case: str, tmp_path: Path) -> None:
    change, message = GGUF_FILES[case]
    directory = edit(make_tiny_checkpoint("qwen3_moe", tmp_path / "model", mlp_only_layers=[]), change)
    assert message in load_error(write_tiny_gguf(directory, tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 7, f"{MLP}.experts.6.gate_proj.weight is missing"),
        ("expert_count", 10**9, "num_experts is 1000000000; expected"),
        ("expert_used_count", 7, "num_experts_per_tok is 7; expected"),
        ("expert_used_count", 0, "num_experts_per_tok is 0; expected"),
        ("expert_feed_forward_length", 21, f"{MLP}.experts.0.gate_proj.weight has shape [20, 40], expected [21, 40]"),
    ],
)
def test_gguf_metadata_of_other_experts(key: str, value: int, message: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", mlp_only_layers=[])
    path = tmp_path / "m.gguf"
    config = json.loads((directory / "config.json").read_text())
    config_key = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }[key]
    config.pop("num_local_experts", None)
    (directory / "config.json").write_text(json.dumps(config | {"num_experts": 6} | {config_key: value}))
    write_tiny_gguf(directory, path)
    with pytest.raises(ModelError) as caught:
        load_tiny(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# -- quantised --------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
"""All experts are chosen: rounding must not choose others."""
NESTED = WIDE | {"hidden_size": 256, "moe_intermediate_size": 512}


def logits(model: Any) -> Tensor:
    return torch.cat(PagedRun(model, PROMPTS, block_size=4).run(7))


def experts_of(model: Any) -> list[Experts]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]


def packed_experts(model: Any) -> list[bool]:
    """Of the two products of each layer with experts: whether they keep quantised weights."""
    methods = [method for experts in experts_of(model) for method in (experts.up.method, experts.down.method)]
    return [method.packed_experts is not None for method in methods]


@needs_compiler
@pytest.mark.parametrize("quantisation", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_a_cpu_keeps_the_bits_of_gguf_experts(quantisation: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", **(NESTED if "K" in quantisation else WIDE))
    path = write_tiny_gguf(
        directory, tmp_path / "m.gguf", quantisation=lambda name: quantisation if "exps" in name else "F32"
    )
    model = load_tiny(path, cpu, torch.bfloat16, linear_method=PackedMethod)
    assert packed_experts(model) == [True] * 6
    expected = logits(load_tiny(path))  # dequantised, in float32
    assert 1e-5 < float((logits(model) - expected).norm() / expected.norm()) < 0.05


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_of_two_types(dtype: torch.dtype, tmp_path: Path) -> None:
    """Gate and up are one product, which takes one form: they are dequantised, and down keeps its bits."""
    directory = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", **WIDE)
    kinds = {"gate": "Q4_0", "up": "Q8_0", "down": "Q4_0"}
    path = write_tiny_gguf(
        directory,
        tmp_path / "m.gguf",
        quantisation=lambda name: kinds[name.split("_")[1]] if "exps" in name else "F32",
    )
    model = load_tiny(path, cpu, dtype, linear_method=PackedMethod)
    if dtype == torch.bfloat16:
        assert packed_experts(model) == [False, True] * 3
    expected = logits(load_tiny(path))
    assert float((logits(model) - expected).norm() / expected.norm()) < (0.05 if dtype == torch.bfloat16 else 1e-5)


@needs_compiler
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_rounding_leaves_routers(kind: str, quantization: str, tmp_path: Path) -> None:
    """Router and shared gate keep the checkpoint's numbers: their outputs choose experts."""
    sizes = WIDE | ({"shared_expert_intermediate_size": 32} if kind == "qwen3_next" else {})
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **sizes)
    stored = stored_tensors(directory)
    method = find_linear_method(quantization, "cpu")
    model = load_tiny(directory, cpu, torch.bfloat16, linear_method=method)
    assert all(packed_experts(model))
    for index, layer in enumerate(model.layers):  # type: ignore[attr-defined]
        if not isinstance(layer.mlp, Experts):
            continue
        linears = {"gate": layer.mlp.router}
        if layer.mlp.shared is not None:
            linears["shared_expert_gate"] = layer.mlp.shared_gate
        for name, linear in linears.items():
            weight = stored[f"model.layers.{index}.mlp.{name}.weight"].bfloat16()
            x = torch.eye(64, dtype=torch.bfloat16)
            assert torch.equal(linear(x).T.bfloat16(), weight), name
    expected = logits(load_tiny(directory, cpu, torch.bfloat16))
    error = float((logits(model) - expected).norm() / expected.norm())
    assert 1e-4 < error < {"int8": 0.3, "int4": 1.0}[quantization]  # the tiny hybrid amplifies


@needs_compiler
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_engine_rounds_experts(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", **WIDE)
    seen: dict[int, bool] = {}
    products = PackedMethod.experts_in

    def watched(self: PackedMethod, *args: Any) -> Tensor:
        seen[id(self)] = self.packed_experts is not None
        return products(self, *args)

    monkeypatch.setattr(PackedMethod, "experts_in", watched)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 64}
    with LLM(str(directory), quantization=quantization, **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert list(seen.values()) == [True, True, True]
