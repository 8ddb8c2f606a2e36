"""The simulation loop: a trace through real engines on virtual clocks, and its report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.doctor import examine
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.runner.memory.needs import Machine, memory_needs
from octavo.simulate import report, traces
from octavo.simulate.cost import LinearCost
from octavo.simulate.devices import DEVICES, find_device
from octavo.simulate.executor import SimulatedExecutor
from octavo.simulate.models import MODELS
from octavo.simulate.plot import Area, Bars, Chart, Line, svg
from octavo.simulate.report import SLO
from octavo.simulate.simulation import MAX_POOL_SAMPLES, Records, SimConfig, paged, simulate
from octavo.simulate.traces import FIRST_TOKEN, Arrival
from tests.simulate.test_cost import HYBRID

STEP_S = 0.5
STATE = {"recurrent_layers": tuple(range(30)), "state_size": 3 * 10 * 2 * 40 * 128 * 4 // 2}
"""Of opt-13b with 10 layers that have K and V: three blocks of 4 tokens, in numbers of float32."""


def config(**options: Any) -> SimConfig:
    """A machine on which every step takes half a second."""
    cost = options.pop("cost", LinearCost(STEP_S, 0.0, 0.0))
    replicas = options.pop("replicas", 1)
    defaults = {"block_size": 4, "num_gpu_blocks_override": 64, "decode_window": 1, "async_scheduling": False}
    args = EngineArgs(model="tiny", **(defaults | options))
    return SimConfig(MODELS["opt-13b"], DEVICES["a100-40"], args, num_replicas=replicas, cost=cost)


def arrivals(*requests: tuple[float, int, int]) -> Iterator[Arrival]:
    for i, (time_s, num_prompt, num_output) in enumerate(requests):
        yield Arrival(time_s, ((FIRST_TOKEN + i, num_prompt),), num_output)


def test_request_times_are_step_times() -> None:
    """One prompt, three tokens: steps end at 10.5, 11 and 11.5. A second request arrives during a step."""
    records = simulate(config(), arrivals((10.0, 5, 3), (10.7, 5, 1)))
    by_index = np.argsort(records.column("index"))
    assert records.column("arrived_s")[by_index].tolist() == [10.0, 10.7]
    assert records.column("first_s")[by_index].tolist() == [10.5, 11.5]
    assert records.column("finished_s")[by_index].tolist() == [11.5, 11.5]
    assert records.num_steps == 3 and records.busy_s == 1.5 and records.end_s == 11.5
    assert report.ttft(records)[by_index].tolist() == pytest.approx([0.5, 0.8])
    assert report.tpot(records)[by_index].tolist() == pytest.approx([0.5, 0.0])
    assert report.normalized_latency(records) == pytest.approx((1.5 / 3 + 0.8) / 2)
    records.num_output[by_index[1]] = 0  # as for a beam search in a recording
    assert report.normalized_latency(records) == pytest.approx(1.5 / 3)
    records.num_output[by_index[0]] = 0
    stats = report.summary(records)
    assert "normalized_latency_s" not in stats and "normalised" not in "\n".join(report.format_summary(stats))
    assert json.loads(json.dumps(stats, allow_nan=False))["num_requests"] == 2


def test_async_scheduling_hides_host_time() -> None:
    cost = LinearCost(STEP_S, 0.0, 0.0, host_s=0.1)
    ends = [
        simulate(config(cost=cost, async_scheduling=overlap), arrivals((0.0, 5, 20))).end_s for overlap in (True, False)
    ]
    assert ends[0] == pytest.approx(20 * STEP_S + 0.1)
    assert ends[1] == pytest.approx(20 * (STEP_S + 0.1))


def test_decode_windows_take_fewer_steps_and_equal_device_time() -> None:
    single, window = (simulate(config(decode_window=n), arrivals((0.0, 5, 33))) for n in (1, 8))
    assert (single.num_steps, window.num_steps) == (33, 5)
    assert single.busy_s == window.busy_s == 33 * STEP_S


@pytest.mark.parametrize(("pass_s", "num_steps"), [(0.5, 33), (6e-4, 17), (1e-5, 9)])
def test_decode_windows_are_as_short_as_the_device_is_slow(pass_s: float, num_steps: int) -> None:
    """As those of the engine: 1, 2 and 4 passes."""
    cost = LinearCost(pass_s, 0.0, 0.0)
    assert simulate(config(cost=cost, decode_window=None), arrivals((0.0, 5, 33))).num_steps == num_steps


def test_shared_prefix_hits_the_cache() -> None:
    requests = [Arrival(float(i), ((FIRST_TOKEN, 40), (FIRST_TOKEN + 1 + i, 3)), 2) for i in range(3)]
    records = simulate(config(), requests)
    assert records.column("num_cached").tolist() == [0, 40, 40]
    assert report.summary(records)["hit_rate"] == pytest.approx(80 / 129)
    off = simulate(config(enable_prefix_caching=False), requests)
    assert off.column("num_cached").tolist() == [0, 0, 0]


def test_next_chat_round_hits_the_cached_output() -> None:
    chat = traces.chat(traces.Lengths("c", np.full(4, 6), np.full(4, 6)), [0.0, 50.0, 100.0, 150.0], new_chance=0.0)
    records = simulate(config(), chat)
    assert records.column("num_prompt").tolist() == [6, 18, 30, 42]
    assert records.column("num_cached").tolist() == [
        0,
        8,
        20,
        32,
    ]  # full blocks of 4


def test_small_pool_preempts_and_reports_why() -> None:
    records = simulate(config(num_gpu_blocks_override=10, preemption_mode="recompute"), arrivals(*[(0.0, 8, 20)] * 3))
    stats = report.summary(records)
    assert stats["num_preempted"]["recompute"] > 0 and stats["num_waits"]["blocks"] > 0
    assert stats["num_requests"] == 3 and stats["num_unfinished"] == 0
    assert any("preempted" in line and "recompute" in line for line in report.format_summary(stats))


def test_impossible_requests_are_refused_and_counted() -> None:
    records = simulate(config(), arrivals((0.0, 5, 3), (1.0, 3000, 3), (2.0, 5, 1000)))
    assert len(records) == 1
    stats = report.summary(records)
    assert {kind: r["count"] for kind, r in stats["refused"].items()} == {"ContextLengthError": 1, "CapacityError": 1}
    assert "refused 1: " in "\n".join(report.format_summary(stats))


def test_simulation_ends_at_until_s() -> None:
    records = simulate(config(), arrivals(*[(float(i), 5, 8) for i in range(20)]), until_s=10.0)
    assert 10.0 <= records.end_s <= 10.0 + STEP_S and 0 < len(records) < 20 and records.num_unfinished > 0


def test_router_picks_the_replica_with_the_fewest_requests() -> None:
    """Four requests at once, one row per replica: four replicas run them concurrently, one runs them in turn."""
    one, four = (simulate(config(max_num_seqs=1, replicas=n), arrivals(*[(1.0, 5, 4)] * 4)) for n in (1, 4))
    assert four.column("finished_s").tolist() == [3.0] * 4
    assert one.column("finished_s").tolist() == [3.0, 5.0, 7.0, 9.0]


def test_pool_samples_are_thinned_out() -> None:
    records = simulate(config(), arrivals(*[(0.0, 4, 120)] * 40), interval_s=0.001)
    assert 100 < len(records.samples) <= MAX_POOL_SAMPLES
    long = simulate(
        config(cost=LinearCost(1.0, 0, 0)), arrivals(*[(i * 100.0, 4, 100) for i in range(30)]), interval_s=0.001
    )
    assert MAX_POOL_SAMPLES / 3 < len(long.samples) <= MAX_POOL_SAMPLES
    gaps = np.diff([s.time_s for s in long.samples])
    halves = [float(np.median(half)) for half in np.array_split(gaps, 2)]
    assert 0.4 <= halves[0] / halves[1] <= 2.5, "old times are looked at about as closely"
    for sample in long.samples:
        assert sum(sample.split) == 64 * 4


def test_num_blocks_follows_the_memory_budget() -> None:
    model, device = MODELS["llama-3.1-8b"], DEVICES["h200"]
    config = SimConfig(model, device, EngineArgs(model="x", gpu_memory_utilization=0.5))
    assert config.num_blocks() == 26_697  # of 69.9 GiB, 14.96 of weights and 2.8 of activations, graphs and CUDA
    assert config.num_host_blocks() == (4 << 30) // (131_072 * 16)
    with pytest.raises(MemoryBudgetError, match=r"of h200's 139\.80 GiB may be used; weights take 131\.42 GiB"):
        SimConfig(MODELS["llama-3.1-70b"], device, EngineArgs(model="x")).num_blocks()
    args = EngineArgs(model="llama-3.1-70b", tensor_parallel_size=2)
    budget = examine(args, "h200").budget
    assert budget is not None and budget.num_blocks > 10_000
    shared = SimConfig(MODELS["llama-3.1-70b"], device, EngineArgs(model="x"), num_devices=2)
    assert (shared.num_blocks(), shared.kv) == (budget.num_blocks, budget.kv)


@pytest.mark.parametrize("name", ["gemma3-27b", "gemma3-270m", "qwen3-8b"])
def test_layers_are_grouped_as_in_the_engine(name: str) -> None:
    model, args = MODELS[name], EngineArgs(model="x").resolved("cuda")
    assert model.spec is not None
    config = SimConfig(model, DEVICES["h200"], args)
    need = memory_needs(args, model.spec, Machine("h200", 1 << 40, 1 << 37))
    assert config.kv == need.kv
    cache = paged(config, 100, 10)
    assert (cache.windows, cache.max_chunk if need.kv.windows else 0) == (need.kv.windows, need.kv.max_chunk)


def test_states_take_the_blocks_that_they_take_in_the_engine() -> None:
    """Two of eight layers have K and V: 2 KiB a token of each, bfloat16. The others have states of float32."""
    args = EngineArgs(model="x", mamba_block_size=512, num_gpu_blocks_override=9).resolved("cpu")
    assert HYBRID.spec is not None and HYBRID.num_layers_by_window == {0: 2}
    simulated = SimConfig(HYBRID, find_device("cpu"), args)
    need = memory_needs(args, HYBRID.spec, Machine("cpu", 1 << 40, None))
    assert replace(simulated.kv, dtype=need.kv.dtype) == need.kv
    assert simulated.kv.bytes_per_block == 2 * 2048 * args.block_size
    cache = paged(simulated, 1000, 10)
    assert cache.state_blocks == simulated.kv.state_blocks == -(-4 * HYBRID.state_size // (4096 * args.block_size)) > 10
    assert (cache.num_groups, cache.checkpoint_interval) == (1, 512)


def test_int8_blocks_are_as_large_as_the_engines() -> None:
    model, args = MODELS["smollm2-135m"], EngineArgs(model="x", kv_cache_dtype="int8").resolved("cpu")
    both = (args, replace(args, kv_cache_dtype="auto"))
    simulated, usual = (SimConfig(model, find_device("cpu"), each).kv for each in both)
    assert model.spec is not None
    assert simulated == memory_needs(args, model.spec, Machine("cpu", 1 << 40, None)).kv
    assert simulated.bytes_per_block * 128 == usual.bytes_per_block * 66


def test_requests_with_states_hit_checkpoints_at_their_marks() -> None:
    """Five prompts begin with the same 64 tokens, which is where the first leaves a state for all others."""
    prompts = [((FIRST_TOKEN, 64), (FIRST_TOKEN + 1 + i, 40)) for i in range(5)]
    found = []
    for marks in ((64,), ()):
        server = replace(config(num_gpu_blocks_override=400), model=replace(MODELS["opt-13b"], **STATE))
        assert paged(server, 400, 0).state_blocks == 3
        requests = [Arrival(100.0 * i, runs, 4, marks=marks) for i, runs in enumerate(prompts)]
        found.append(simulate(server, requests).column("num_cached").tolist())
    assert found == [[0, 64, 64, 64, 64], [0, 0, 0, 0, 0]]


def test_layers_that_all_slide_drop_blocks() -> None:
    """A sequence of 200 tokens with a window of 16 ends with 4 or 5 blocks of 4."""
    of_window = replace(config(), model=replace(MODELS["opt-13b"], windows=(16,) * 40))
    used = [simulate(each, arrivals((0.0, 100, 100))).samples[-1].num_used for each in (config(), of_window)]
    assert used[0] == 50 and used[1] <= 6


def test_window_groups_let_five_times_the_requests_run_at_once() -> None:
    """Gemma 3 27B at 32k tokens, in the bytes of five requests whose layers are one group."""
    model, most = MODELS["gemma3-27b"], []
    num_bytes = (5 * 2048 + 1) * 62 * 16 * 2 * 16 * 128 * 2
    for shape in (replace(model, windows=(), spec=None), model):
        blocks = {"num_gpu_blocks_override": shape.kv_cache(16, 32768).num_blocks(num_bytes), "max_model_len": 32768}
        args = EngineArgs(model="x", **blocks, max_num_seqs=256, enable_prefix_caching=False)
        server = SimConfig(shape, DEVICES["h200"], args, cost=LinearCost(STEP_S, 0.0, 0.0))
        records = simulate(server, arrivals(*[(0.0, 32_000, 768)] * 40))
        most.append(max(sample.num_running for sample in records.samples))
        assert len(records) == 40 and not records.num_preempted
    assert most == [5, 26]


def test_simulation_is_deterministic() -> None:
    def run() -> Records:
        lengths = traces.sharegpt_like(60)
        return simulate(config(num_gpu_blocks_override=600), traces.from_lengths(lengths, traces.poisson(0.4)))

    one, two = run(), run()
    assert one.finished_s == two.finished_s and one.num_steps == two.num_steps and len(one) == 60


def test_samples_fork_and_share_blocks() -> None:
    records = simulate(config(), [Arrival(0.0, ((FIRST_TOKEN, 10),), 5, n=3)], interval_s=0.1)
    assert records.column("num_output").tolist() == [15] and records.column("longest").tolist() == [5]
    assert report.tpot(records).tolist() == pytest.approx([STEP_S]), "a step gives each of them a token"
    # Each sibling saves the prompt's two full blocks, and its last block until it writes there.
    assert [saved for saved, _ in itertools.groupby(s.num_saved for s in records.samples)] == [6, 4, 0]


def test_steps_run_one_after_another() -> None:
    from octavo.core.plan import StepPlan
    from octavo.simulate.clock import VirtualClock

    clock = VirtualClock()
    executor = SimulatedExecutor(LinearCost(1.0, 0, 0), clock, num_blocks=1)
    a, b = executor.submit(StepPlan()), executor.submit(StepPlan(1))
    assert (a.done_s, b.done_s, clock()) == (1.0, 2.0, 0.0) and not a.done
    assert a.poll(0.25) is None and clock() == 0.25
    b.result()
    assert clock() == 2.0 and a.done and b.done
    clock.advance_to(1.0)
    assert clock() == 2.0


# -- report ------------------------------------------------------------------------------------------------------------


def test_goodput_counts_requests_within_the_slo() -> None:
    records = simulate(config(), arrivals((10.0, 5, 3), (10.7, 5, 1)))
    assert SLO(0.6, 0.6).kept(records).sum() == 1 and SLO(None, 0.6).kept(records).all()
    assert SLO(None, 0.4).kept(records).sum() == 1  # the request with a single token
    assert not SLO(0.4).kept(records).any()
    stats = report.summary(records, SLO(0.6))
    assert stats["slo_kept"] == 0.5 and stats["goodput_requests_per_s"] == pytest.approx(1 / 1.5)
    assert any(line.startswith("good ") and "50.0%" in line for line in report.format_summary(stats))
    json.dumps(stats)


@pytest.mark.parametrize(
    ("text", "slo"),
    [("ttft=500ms,tpot=50ms", SLO(0.5, 0.05)), ("ttft=2s", SLO(2.0)), (" tpot=0.1s ", SLO(None, 0.1))],
)
def test_slo_is_parsed(text: str, slo: SLO) -> None:
    assert SLO.parse(text) == slo


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "ttft",
            "ttft=x",
            "ttft=-1s",
            "latency=1s",
            "ttft=inf",
            "ttft=nan",
            "ttft=0s",
            "ttft=1s,ttft=2s",
            "ttft=1m",
            "ttft=1us",
            "ttft=1ss",
            "ttft=1e3ms",
        ),
        *("ttft=1_0s", "ttft=s", "ttft=1s,", "ttft=" + "9" * 400 + "s"),
    ],
)
def test_invalid_slo_is_rejected(text: str) -> None:
    with pytest.raises(ParameterError, match="pass times with units, s or ms, such as ttft=500ms"):
        SLO.parse(text)


@pytest.mark.parametrize("number", ["0", "500", "0.5"])
def test_slo_without_a_unit_names_both(number: str) -> None:
    for text in (f"tpot={number}", f"ttft=1s,tpot={number}"):
        with pytest.raises(ParameterError, match=f"tpot needs a unit: tpot={number}ms or tpot={number}s"):
            SLO.parse(text)


def test_summary_without_finished_requests() -> None:
    stats = report.summary(simulate(config(), arrivals((0.0, 3000, 3))))
    assert stats["num_requests"] == 0 and report.format_summary(stats)[0] == "no request finished"


def test_charts_are_svg() -> None:
    records = simulate(config(), arrivals(*[(float(i), 5, 8) for i in range(20)]), interval_s=1.0)
    charts = report.summary_charts(records)
    root = ElementTree.fromstring(svg(charts))
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Memory", "Requests", "running", "tokens", "first token"} <= set(texts)
    polygons = list(root.iter("{http://www.w3.org/2000/svg}polygon"))
    assert len(polygons) >= 2


def test_chart_marks_are_at_their_values() -> None:
    """The axis ends at `top`; twice the value is twice as high, and larger values are cut off."""
    chart = Chart("a < b", "x", "y", lines=[Line("one", [0, 5, 10], [0.0, 0.5, 9.0])], top=1.0)
    root = ElementTree.fromstring(svg([chart]))
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11) and y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    bars = Chart("b", "", "%", bars=[Bars("p", [30.0]), Bars("q", [60.0])], labels=["only"], stacked=True, top=100)
    rects = [
        (float(r.get("y", 0)), float(r.get("height", 0)))
        for r in ElementTree.fromstring(svg([bars])).iter("{http://www.w3.org/2000/svg}rect")
        if r.get("height") != "10"
    ]
    assert rects[1][1] == pytest.approx(2 * rects[0][1], abs=0.2)
    assert rects[1][0] + rects[1][1] == pytest.approx(rects[0][0], abs=0.2)  # stacked
    areas = Chart("c", "x", "y", xs=[1, 10, 100], areas=[Area("z", [1, 2, 3])], log_x=True)
    (polygon,) = ElementTree.fromstring(svg([areas])).iter("{http://www.w3.org/2000/svg}polygon")
    xs = [float(p.split(",")[0]) for p in polygon.get("points", "").split()[:3]]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
