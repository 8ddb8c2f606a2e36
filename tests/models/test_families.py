"""A model family is one module and one line of the registry, and its module is imported only for its models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models import registry
from tests.models.tiny import load_tiny, make_tiny_checkpoint, random_prompts, read_spec

HERON = '''
"""Heron: a Llama with its own keys in config.json, names of tensors, and biases on Q, K and V."""

from octavo.models.config_values import read_decoder_spec, read_size
from octavo.models.family import Family
from octavo.models.spec import TensorNames

NAMES = TensorNames(
    embedding="trunk.words",
    head="trunk.to_words",
    final_norm="trunk.norm",
    layer="trunk.layer_{}/",
    attention_norm="norm_1",
    qkv=("query", "key", "value"),
    out="attended",
    mlp_norm="norm_2",
    mlp_in=("gate", "wide"),
    down="narrow",
)


def read(config, common):
    config = config | {"hidden_size": read_size(config, "width"), "num_hidden_layers": config.get("depth")}
    return read_decoder_spec(config, common, qkv_bias=True, names=NAMES)


FAMILY = Family(read=read, defaults={"num_key_value_heads": 2}, renamed=((r"ancient\\.", "trunk."),))
'''
STEMS = {
    "model.embed_tokens": "trunk.words",
    "lm_head": "trunk.to_words",
    "model.norm": "ancient.norm",
    "input_layernorm": "norm_1",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "attended",
    "post_attention_layernorm": "norm_2",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "wide",
    "mlp.down_proj": "narrow",
}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def heron_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in STEMS:
        return f"{STEMS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"trunk.layer_{layer}/{STEMS[part]}.{kind}"


@pytest.fixture
def heron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A Qwen2, which is a Llama with these biases, and the same weights as a Heron; its family is registered."""
    (tmp_path / "heron_family.py").write_text(HERON)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        registry,
        "FAMILIES",
        [*registry.FAMILIES, registry.Entry("heron_family:FAMILY", ("HeronForCausalLM",), ("heron",))],
    )
    plain = make_tiny_checkpoint("qwen2", tmp_path / "plain", tie_word_embeddings=False, **SIZES)
    other = tmp_path / "heron"
    other.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config |= {"architectures": ["HeronForCausalLM"], "model_type": "heron", "width": config.pop("hidden_size")}
    config["depth"] = config.pop("num_hidden_layers")
    del config["num_key_value_heads"]
    (other / "config.json").write_text(json.dumps(config))
    tensors = {heron_name(name): tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return plain, other


def greedy(directory: Path) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(5, 19, 2)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(directory), skip_tokenizer_init=True, max_model_len=64) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_family_from_one_module_generates_the_tokens_of_the_equal_model(heron: tuple[Path, Path]) -> None:
    plain, other = heron
    assert greedy(other) == greedy(plain)
    assert read_spec(other).num_params == read_spec(plain).num_params


def test_checks_of_tensors_use_the_names_of_the_family(heron: tuple[Path, Path]) -> None:
    file = heron[1] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors.pop("trunk.layer_0/query.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_tiny(heron[1])
    assert "trunk.layer_0/query.weight is missing" in str(caught.value)
    assert "model.layers.0.self_attn.q_proj.weight is unexpected" in str(caught.value)


def test_errors_list_registered_families(heron: tuple[Path, Path]) -> None:
    config = json.loads((heron[1] / "config.json").read_text())
    (heron[1] / "config.json").write_text(json.dumps(config | {"architectures": ["HeronForCausalML"]}))
    with pytest.raises(UnsupportedModelError, match=r"did you mean HeronForCausalLM\? supported: LlamaForCausalLM"):
        read_spec(heron[1])


def test_only_the_family_of_a_model_is_imported(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("mistral", tmp_path / "mistral")
    program = f"""
import sys
from octavo.checkpoint.resolve import open_checkpoint
from octavo.models.config import read_spec
read_spec(open_checkpoint({str(directory)!r}))
print(sorted(name for name in sys.modules if name.startswith("octavo.models.families.")), "torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "['octavo.models.families.mistral'] False"


@pytest.mark.parametrize("entry", registry.FAMILIES, ids=lambda entry: entry.family)
def test_names_of_families_are_unique(entry: registry.Entry) -> None:
    assert registry.architectures().count(entry.architectures[0]) == 1
    assert all(registry.model_types().count(name) == 1 for name in entry.model_types)
    assert registry.find_family(entry.architectures[-1]) is registry.load(entry.family)
