"""The models give Transformers' float32 logits at all positions, for every schedule of the tokens."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch
from octavo.models.decoder import Decoder, DecoderLayer
from octavo.models.layers import Attention, GatedMLP
from octavo.models.linear import LayerFactory
from octavo.models.loading.loader import load_model
from octavo.models.spec import DecoderSpec
from tests.models.tiny import (
    PagedRun,
    SmallBatchPath,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    num_bytes,
    random_prompts,
    read_spec,
    transformers_logits,
)

PROMPTS = random_prompts(1, 9, 23, 17)
TRAINED = {"original_max_position_embeddings": 32}


def rope(kind: str, *, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 38}),
    "llama one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 24}),
    "llama linear rope": ("llama", rope("linear", theta=5e4, factor=3.0)),
    "llama llama3 rope": (
        "llama",
        rope("llama3", theta=1e3, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED),
    ),
    "qwen2 yarn rope": ("qwen2", rope("yarn", factor=4.0, **TRAINED)),
    "llama dynamic rope": ("llama", rope("dynamic", factor=3.0)),
    "llama wide heads": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 80, "hidden_size": 48},
    ),
    "qwen2 yarn of a length": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": None, **TRAINED}},
    ),
    "llama longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 9 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                **TRAINED,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "vocab_size": 517}),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"intermediate_size": 26}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 7}),
    "qwen2 some windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 even": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 38}),
    "qwen3 grouped": ("qwen3", {"num_key_value_heads": 1, "attention_bias": True, "head_dim": 16}),
    "qwen3 some windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("gemma3", {}),
    "gemma3 untied": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True, "vocab_size": 517}),
    "gemma3 scaled": (
        "gemma3",
        {
            "num_attention_heads": 7,
            "head_dim": 80,
            "sliding_window": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e1},
            },
        },
    ),
    "gemma3 even": ("gemma3", {"num_key_value_heads": 2, "intermediate_size": 38}),
    "gemma4": ("gemma4", {}),
    "gemma4 dense": (
        "gemma4",
        {
            "enable_moe_block": False,
            "attention_k_eq_v": False,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4 scaled": (
        "gemma4",
        {
            "enable_moe_block": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.8,
                    "factor": 3.0,
                    "rope_theta": 5e2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e1},
            },
        },
    ),
    "gemma4 one size": ("gemma4", {"global_head_dim": 24, "num_global_key_value_heads": 2}),
    "gemma4 all full": ("gemma4", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
    "gpt2": ("gpt2", {}),
    "gpt2 one odd head": ("gpt2", {"n_embd": 21, "n_head": 1, "n_inner": None, "vocab_size": 517}),
    "gpt2 scales": (
        "gpt2",
        {
            "n_head": 2,
            "n_inner": 38,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "activation_function": "relu",
        },
    ),
    "opt": ("opt", {}),
    "opt norms after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 22}),
    "opt bare": (
        "opt",
        {
            "num_attention_heads": 14,
            "hidden_size": 112,
            "ffn_dim": 38,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "opt even": ("opt", {"num_attention_heads": 4, "ffn_dim": 38}),
    "phi3": ("phi3", {}),
    "phi3 plain": ("phi3", rope("default", theta=1e3) | {"sliding_window": 5}),
    "phi3 even": ("phi3", {"intermediate_size": 38}),
    "olmo2": ("olmo2", {}),
    "olmo2 biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {}),
    "smollm3 windows": (
        "smollm3",
        {
            "no_rope_layers": None,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "intermediate_size": 38,
        },
    ),
    "granite": ("granite", {}),
    "granite even": ("granite", {"intermediate_size": 38, "attention_bias": True, "mlp_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 bare": ("starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": True}),
    "starcoder2 even": ("starcoder2", {"intermediate_size": 38}),
    "internlm2": ("internlm2", {}),
    "internlm2 biases": ("internlm2", {"attention_bias": True, "intermediate_size": 38}),
    "internlm3": ("internlm3", {}),
    "internlm3 biases": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe few": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    "mixtral": ("mixtral", {}),
    "mixtral all": ("mixtral", {"num_experts_per_tok": 5, "sliding_window": 7, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss all": ("gpt_oss", {"num_experts_per_tok": 6, "attention_bias": False, "swiglu_alpha": 0.9}),
    "gpt_oss tied": ("gpt_oss", {"tie_word_embeddings": True, "num_experts_per_tok": 1, **rope("default")}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next all": ("qwen3_next", {"num_experts_per_tok": 6, "norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5 turned": (
        "qwen3_5",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Tensor]]]:
    """The directory and Transformers' logits of each case, created at first use."""

    class Models(dict[str, tuple[Path, list[Tensor]]]):
        def __missing__(self, case: str) -> tuple[Path, list[Tensor]]:
            kind, sizes = CASES[case]
            directory = make_tiny_checkpoint(kind, tmp_path_factory.mktemp("model"), **sizes)
            self[case] = directory, transformers_logits(directory, PROMPTS)
            return self[case]

    return Models()


def random_steps(seed: int) -> list[list[int]]:
    """Steps with prompts, chunks and single tokens, in which some sequences skip steps."""
    rng = random.Random(seed)
    return [[rng.choice([0, 1, 1, 2, 5, 11]) for _ in PROMPTS] for _ in range(200)]


class PlainPathMLP:
    """Another MLP in the slot of a layer; it has no small-batch path."""

    max_small_batch_tokens = 0

    def __init__(self, mlp: Any) -> None:
        self.mlp = mlp
        self.weights = mlp.weights
        self.num_tokens: list[int] = []  # of each call

    def __call__(self, x: Tensor) -> Tensor:
        self.num_tokens.append(len(x))
        return self.mlp(x)

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = reference.add_rms_norm(x, residual, norm, eps)
        return self(normed), total


class OtherDecoder(Decoder):
    def make_layer(self, layer: int, factory: LayerFactory) -> DecoderLayer:
        made = super().make_layer(layer, factory)
        made.mlp = PlainPathMLP(made.mlp)  # type: ignore[assignment]
        return made


class OtherSpec(DecoderSpec):
    __slots__ = ()
    model = f"{__name__}:OtherDecoder"


def test_a_spec_names_its_model_and_a_model_fills_the_slot_of_the_mlp(models: Any) -> None:
    directory, expected = models["llama"]
    spec = read_spec(directory)
    other = OtherSpec(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})
    ops = SmallBatchPath()
    decoder = load_model(open_checkpoint(directory), other, dtype=torch.float32, device="cpu", ops=ops)
    assert isinstance(decoder, OtherDecoder) and decoder.max_small_batch_tokens == 0
    for actual, wanted in zip(PagedRun(decoder, PROMPTS, block_size=8).run(4), expected, strict=True):
        assert_close(actual, wanted)
    assert all(isinstance(layer.mlp, PlainPathMLP) and len(layer.mlp.num_tokens) > 4 for layer in decoder.layers)


@pytest.mark.parametrize("ops", [reference, cpu, SmallBatchPath()], ids=["reference", "cpu", "small batches"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(models: Any, case: str, ops: ModuleType) -> None:
    directory, expected = models[case]
    decoder = load_tiny(directory, ops)
    for block_size, chunk in [(16, 999), (1, 4), (8, random_steps(1))]:
        results = PagedRun(decoder, PROMPTS, block_size=block_size, seed=block_size).run(chunk)
        for actual, wanted in zip(results, expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("chunk", [1, 7, 999, "mixed"])
def test_every_schedule_gives_the_same_logits(models: Any, chunk: Any, block_size: int, ops: ModuleType) -> None:
    directory, expected = models["qwen3 grouped"]
    run = PagedRun(load_tiny(directory, ops), PROMPTS, block_size=block_size, seed=3)
    for actual, wanted in zip(run.run(random_steps(block_size) if chunk == "mixed" else chunk), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gemma4", "qwen3_moe", "qwen3_5", "gpt2", "opt norms after"])
def test_only_requested_rows_get_logits_and_pass_the_last_mlp(models: Any, case: str) -> None:
    directory, expected = models[case]
    run = PagedRun(load_tiny(directory), PROMPTS, block_size=8)
    last: Any = run.decoder.layers[-1]  # type: ignore[attr-defined]
    part = "mlp" if hasattr(last, "mlp") else "up"
    mlp = PlainPathMLP(getattr(last, part))
    setattr(last, part, mlp)
    forward, seen = run.decoder.forward, []

    def forward_some(ids: Tensor, batch: RaggedBatch, kv: Tensor, rows: Tensor) -> Tensor:
        wanted = torch.tensor([32, 0, 9])  # ends of sequences 2, 0 and 1
        seen.extend(forward(ids, batch, kv, rows) for rows in (wanted[:0], wanted))
        return seen[-1]

    run.decoder.forward = forward_some  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        run.step([len(prompt) for prompt in PROMPTS])  # `step` expects the logits of all rows
    none, logits = seen
    assert none.shape == (0, logits.shape[1]) and logits.dtype == torch.float32
    assert_close(logits, torch.stack([expected[2][-1], expected[0][-1], expected[1][-1]]))
    assert mlp.num_tokens == [3]


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_close(models: Any, dtype: torch.dtype, case: str) -> None:
    directory, expected = models[case]
    decoder = load_tiny(directory, cpu, dtype)
    norms = [w.target.nbytes for w in decoder.weights() if case == "gemma3" and "norm" in w.name]  # in float32
    assert num_bytes(decoder) * 2 - sum(norms) == num_bytes(load_tiny(directory))
    for actual, wanted in zip(PagedRun(decoder, PROMPTS, block_size=16).run(999), expected, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, wanted, 0.1)


def test_tied_weights_are_counted_once(models: Any) -> None:
    tied, untied = (load_tiny(models[case][0]) for case in ("llama tied", "llama"))
    assert isinstance(tied, Decoder)
    assert tied.vocabulary.head is tied.vocabulary.table
    assert num_bytes(untied) - num_bytes(tied) == tied.vocabulary.table.weight.nbytes


def test_max_len_shortens_the_rotary_table_only(models: Any) -> None:
    directory, expected = models["llama"]
    decoder = load_tiny(directory, max_len=23)
    assert isinstance(decoder, Decoder)
    assert decoder.cos_sin.shape == (23, 16)
    assert_close(PagedRun(decoder, PROMPTS, block_size=8).run(999)[2], expected[2])


def test_only_sliding_window_layers_use_the_local_rope_table(models: Any) -> None:
    decoder = load_tiny(models["gemma3"][0])
    assert isinstance(decoder, Decoder)
    assert decoder.spec.windows == (6, 6, 0)
    assert not torch.equal(decoder.cos_sin, decoder.local_cos_sin)
    other = load_tiny(models["llama"][0])
    assert isinstance(other, Decoder) and other.local_cos_sin is other.cos_sin


def test_embeddings_are_scaled_in_the_dtype_of_the_model(models: Any) -> None:
    wide, narrow = (load_tiny(models["gemma3"][0], dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert isinstance(wide, Decoder) and isinstance(narrow, Decoder)
    assert wide.embedding_scale == pytest.approx(56**0.5, rel=1e-7)
    assert narrow.embedding_scale == torch.tensor(56**0.5).bfloat16().item() != wide.embedding_scale


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """Transformers' angles depend on the length of the sequence: a table for 23 tokens fits sequences of 23."""
    directory = make_tiny_checkpoint("llama", tmp_path, **rope("dynamic", factor=2.0), max_position_embeddings=16)
    spec = read_spec(directory)
    assert [spec.max_model_len(requested) for requested in (None, 9, 16, 23, 99)] == [16, 16, 16, 32, 32]
    (expected,) = transformers_logits(directory, PROMPTS[2:3])
    stretched = PagedRun(load_tiny(directory, max_len=23), PROMPTS[2:3], block_size=8).run(5)
    assert_close(stretched[0], expected)
    plain = PagedRun(load_tiny(directory, max_len=16), PROMPTS[1:2], block_size=8).run(5)
    assert_close(plain[0], transformers_logits(directory, PROMPTS[1:2])[0])


def test_longrope_beyond_the_trained_length(tmp_path: Path) -> None:
    """Transformers chooses the factors by the length of the sequence, a table by the maximum."""
    directory = make_tiny_checkpoint("phi3", tmp_path, original_max_position_embeddings=16)
    spec = read_spec(directory)
    assert [spec.max_model_len(requested) for requested in (None, -1, 16, 17, 999)] == [16, 16, 16, 128, 128]
    short, _, long, _ = transformers_logits(directory, PROMPTS[:2] + PROMPTS[2:])
    for prompt, expected, max_len in ((PROMPTS[0], short, None), (PROMPTS[2], long, 23), (PROMPTS[2], long, 128)):
        assert_close(PagedRun(load_tiny(directory, max_len=max_len), [prompt], block_size=8).run(5)[0], expected)
    (plain,) = PagedRun(load_tiny(directory, max_len=16), [PROMPTS[2][:16]], block_size=8).run(5)
    assert (plain - long[:16]).abs().max() > 1e-3 * long.abs().max()  # the tables differ


def test_norms_of_partly_rotated_heads_follow_the_order_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3 with the rotation of Phi-3: no supported family has both."""
    import transformers
    from transformers.models.phi3 import modeling_phi3
    from transformers.models.qwen3 import modeling_qwen3

    directory = make_tiny_checkpoint("qwen3", tmp_path)  # head_dim 24
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", modeling_phi3.apply_rotary_pos_emb)
    model.model.rotary_emb.inv_freq = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[2]])).logits[0]
    spec = dataclasses.replace(read_spec(directory), rotary_dim=8)
    for ops in (reference, cpu, SmallBatchPath()):
        decoder = load_model(open_checkpoint(directory), spec, dtype=torch.float32, device="cpu", ops=ops)
        assert_close(PagedRun(decoder, PROMPTS[2:3], block_size=8).run(5)[0], expected)


@pytest.mark.parametrize("case", ["gemma3", "gpt2", "opt norms after"])
def test_each_linear_layer_has_a_method_that_owns_its_weight(models: Any, case: str) -> None:
    decoder = load_tiny(models[case][0])
    methods = {weight.method for weight in decoder.weights()} - {None}
    assert len(methods) == 4 * decoder.spec.num_layers + 1  # the vocabulary
    for weight in decoder.weights():
        if weight.method is not None:
            owned = weight.method.weight.untyped_storage().data_ptr()
            assert weight.target.untyped_storage().data_ptr() == owned


@pytest.mark.parametrize("kind", ["llama", "phi3", "smollm3", "granite", "internlm2", "internlm3"])
def test_small_batches_have_a_path_where_norms_come_first(models: Any, kind: str) -> None:
    sizes = [load_tiny(models[name][0], SmallBatchPath()).max_small_batch_tokens for name in (kind, "olmo2")]
    assert sizes == [6, 0]


def test_granite_adds_no_operation_to_a_layer(models: Any) -> None:
    spec = read_spec(models["granite"][0])
    assert isinstance(spec, DecoderSpec)
    assert spec.embedding_scale == pytest.approx(3.7 / 0.31) and spec.rms_norm_eps == pytest.approx(1e-6 / 0.31**2)
    assert load_tiny(models["granite"][0], dtype=torch.bfloat16).embedding_scale == spec.embedding_scale


def test_the_small_batch_path_fits_each_kind_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of this model has experts, which set no limit; the second has an MLP."""
    monkeypatch.setattr(Attention, "max_small_batch_tokens", 9)
    decoder = load_tiny(make_tiny_checkpoint("qwen3_moe", tmp_path / "model"))
    assert isinstance(decoder, Decoder)
    assert decoder.layers[0].max_small_batch_tokens == 9
    monkeypatch.setattr(GatedMLP, "max_small_batch_tokens", 3)
    assert decoder.max_small_batch_tokens == 3
