"""`octavo doctor` predicts the engine's memory plan, and its remedies work."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, doctor
from octavo.config import GIB, EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.doctor import Report, examine, format_report
from octavo.errors import ModelNotFoundError, ParameterError
from octavo.frontend import build as building
from octavo.kernels import reference
from octavo.kernels.cpu import packed_linear as packed
from octavo.models.config import spec_from_config
from octavo.models.loading.loader import empty_model
from octavo.runner.memory import needs
from octavo.runner.memory.budget import FreeMemory
from octavo.runner.passes.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.passes.prefill_batch import PrefillSizes
from octavo.simulate.models import MODELS
from tests.cli.conftest import Call, call
from tests.models.tiny import num_bytes
from tests.test_project import loaded_by

__all__ = ["call"]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
SMOLLM2 = LLAMA | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 24,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 19,
    "sliding_window": 6,
}
UNSHARED = SMOLLM2 | {"num_attention_heads": 11, "num_key_value_heads": 11, "head_dim": 64}
"""No number of ranks divides its heads and its MLP."""
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 60, "n_head": 3, "n_layer": 2, "n_inner": 37, "vocab_size": 97}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 56,
    "num_attention_heads": 7,
    "ffn_dim": 37,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STATES = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, every bias": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "smollm2": SMOLLM2,
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3": GEMMA,
    "gpt2": GPT2,
    "opt": OPT,
    "opt, narrow": OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "phi3": LLAMA | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
    "olmo2": LLAMA | {"architectures": ["Olmo2ForCausalLM"]},
    "smollm3": LLAMA | {"architectures": ["SmolLM3ForCausalLM"]},
    "granite": LLAMA | {"architectures": ["GraniteForCausalLM"], "attention_bias": True},
    "starcoder2": LLAMA | {"architectures": ["Starcoder2ForCausalLM"]},
    "internlm2": LLAMA | {"architectures": ["InternLM2ForCausalLM"]},
    "internlm3": LLAMA | {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True},
    "qwen3_moe": LLAMA | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]},
    "mixtral": LLAMA | EXPERTS | {"architectures": ["MixtralForCausalLM"]},
    "gpt-oss": LLAMA | EXPERTS | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "head_dim": 8},
    "qwen3_next": LLAMA | EXPERTS | STATES | {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5_moe": LLAMA | EXPERTS | STATES | {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "opt, bare": OPT | {"layer_norm_elementwise_affine": False, "enable_bias": False},
}


@pytest.fixture(autouse=True)
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free memory of the host for the doctor and the engine; tests may set it."""
    free = [6 * GIB]
    monkeypatch.setattr(doctor, "free_memory", lambda: free[0])
    monkeypatch.setattr(building, "free_memory", lambda: free[0])
    monkeypatch.setattr(doctor, "_nvidia_gpu", lambda: None)
    return free


def write_config(directory: Path, config: dict[str, Any] = LLAMA, **more: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config | more))
    return str(directory)


# -- against the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_bytes_equal_the_model(name: str) -> None:
    spec = spec_from_config(CONFIGS[name])
    for dtype in (torch.float32, torch.bfloat16):
        model = empty_model(spec, ops=reference, dtype=dtype, device="meta", max_len=1)
        assert spec.weight_bytes(dtype.itemsize) == num_bytes(model)
    # Linear layers and the head are quantised; an untied table and routers stay as they are.
    table = {model.vocabulary.table} - {model.vocabulary.head}
    methods = {w.method for w in model.weights()} - {None} - table
    packed = [method.weight for method in methods if method.role != "router"]
    head = model.vocabulary.head.weight.numel()
    linear = sum(weight.numel() for weight in packed) - head
    rest = num_bytes(model) - 2 * (linear + head) + head + head // 32 * 2  # the head has 8 bits
    assert spec.weight_bytes(2, "int8") == rest + linear + linear // 32 * 2
    fine = sum(method.weight.numel() for method in methods if method.layer in ("qkv", "down"))
    coarse = linear - fine
    assert fine and spec.weight_bytes(2, "int4") == rest + fine + fine // 32 * 2 + coarse // 2 + coarse // 32 * 4
    storages = {id(w.target.untyped_storage()): w.target for w in model.weights()}
    assert spec.num_params == sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in storages.values())


@pytest.mark.parametrize("config", [LLAMA, SMOLLM2], ids=["tiny", "smollm2"])
@pytest.mark.parametrize("free_gib", [1, 6])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_engine_plan_equals_the_prediction(
    tmp_path: Path, free_bytes: list[int], config: dict[str, Any], free_gib: int, kv_cache_dtype: str
) -> None:
    free_bytes[0] = free_gib * GIB
    args: dict[str, Any] = {"model": write_config(tmp_path, config, num_hidden_layers=3), "load_format": "dummy"}
    args["kv_cache_dtype"] = kv_cache_dtype
    report = examine(EngineArgs(**args, device="cpu"))
    with LLM(**args, device="cpu", skip_tokenizer_init=True) as llm:
        resolved = llm.config
    assert report.fits and report.budget is not None
    assert abs(report.budget.num_blocks / resolved.num_blocks - 1) < 0.02
    assert report.budget.num_blocks == resolved.num_blocks and report.budget.num_host_blocks == resolved.num_host_blocks
    assert (report.need.kv, report.need.weights) == (resolved.kv, resolved.weight_bytes)
    assert (report.budget.kv, report.budget.max_model_len) == (resolved.kv, resolved.max_model_len)
    assert report.need.dtype == resolved.dtype
    assert ("K and V in int8" in "\n".join(format_report(report))) == (kv_cache_dtype == "int8")


def test_dtype_equals_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ask `EngineArgs.resolved_dtype`, each with its own detection of the processor."""
    args: dict[str, Any] = {"model": write_config(tmp_path), "load_format": "dummy", "device": "cpu"}
    for fast in (False, True):
        monkeypatch.setattr(packed, "has_fast_bfloat16", lambda fast=fast: fast)
        monkeypatch.setattr(needs, "has_bfloat16_products", lambda fast=fast: fast)
        with LLM(**args, skip_tokenizer_init=True) as llm:
            assert llm.config.dtype == examine(EngineArgs(**args)).need.dtype == ("bfloat16" if fast else "float32")


def test_bfloat16_detection_equals_torch() -> None:
    assert needs.has_bfloat16_products() == packed.has_fast_bfloat16()


def test_graph_counts_equal_the_runner() -> None:
    assert [needs.num_decode_graphs(n) for n in (1, 4, 100, 256, 600)] == [
        len(decode_sizes(n) + cascade_sizes(n)) for n in (1, 4, 100, 256, 600)
    ]
    assert len(PrefillSizes.TOKENS_OF_FEW) + len(PrefillSizes.TOKENS_OF_MANY) == needs.NUM_PREFILL_GRAPHS


# -- remedies ----------------------------------------------------------------------------------------------------------


def with_flags(args: EngineArgs, remedy: tuple[str, ...]) -> EngineArgs:
    """The arguments of a command line like `args` with the flags applied."""
    changes: dict[str, Any] = {}
    for text in remedy:
        option, *value = shlex.split(text.removeprefix("without "))
        field = option.removeprefix("--").replace("-", "_")
        if text.startswith("without"):
            changes[field] = None
        elif not value:
            changes[field] = True
        else:
            is_number = value[0].replace(".", "", 1).isdigit()
            changes[field] = json.loads(value[0]) if is_number else value[0]
    return replace(args, **changes)


@pytest.mark.parametrize(
    ("config", "gpu", "free_gib", "options", "remedy"),
    [
        (LLAMA, None, 6, {"kv_cache_memory_bytes": 40_000, "max_model_len": 500}, "--max-model-len"),
        (LLAMA, None, 1, {"num_gpu_blocks_override": 1 << 22}, "without --num-gpu-blocks-override"),
        (LLAMA, None, 1, {"kv_cache_memory_bytes": 2 * GIB}, "without --kv-cache-memory-bytes"),
        (LLAMA, None, 1, {"swap_space": 8.0, "num_gpu_blocks_override": 400_000}, "without --num-gpu-blocks-override"),
        (SMOLLM2, None, 0.4, {"dtype": "float32"}, "--dtype bfloat16"),
        (SMOLLM2, None, 0.2, {"dtype": "bfloat16"}, "--quantization int8"),
        (SMOLLM2, None, 6, {"gpu_memory_utilization": 0.02}, "--gpu-memory-utilization 0.5"),
        (SMOLLM2, "2gib", 6, {"gpu_memory_utilization": 0.4}, "--gpu-memory-utilization 0.95"),
        (SMOLLM2, "1.6gib", 6, {}, "--max-num-batched-tokens 2048"),
        (SMOLLM2, "h200", 6, {"kv_cache_memory_bytes": 200 * GIB}, "without --kv-cache-memory-bytes"),
        (
            SMOLLM2,
            "h200",
            6,
            {"max_model_len": 8192, "gpu_memory_utilization": 0.0125},
            "--gpu-memory-utilization 0.95",
        ),
        (UNSHARED, "1.5gib", 6, {"max_model_len": 8192}, "--max-model-len"),
    ],
)
def test_remedy_makes_the_model_fit(
    tmp_path: Path,
    free_bytes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    gpu: str | None,
    free_gib: float,
    options: dict[str, Any],
    remedy: str,
) -> None:
    monkeypatch.setattr(needs, "has_bfloat16_products", lambda: True)
    free_bytes[0] = int(free_gib * GIB)
    args = EngineArgs(model=write_config(tmp_path, config), **options)
    report = examine(args, gpu)
    assert not report.fits and report.budget is not None
    assert any(flag.startswith(remedy) for flag in report.remedy), report.remedy
    again = examine(with_flags(args, report.remedy), gpu)
    assert again.fits and again.budget == report.budget and again.need == report.need


@pytest.mark.parametrize(
    ("model", "gpu", "options", "size"),
    [
        ("llama-3.1-70b", "h100", {}, 2),
        ("llama-3.1-70b", "a100-40", {}, 8),  # 5 would do, and does not divide 64 heads
        ("llama-3.1-8b", "l4", {"max_model_len": 100_000}, 2),  # rather than fewer tokens
        ("llama-3.1-70b", "h100", {"tensor_parallel_size": 2, "max_model_len": 131_072}, 4),
        ("opt-175b", "l4", {}, None),  # 16 would do
    ],
)
def test_ranks_are_a_remedy_for_a_small_gpu(model: str, gpu: str, options: dict[str, Any], size: int | None) -> None:
    report = examine(EngineArgs(model=model, **options), gpu)
    assert not report.fits and report.remedy == (() if size is None else (f"--tensor-parallel-size {size}",))
    if size is None:
        return
    again = examine(EngineArgs(model=model, **options | {"tensor_parallel_size": size}), gpu)
    assert again.fits and again.budget == report.budget and again.need == report.need
    assert again.need.weights < 1.01 * report.spec.weight_bytes(2) / size
    assert f"; each of {size} ranks; in bfloat16" in format_report(report)[1]


def test_ranks_are_a_remedy_only_where_a_machine_has_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_devices, remedy in ((1, ()), (7, ()), (8, ("--tensor-parallel-size 8",))):
        monkeypatch.setattr(doctor, "_nvidia_gpu", lambda n=num_devices: ("A100", 40 << 30, 0, n))
        assert examine(EngineArgs(model="llama-3.1-70b")).remedy == remedy


def test_without_a_remedy_a_gpu_is_suggested(tmp_path: Path, free_bytes: list[int]) -> None:
    free_bytes[0] = GIB // 20
    report = examine(EngineArgs(model=write_config(tmp_path, SMOLLM2), device="cpu"))
    assert not report.fits and report.remedy == () and report.budget is None and "one l4 holds it" in report.advice
    assert "more than the free memory" in str(report.problem) and "octavo doctor" not in str(report.problem)
    larger = SMOLLM2 | {"hidden_size": 16_384, "intermediate_size": 65_536, "num_hidden_layers": 100}
    report = examine(EngineArgs(model=write_config(tmp_path, larger)), "h200")
    assert "any single known GPU" in report.advice and "weights take" in str(report.problem)


# -- the report --------------------------------------------------------------------------------------------------------


def test_concurrency_counts_started_blocks() -> None:
    """1,000 blocks of 16; a partly filled block is taken."""
    spec = spec_from_config(SMOLLM2)
    budget = doctor.plan_memory(
        EngineArgs(model="m", num_gpu_blocks_override=1000).resolved("cpu"),
        KVCacheSpec.of(spec, 16, "bfloat16"),
        FreeMemory(weights=1, host=GIB),
        model_len=8192,
    )
    assert doctor._concurrency(budget, spec) == {1024: 1000 / 64, 4096: 1000 / 256, 8192: 1000 / 512}
    windows = spec_from_config(SMOLLM2 | {"architectures": ["MistralForCausalLM"], "sliding_window": 1000})
    assert doctor._concurrency(budget, windows) == {1024: 1000 / 64, 4096: 1000 / 64, 8192: 1000 / 64}


def test_five_times_the_requests_of_gemma3_27b_fit() -> None:
    """At 32k tokens, in the bytes of ten requests whose 62 layers are one group."""
    spec = MODELS["gemma3-27b"].spec
    assert spec is not None
    alike, groups = (KVCacheSpec.of(spec, 16, "bfloat16", max_len=n) for n in (0, 32768))
    num_bytes = 10 * 2048 * alike.bytes_per_block + alike.bytes_per_block
    at_once = [
        doctor._concurrency(
            doctor.plan_memory(
                EngineArgs(model="m", num_gpu_blocks_override=kv.num_blocks(num_bytes)).resolved("cpu"),
                kv,
                FreeMemory(weights=1, host=2 * num_bytes),
                model_len=32768,
            ),
            spec,
        )[32768]
        for kv in (alike, groups)
    ]
    assert at_once == [10, pytest.approx(52.1, abs=0.1)]


def test_report_tells_groups_of_layers_apart(call: Call) -> None:
    done = call("doctor", "gemma3-27b", "--gpu", "h200")
    assert "\n" + " " * 28 + "80.0 KiB a token: 10 layers without a sliding window\n" in done.out
    text = "480.0 KiB for each of the last 1,024 tokens: 52 layers in groups of 10, with 8 of padding\n"
    assert text in done.out
    report = json.loads(call("doctor", "gemma3-27b", "--gpu", "h200", "--json").out)
    assert report["kv_bytes_per_token_of_a_group"] == 80 << 10 and report["kv_bytes_per_token"] == 560 << 10
    assert report["kv_windows"] == [1024] * 6 and report["kv_padding_layers"] == 8
    alike = json.loads(call("doctor", "qwen3-8b", "--gpu", "h200", "--json").out)
    assert alike["kv_windows"] == [] and alike["kv_padding_layers"] == 0


def test_command_prints_the_bytes_of_a_rank(call: Call) -> None:
    one, two = (
        json.loads(call("doctor", "llama-3.1-8b", "--gpu", "h100", "-tp", size, "--json").out) for size in ("1", "2")
    )
    assert one["kv_bytes_per_token"] == 2 * two["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert 0.5 <= two["weight_bytes"] / one["weight_bytes"] < 0.501  # the norms are whole
    assert two["num_blocks"] > 2 * one["num_blocks"]
    done = call("doctor", "llama-3.1-8b", "--gpu", "h100", "-tp", "3")
    assert done.code == 2 and "tensor_parallel_size 3 does not divide the model's 32 attention heads" in done.err


def test_command_prints_the_report(tmp_path: Path, call: Call, free_bytes: list[int]) -> None:
    model = write_config(tmp_path, SMOLLM2)
    done = call("doctor", model, "--device", "cpu", "--dtype", "bfloat16")
    assert done.code == 0, done.err
    assert "134.5 M parameters" in done.lines[0] and "6.00 GiB of memory free" in done.lines[1]
    assert "22.5 KiB a token: 4,185 blocks of 16, 66,960 tokens" in done.out
    assert "  8,192                 8.2" in done.out
    report = json.loads(call("doctor", model, "--gpu", "H200", "--json").out)
    assert report["fits"] and report["num_params"] == 134_515_008 and report["machine"]["device"] == "cuda"
    assert report["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2 and report["num_tokens"] == 16 * report["num_blocks"]
    free_bytes[0] = GIB
    done = call("doctor", model, "--device", "cpu", "--dtype", "bfloat16", "--num-gpu-blocks-override", "90000")
    assert done.code == 1 and "It does not fit: No available memory for the cache blocks" in done.out
    assert "This makes it fit: without --num-gpu-blocks-override" in done.out
    done = call("doctor", model, "--dtype", "bfloat16", "--max-model-len", "8192", "--swap-space", "9999", "--json")
    report = json.loads(done.out)
    assert report["fits"] and "cut to its size" in report["warnings"][0]


def test_command_lists_the_keys_of_the_files(tmp_path: Path, call: Call, free_bytes: list[int]) -> None:
    model = write_config(tmp_path, SMOLLM2 | {"use_cache": True, "novelty": 1})
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "transformers_version": "5"}))
    report = json.loads(call("doctor", model, "--device", "cpu", "--json").out)
    config, generation = report["keys"][:2]
    assert config["file"] == "config.json" and "hidden_size" in config["read"]
    assert (config["inert"], config["unknown"]) == (["use_cache"], ["novelty"])
    assert generation == {
        "file": "generation_config.json",
        "read": ["temperature"],
        "inert": ["transformers_version"],
        "unknown": [],
    }
    out = call("doctor", model, "--device", "cpu").out
    assert "keys of config.json\n  read " in out and "\n  no effect   use_cache\n  unknown     novelty\n" in out


def test_the_bytes_of_experts(tmp_path: Path, call: Call) -> None:
    model = write_config(tmp_path, CONFIGS["qwen3_moe"])
    options = ("--device", "cpu", "--dtype", "bfloat16")
    experts = 2 * 2 * 6 * 3 * 24 * 40  # bytes of two layers; the other one has an MLP
    assert json.loads(call("doctor", model, *options, "--json").out)["expert_bytes"] == experts
    assert "of these: 6 a layer, of which a token goes to 2\n" in call("doctor", model, *options).out


def test_a_quantised_checkpoint_takes_the_bytes_of_its_form(tmp_path: Path, call: Call, free_bytes: list[int]) -> None:
    options = ("--device", "cpu", "--dtype", "bfloat16", "--json")
    plain = json.loads(call("doctor", write_config(tmp_path, SMOLLM2), *options).out)
    quantisation = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "fuse": 1, "backend": "a"}
    model = write_config(tmp_path, SMOLLM2 | {"quantization_config": quantisation})
    report = json.loads(call("doctor", model, *options).out)
    matrices = plain["weight_bytes"] // 2 - 49152 * 576 - 61 * 576  # without the tied table and the norms
    saved = plain["weight_bytes"] - report["weight_bytes"]
    assert saved == 2 * matrices - matrices // 2 - 3 * matrices // 64  # 4 bits, and for each 64 a scale and a zero
    assert (plain["stored_as"], report["stored_as"]) == (None, "awq, 4 bits in groups of 64")
    assert report["keys"][1] == {
        "file": "quantization_config of config.json",
        "read": ["bits", "group_size", "quant_method", "version"],
        "inert": ["backend"],
        "unknown": ["fuse"],
    }
    assert "as the files hold them: awq, 4 bits in groups of 64\n" in call("doctor", model, "--device", "cpu").out
    out = call("doctor", model, "--device", "cpu", "--dtype", "float32").out
    assert "in float32; the files hold awq, 4 bits in groups of 64\n" in out


@pytest.mark.parametrize(
    ("stored", "named", "message"),
    [
        ("awq", "awq", None),
        ("awq", "awq_marlin", None),
        ("fp8", "fp8", None),  # not the rounding, which needs a GPU
        ("awq", "gptq", "quantization is 'gptq', and the files are awq; leave it out"),
        (None, "gguf", "quantization is 'gguf', and the files are not quantised; leave it out"),
    ],
)
def test_the_quantization_of_the_files_may_be_named(
    stored: str | None, named: str, message: str | None, tmp_path: Path, call: Call, free_bytes: list[int]
) -> None:
    more = {"awq": {"bits": 4, "group_size": 64}, "fp8": {"weight_block_size": [128, 128]}}
    config = {"quantization_config": more[stored] | {"quant_method": stored}} if stored else {}
    model = write_config(tmp_path, SMOLLM2 | config)
    done = call("doctor", model, "--device", "cpu", "--quantization", named, "--json")
    if message is None:
        assert done.out == call("doctor", model, "--device", "cpu", "--json").out
    else:
        assert done.code == 2 and message in done.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--gpu", "h20000"), 2, "no device 'h20000'; did you mean h200?"),
        (("--gpu", "5000gib"), 2, "no GPU '5000gib'; known: h200"),
        (("--gpu", "cpu"), 2, "gpu is cpu; pass --device cpu"),
        (("--gpu", "h200", "--device", "cpu"), 2, "remove one of them"),
        (("--device", "cpu", "--quantization", "fp8"), 2, "needs a GPU; use int8"),
        (("--gpu", "h200", "--kv-cache-dtype", "int8"), 2, "'int8' is not supported on cuda; use fp8"),
        (("--device", "cuda"), 2, "nvidia-smi finds no GPU"),
    ],
)
def test_contradictory_arguments_are_rejected(
    tmp_path: Path, call: Call, args: tuple[str, ...], code: int, message: str
) -> None:
    done = call("doctor", write_config(tmp_path), *args)
    assert done.code == code and message in done.err


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    report = examine(EngineArgs(model="smollm2"), "l4")
    assert report.spec.num_params == 134_515_008 and report.keys == () and not list(tmp_path.iterdir())
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        examine(EngineArgs(model="no-such-model"))
    done = call("doctor", str(tmp_path))
    assert done.code == 1 and "without config.json" in done.err


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    code = f"from octavo.cli.main import run\nassert run(['doctor', {write_config(tmp_path)!r}]) in (0, 1)"
    loaded = loaded_by(code)
    assert "octavo.doctor" in loaded and not {"torch", "transformers", "triton"} & loaded


def test_gpu_of_this_machine_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "NVIDIA H100, 80GB HBM3, 81559, 3000"\necho "another, 1, 1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    report: Report = examine(EngineArgs(model=write_config(tmp_path)))
    assert (report.machine.name, report.machine.device) == ("NVIDIA H100, 80GB HBM3", "cuda")
    assert (report.machine.device_bytes, report.machine.held_bytes) == (81559 << 20, 3000 << 20)
    assert report.machine.num_devices == 1
    gpus = "".join(f'echo "H100, 81559, {used}"\n' for used in (0, 9, 0))
    program.write_text(f'#!/bin/sh\n{gpus}echo "another, 81559, 0"\n')
    assert examine(EngineArgs(model=write_config(tmp_path))).machine.num_devices == 3
    program.write_text("#!/bin/sh\nexit 9\n")
    assert examine(EngineArgs(model=write_config(tmp_path))).machine.device == "cpu"
    with pytest.raises(ParameterError, match="nvidia-smi finds no GPU"):
        examine(EngineArgs(model=write_config(tmp_path), device="cuda"))
