"""Cost models: the work of a plan, and its time."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench.throughput import WORKLOADS
from octavo.cli.main import run
from octavo.config import EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.core.plan import BlockCopy, StepPlan, SwapIn, SwapOut
from octavo.errors import ModelNotFoundError, ParameterError, UsageError
from octavo.models.config import spec_from_config
from octavo.simulate.cost import LinearCost, RooflineCost, StepWork, step_work, work_in_window
from octavo.simulate.devices import DEVICES, find_device, name_of, this_cpu
from octavo.simulate.experiments.paper import OPT_13B, OPT_175B
from octavo.simulate.models import MODELS, ModelShape, find_model
from octavo.simulate.simulation import SimConfig, simulate
from octavo.simulate.traces import Arrival

HYBRID = ModelShape.of(
    "qwen3.5 8 layers",
    spec_from_config(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "num_hidden_layers": 8,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
        }
    ),
)


EXPERTS = ModelShape.of(
    "qwen3-moe 4 layers",
    spec_from_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 4,
            "hidden_size": 1024,
            "moe_intermediate_size": 512,
            "num_experts": 64,
            "num_experts_per_tok": 4,
            "num_attention_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
        }
    ),
)


TWO_SIZES = ModelShape.of(
    "gemma4 12 layers",
    spec_from_config(
        {
            "architectures": ["Gemma4ForCausalLM"],
            "num_hidden_layers": 12,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "global_head_dim": 128,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 16,
            "top_k_experts": 4,
            "moe_intermediate_size": 512,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        }
    ),
)


def plan_of(*slices: tuple[int, int, int], chunks: tuple[int, ...] = ()) -> StepPlan:
    """Slices are (start, positions, sampled); `chunks` are those with tokens from the host."""
    plan = StepPlan()
    for i, (start, count, sampled) in enumerate(slices):
        plan.rows.append(i)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.num_sampled.append(sampled)
    for i in chunks:
        plan.host_tokens[i] = array("i", [5] * slices[i][1])
    return plan


def reference_work(plan: StepPlan, window: int = 1 << 30) -> tuple[int, int]:
    """(query-key pairs of chunks, keys read for single queries), counted position by position."""
    pairs = reads = 0
    for i, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        keys = [range(max(0, end - window), end) for end in range(start + 1, start + count + 1)]
        if i in plan.host_tokens and count > 1:
            pairs += sum(map(len, keys))
            reads += len(set().union(*keys))
        else:
            reads += sum(map(len, keys))
    return pairs, reads


PLANS = {
    "decode": plan_of((10, 1, 1), (99, 1, 1)),
    "a first token again": plan_of((10, 1, 1), (99, 1, 1), chunks=(0,)),
    "prompt": plan_of((0, 50, 1), chunks=(0,)),
    "chunk": plan_of((64, 32, 0), chunks=(0,)),
    "both": plan_of((64, 32, 0), (7, 1, 1), (0, 9, 1), chunks=(0, 2)),
    "windows": plan_of((10, 8, 8), (99, 3, 3)),
    "windows and a chunk": plan_of((10, 8, 8), (64, 32, 1), chunks=(1,)),
}


@pytest.mark.parametrize("name", PLANS)
def test_work_matches_the_reference(name: str) -> None:
    plan = PLANS[name]
    work = step_work(plan)
    assert (work.chunk_pairs, work.kv_tokens) == reference_work(plan)
    assert work.num_new + work.num_decoding == plan.num_tokens and work.num_slices == len(plan.rows)
    assert work.num_passes == max(1, *plan.num_sampled)


@pytest.mark.parametrize("window", [1, 8, 33, 1000])
@pytest.mark.parametrize("name", PLANS)
def test_work_in_a_window_matches_the_reference(name: str, window: int) -> None:
    plan = PLANS[name]
    assert work_in_window(plan, window) == reference_work(plan, window)


def test_copies_and_swaps_are_counted() -> None:
    plan = plan_of()
    plan.copies, plan.swap_outs, plan.swap_ins = [BlockCopy(1, 2)], [SwapOut(3, 1), SwapOut(4, 2)], [SwapIn(5, 6)]
    assert step_work(plan) == StepWork(0, 0, 0, 1, 0, 0, 1, 3, 0)
    assert LinearCost(0, 0, 0, copy_s=1.0, move_s=10.0).step_s(plan) == 31.0


def test_linear_cost_is_the_sum_of_its_terms() -> None:
    plan = PLANS["both"]
    pairs, reads = reference_work(plan)
    cost = LinearCost(1.0, 1e-2, 1e-3, 1e-6, 1e-7)
    assert cost.step_s(plan) == pytest.approx(1 + 41e-2 + 1e-3 + pairs * 1e-6 + reads * 1e-7)
    assert cost.faster(4).step_s(plan) == pytest.approx(cost.step_s(plan) / 4)


def roofline(model: str, num_devices: int = 1) -> RooflineCost:
    own = MODELS[model].of_rank(num_devices)
    return RooflineCost(own, DEVICES["h200"], own.kv_cache(16), num_devices)


def test_decode_is_bandwidth_bound_and_prefill_compute_bound() -> None:
    model, device = MODELS["llama-3.1-8b"], DEVICES["h200"]
    cost = RooflineCost(model, device, model.kv_cache(16))
    weights_s = model.weight_bytes / (device.bandwidth * device.bandwidth_share)
    one, many = cost.step_s(plan_of((0, 1, 1))), cost.step_s(plan_of(*[(0, 1, 1)] * 64))
    assert weights_s < one < many < 1.2 * weights_s
    prompt = cost.step_s(plan_of((0, 8192, 1), chunks=(0,)))
    flops_s = 2 * model.num_params * 8192 / (device.flops * device.flops_share)
    assert flops_s < prompt < 1.3 * flops_s


def test_long_contexts_cost_reads_of_kv() -> None:
    model, device = MODELS["llama-3.1-8b"], DEVICES["h200"]
    cost = RooflineCost(model, device, model.kv_cache(16))
    more = cost.step_s(plan_of((100_000, 1, 1))) - cost.step_s(plan_of((0, 1, 1)))
    assert more == pytest.approx(100_000 * 131_072 / (device.bandwidth * device.bandwidth_share))


def test_layers_with_a_window_read_no_more_than_that() -> None:
    """Gemma 3 27B: 10 of 62 layers read all of a long context, the others 1,024 keys."""
    model, device = MODELS["gemma3-27b"], DEVICES["h200"]
    bandwidth = device.bandwidth * device.bandwidth_share
    cost = RooflineCost(model, device, model.kv_cache(16))
    more = cost.step_s(plan_of((100_000, 1, 1))) - cost.step_s(plan_of((0, 1, 1)))
    layer_bytes = 2 * 16 * 128 * 2
    assert more == pytest.approx((10 * 100_000 + 52 * 1023) * layer_bytes / bandwidth)
    prompt = plan_of((0, 8192, 1), chunks=(0,))
    alike = replace(model, windows=())
    saved = RooflineCost(alike, device, alike.kv_cache(16)).step_s(prompt) - cost.step_s(prompt)
    pairs = 8192 * 8193 // 2 - (1024 * 1025 // 2 + (8192 - 1024) * 1024)
    compute_s = pairs * 4 * 32 * 128 / (device.flops * device.flops_share)
    assert saved == pytest.approx(52 * (compute_s + (8192 - 8192) * layer_bytes / bandwidth))


@pytest.mark.parametrize(("dtype", "scale"), [("", 0), ("int8", 2)])
def test_layers_of_two_sizes_read_their_own_heads(dtype: str, scale: int) -> None:
    """Two layers have 2 K/V heads of 128 and no window, ten 4 of 64 and one of 1024. All have 8 query heads."""
    device, spec, itemsize = DEVICES["h200"], TWO_SIZES.spec, 1 if scale else 2
    assert spec is not None
    for max_len in (0, 32_768):
        kv = TWO_SIZES.kv_cache(16, max_len, dtype)
        assert kv == KVCacheSpec.of(spec, 16, dtype or "bfloat16", max_len=max_len) and kv.full == (2, 2, 128)
        assert bool(kv.windows) == bool(max_len)
        cost, bandwidth = RooflineCost(TWO_SIZES, device, kv), device.bandwidth * device.bandwidth_share
        more = cost.step_s(plan_of((100_000, 1, 1))) - cost.step_s(plan_of((0, 1, 1)))
        full, own = (2 * heads * (size + scale) * itemsize for heads, size in ((2, 128), (4, 64)))
        assert more == pytest.approx((2 * 100_000 * full + 10 * 1023 * own) / bandwidth)
    wider = replace(TWO_SIZES, full_heads=(1, 256))
    prompt = plan_of((0, 8192, 1), chunks=(0,))
    times = [RooflineCost(model, device, kv).step_s(prompt) for model in (wider, TWO_SIZES)]
    pairs = 8192 * 8193 // 2
    assert times[0] - times[1] == pytest.approx(2 * pairs * 4 * 8 * (256 - 128) / (device.flops * device.flops_share))


def test_experts_beside_an_mlp_are_read_by_their_tokens() -> None:
    of_experts = 12 * 16 * 3 * 512 * 1024
    assert TWO_SIZES.num_expert_params == of_experts
    read = [TWO_SIZES.bytes_per_pass("cuda", num_tokens) for num_tokens in (1, 2)]
    assert read[1] - read[0] == pytest.approx(2 * of_experts * (3 / 4) * (1 / 4), rel=1e-4)


def test_decode_window_pays_for_each_pass() -> None:
    cost = roofline("llama-3.1-8b")
    window = cost.step_s(plan_of((10, 8, 8), (20, 8, 8)))
    singly = sum(cost.step_s(plan_of((10 + j, 1, 1), (20 + j, 1, 1))) for j in range(8))
    assert window == pytest.approx(singly, rel=1e-6)


def test_tensor_parallelism_halves_work_and_adds_all_reduces() -> None:
    plan = PLANS["decode"]
    one, two = (roofline("llama-3.1-70b", n).step_s(plan) for n in (1, 2))
    assert one / 2 < two < one
    small, divided = (roofline("qwen2.5-0.5b", n).step_s(plan) for n in (1, 2))
    assert divided > small, "a small model is not worth two"


def test_collectives_send_most_data() -> None:
    """A ring of n devices sends 2 (n - 1) / n of [tokens, hidden] in two all-reduces a layer and one for the embedding,
    and n - 1 winners of 12 bytes a row."""
    model, device = MODELS["llama-3.1-8b"], DEVICES["h200"]
    for n in (2, 4):
        each = 2 * (n - 1) / n * 1000 * 4096 * 2 / device.peer_link + device.peer_s
        gather = (n - 1) * 10 * 12 / device.peer_link + device.peer_s
        own = model.of_rank(n)
        cost = RooflineCost(own, device, own.kv_cache(16), n)
        assert cost._collectives_s(1000, 10) == pytest.approx(65 * each + gather)
    assert RooflineCost(model, device, model.kv_cache(16))._collectives_s(1000, 10) == 0


def test_a_rank_reads_its_own_heads() -> None:
    """Qwen2.5 7B has 4 K/V heads: of 4 ranks each has one, and of a model with 2 such heads each has one, too."""
    device, shared = DEVICES["h200"], replace(MODELS["qwen2.5-7b"], num_kv_heads=2, spec=None)
    bandwidth = device.bandwidth * device.bandwidth_share
    for model, size in ((MODELS["qwen2.5-7b"], 4), (shared, 4), (shared, 2)):
        own = model.of_rank(size)
        cost = RooflineCost(own, device, own.kv_cache(16), size)
        assert cost.kv.num_kv_heads == 1
        more = cost.step_s(plan_of((100_000, 1, 1))) - cost.step_s(plan_of((0, 1, 1)))
        assert more == pytest.approx(100_000 * 28 * 2 * 128 * 2 / bandwidth)


@pytest.mark.parametrize("model", [*MODELS.values(), TWO_SIZES], ids=lambda model: model.name)
def test_sizes_of_a_rank_are_those_of_its_spec(model: ModelShape) -> None:
    assert model.spec is not None and model.of_rank(1) is model
    for size in (2, 3, 4, 8):
        try:
            spec = model.spec.of_rank(size)
        except ParameterError as error:
            with pytest.raises(ParameterError, match=re.escape(str(error))):
                model.of_rank(size)
            continue
        own, apart = model.of_rank(size), replace(model, spec=None).of_rank(size)
        assert own.num_params == spec.num_params and own.spec == spec
        assert own.kv_cache(16) == KVCacheSpec.of(spec, 16, "bfloat16")
        assert apart.num_params == pytest.approx(own.num_params, rel=0.07)  # without norms, padding, copied heads
        assert apart.kv_cache(16).bytes_per_token == own.kv_cache(16).bytes_per_token
    with pytest.raises(ParameterError, match="does not divide the model's 72 attention heads"):
        replace(MODELS["opt-66b"], spec=None).of_rank(7)


def test_swaps_use_the_host_link() -> None:
    model, device = MODELS["opt-13b"], DEVICES["a100-40"]
    cost = RooflineCost(model, device, model.kv_cache(16))
    plan = plan_of((0, 1, 1))
    before = cost.step_s(plan)
    plan.swap_outs = [SwapOut(1, 1)]
    assert cost.step_s(plan) - before == pytest.approx(cost.move_s) == pytest.approx(16 * 819_200 / 22e9, rel=0.02)


def test_calibration_is_saved_as_json(tmp_path: Path) -> None:
    cost, path = LinearCost(1e-3, 2e-6, 3e-6, kv_s=4e-9), tmp_path / "c.json"
    cost.save(path, machine="mine")
    assert LinearCost.load(path) == cost and json.loads(path.read_text())["machine"] == "mine"


def test_cost_of_another_model_or_device_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, path = LinearCost(1e-3, 2e-6, 3e-6), tmp_path / "c.json"
    cost.save(path, model="smollm2", device="l4")
    assert LinearCost.load_for(path, "smollm2-135m", "l4") == cost
    line = ["simulate", "--requests", "5", "--cost", str(path)]
    assert run([*line, "--model", "smollm2-135m-instruct", "--gpu", "l4"]) == 0
    assert f"assumed        l4: step times of {path}" in capsys.readouterr().out
    for other in (["--model", "qwen3-0.6b", "--gpu", "l4"], ["--model", "smollm2", "--gpu", "h200"]):
        assert run([*line, *other]) == 2
        error = capsys.readouterr().err
        assert f"{path} was measured with smollm2 on l4, not with " in error and " on " + other[3] in error
        assert run([*line, *other, "--allow-mismatched-cost"]) == 0
        capsys.readouterr()
    cost.save(path, model="/models/mine", device="h200")
    assert LinearCost.load_for(path, "mine", "h200") == cost


def test_drivers_names_are_known_devices() -> None:
    names = {
        "h200": ("NVIDIA H200", 143_771), "h100": ("NVIDIA H100 80GB HBM3", 81_559),
        "a100-80": ("NVIDIA A100-SXM4-80GB", 81_920), "a100-40": ("NVIDIA A100-SXM4-40GB", 40_960),
        "l4": ("NVIDIA L4", 23_034), "l40s": ("NVIDIA L40S", 46_068), "a10g": ("NVIDIA A10G", 23_028),
        "rtx4090": ("NVIDIA GeForce RTX 4090", 24_564), "Tesla T4": ("Tesla T4", 15_360),
    }  # fmt: skip
    assert {name: name_of(driver, mib << 20) for name, (driver, mib) in names.items()} == {n: n for n in names}


@pytest.mark.parametrize("text", ["", "[]", '{"cost": {}}', '{"cost": {"pass_s": -1, "new_s": 0, "decode_s": 0}}',
                                  '{"cost": {"pass_s": 1, "new_s": 0, "decode_s": 0, "x": 1}}',
                                  '{"cost": {"pass_s": "1", "new_s": 0, "decode_s": 0}}'])  # fmt: skip
def test_invalid_calibration_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match="is not a calibration; run `octavo calibrate"):
        LinearCost.load(tmp_path / "c.json")


def test_devices_and_models_are_found_by_name() -> None:
    assert find_device("H200") is DEVICES["h200"] and find_model("OPT-13B") is MODELS["opt-13b"]
    with pytest.raises(ParameterError, match="did you mean h200"):
        find_device("h20")
    with pytest.raises(ModelNotFoundError, match="did you mean opt-13b"):
        find_model("opt-13")


def test_this_cpu_is_a_device() -> None:
    device = this_cpu()
    assert device.bandwidth > 1e8 and device.flops > 1e8 and device.memory_bytes > 1e8


def test_paper_models_match_table_1() -> None:
    """Table 1 and section 6.1: 26 GB of weights, 800 KB per token, 1.6 GB for 2,048 tokens."""
    model = OPT_13B.model
    assert model.weight_bytes == 26e9 and model.kv_cache(16).bytes_per_token == 819_200
    assert OPT_175B.model.weight_bytes == 346e9


def test_model_shape_from_config_json(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = MODELS["llama-3.1-8b"]
    for path in (tmp_path, tmp_path / "config.json"):
        shape = find_model(str(path))
        assert shape.num_params == pytest.approx(known.num_params, rel=0.001)
        assert shape.kv_cache(16) == known.kv_cache(16) and shape.max_len == 131072


# -- agreement with measurements ---------------------------------------------------------------------------------------

MEASURED_MODELS = {"Qwen2.5-0.5B": "qwen2.5-0.5b", "Qwen3-0.6B": "qwen3-0.6b", "Llama-3.1-8B": "llama-3.1-8b"}
GPU_ENGINE = Path(__file__).parents[2] / "docs" / "gpu-engine.md"


def measured() -> dict[str, dict[str, float]]:
    """The first table of docs/gpu-engine.md: model -> case -> Octavo's milliseconds, or tokens/s."""
    lines = GPU_ENGINE.read_text().split("## Speed, compared with vLLM")[1].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| |"))
    names = [cell.strip() for cell in lines[begin].split("|")]
    times: dict[str, dict[str, float]] = {model: {} for model in MEASURED_MODELS}
    for line in lines[begin + 2 :]:
        cells = [cell.strip() for cell in line.split("|")]
        if not line.startswith("|"):
            break
        for name in MEASURED_MODELS:
            if (cell := cells[names.index(name)].removesuffix(" ms").replace(",", "")).replace(".", "").isdigit():
                times[name][cells[1]] = float(cell)
    return times


def simulated_ms(model: str, batch: int, num_prompt: int, num_output: int = 1) -> float:
    args = EngineArgs(model=model, max_model_len=4096, num_gpu_blocks_override=60_000)
    arrivals = [Arrival(0.0, ((10 + i, num_prompt),), num_output) for i in range(batch)]
    records = simulate(SimConfig(MODELS[model], DEVICES["h200"], args), arrivals, interval_s=1e9)
    return float(records.column("finished_s").max()) * 1e3


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.1-8B"])
def test_simulated_h200_is_within_10_percent_of_the_measured_one(name: str) -> None:
    model, rows = MEASURED_MODELS[name], measured()[name]
    found = {}
    for batch, case in ((1, "first token, 1 x 1,024"), (32, "32 x 1,024 tokens"), (256, "256 x 1,024 tokens")):
        found[case] = first_ms = simulated_ms(model, batch, 1024)
        found[f"per token, batch {batch}"] = (simulated_ms(model, batch, 1024, 129) - first_ms) / 128
    assert found == {case: pytest.approx(rows[case], rel=0.1) for case in found}


def test_simulated_h200_is_within_15_percent_for_the_smallest_model() -> None:
    """No row of it was dropped for being off."""
    rows = measured()["Qwen2.5-0.5B"]
    for batch, case in ((1, "first token, 1 x 1,024"), (256, "256 x 1,024 tokens")):
        assert simulated_ms("qwen2.5-0.5b", batch, 1024) == pytest.approx(rows[case], rel=0.15)


@pytest.mark.parametrize("name", MEASURED_MODELS)
@pytest.mark.parametrize(
    ("workload", "case"),
    [
        ("mixed256", "mixed256, T = 0.6, output tokens/s"),
        ("mixed256_greedy", "mixed256, greedy, output tokens/s"),
        ("uniform256", "uniform256, output tokens/s"),
    ],
)
def test_throughput_that_was_not_fitted_is_within_10_percent(name: str, workload: str, case: str) -> None:
    prompts, lengths = WORKLOADS[workload].make(1000)
    args = EngineArgs(model=name, max_model_len=4096)
    arrivals = [Arrival(0.0, ((10 + i, len(p)),), n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
    records = simulate(SimConfig(MODELS[MEASURED_MODELS[name]], DEVICES["h200"], args), arrivals, interval_s=1e9)
    rate = sum(lengths) / float(records.column("finished_s").max())
    assert rate == pytest.approx(measured()[name][case], rel=0.1)


def test_states_cost_a_read_and_a_write() -> None:
    """By the roofline, as many bytes as states have more are read and written for each of 8 decode tokens."""
    alike, device = replace(HYBRID, state_size=0), DEVICES["h100"]
    step = plan_of(*[(100, 1, 1)] * 8)
    times = [RooflineCost(shape, device, shape.kv_cache(16)).step_s(step) for shape in (HYBRID, alike)]
    moved_s = 8 * 2 * 4 * HYBRID.state_size / (device.bandwidth * device.bandwidth_share)
    assert times[0] - times[1] == pytest.approx(moved_s, rel=0.1)


def test_a_pass_reads_the_experts_that_its_tokens_go_to() -> None:
    of_experts = 2 * 4 * 64 * 3 * 512 * 1024  # bytes
    rest = EXPERTS.weight_bytes - of_experts - 2 * 32000 * 1024
    for num_tokens, share in ((1, 4 / 64), (2, 1 - (60 / 64) ** 2), (1000, 1.0)):
        assert EXPERTS.bytes_per_pass("cuda", num_tokens) == pytest.approx(rest + share * of_experts)
    whole = EXPERTS.num_params - 2 * 32000 * 1024
    assert EXPERTS.num_layer_params == whole - of_experts / 2 * 60 / 64


def test_a_pass_of_one_token_costs_less_with_experts() -> None:
    dense, device = replace(EXPERTS, num_expert_params=0), DEVICES["h100"]
    one, two = (
        [RooflineCost(shape, device, shape.kv_cache(16)).step_s(plan_of(*((10, 1, 1),) * n)) for n in (1, 2)]
        for shape in (EXPERTS, dense)
    )
    assert one[0] < 0.4 * two[0]
    assert one[1] - one[0] > two[1] - two[0]  # a second token reads other experts
