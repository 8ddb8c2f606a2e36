"""/metrics and the log, after known requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import SamplingParams
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.engine.executor import RankPlace
from octavo.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.engine.stats import EngineStats, Health, StatsSnapshot, sum_stats
from octavo.log_setup import JsonFormatter
from octavo.serve.metrics import (
    ITL_BUCKETS,
    LATENCY_BUCKETS,
    STEP_TOKEN_BUCKETS,
    TTFT_BUCKETS,
    EngineState,
    Metrics,
    StatsLogger,
    token_buckets,
)
from tests.engine.process.engines import last_of, oracle_client
from tests.serve.in_process_server import serving


def values_of(text: str) -> dict[str, float]:
    """All series, by name and labels, without the common labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            found[name] = float(value)
    return found


async def test_metrics_after_known_requests(model: str) -> None:
    async with serving(model) as server:
        for _ in range(2):
            await server.complete("Hello,world", n=2)
        await server.post("/v1/completions", prompt="")
        await server.post("/v1/completions", prompt="Hi", temperature=-1)
        response = await server.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        got = values_of(response.text)
        expected = {
            "vllm:prompt_tokens_total": 22,
            "vllm:prompt_tokens_cached_total": 8,
            'vllm:prompt_tokens_by_source_total{source="local_compute"}': 14,
            'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': 8,
            'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': 0,
            "vllm:generation_tokens_total": 32,
            'vllm:request_success_total{finished_reason="length"}': 2,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            'vllm:num_requests_waiting_by_reason{reason="capacity"}': 0,
            'vllm:num_requests_waiting_by_reason{reason="deferred"}': 0,
            "vllm:kv_cache_usage_perc": 0,
            "vllm:prefix_cache_queries_total": 22,
            "vllm:prefix_cache_hits_total": 8,
            "vllm:num_preemptions_total": 0,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": 28,
            "vllm:request_queue_time_seconds_count": 2,
            "vllm:request_prompt_tokens_sum": 22,
            "vllm:request_generation_tokens_sum": 32,
            "vllm:request_params_n_sum": 4,
            "vllm:request_params_max_tokens_sum": 16,
            "vllm:request_prefill_kv_computed_tokens_sum": 14,
            'http_requests_total{handler="/v1/completions",method="POST",status="200"}': 2,
            'http_requests_total{handler="/v1/completions",method="POST",status="400"}': 2,
            'octavo:blocks{state="used"}': 0,
            "octavo:up": 1,
        }
        assert {name: got.get(name) for name in expected} == expected
        assert sum(got[f'octavo:blocks{{state="{s}"}}'] for s in ("used", "cached", "free")) == 300
        assert got["vllm:time_to_first_token_seconds_sum"] <= got["vllm:e2e_request_latency_seconds_sum"]
        assert not any("_created" in name for name in got)


async def test_speculation_has_its_metrics_only_where_it_is_on(model: str) -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    async with serving(model, engine_options={"speculative_config": {"num_speculative_tokens": 3}}) as server:
        answer = await server.complete("hihihihihihihi", max_tokens=60)
        got = values_of((await server.client.get("/metrics")).text)
        described = (await server.client.get(f"/debug/requests/{answer['id']}")).json()
        drafts, tokens, accepted = (got[f"vllm:spec_decode_{name}_total"] for name in names)
        by_position = [got[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
        assert 0 < accepted < tokens and sum(by_position) == accepted and by_position == sorted(by_position)[::-1]
        assert accepted < drafts + by_position[1] + by_position[2] and drafts <= tokens <= 3 * drafts
        assert (described["num_draft_tokens"], described["num_accepted_tokens"]) == (tokens, accepted)
        num_known = 14 + 60 - 1  # the last token is not computed
        assert got["octavo:computed_tokens_total"] == num_known + tokens - accepted
        off = await server.complete("hihihihihihihi", max_tokens=60, spec=False)
        assert off["choices"] == answer["choices"]
        assert values_of((await server.client.get("/metrics")).text)["vllm:spec_decode_num_drafts_total"] == drafts
        assert "num_draft_tokens" not in (await server.client.get(f"/debug/requests/{off['id']}")).json()
    async with serving(model) as server:
        await server.complete("hihihihihihihi")
        assert "spec_decode" not in (await server.client.get("/metrics")).text


async def test_ranks_have_their_metrics_only_where_there_are_several(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model) as server:
        assert "octavo:rank" not in (await server.client.get("/metrics")).text
        ranks = RankPlace(7, 31, True, 2.5, False), RankPlace(7, 30, False, 2.5, True)
        monkeypatch.setattr(server.engine.transport, "health", lambda: Health("running", 1.0, ranks=ranks))
        got = values_of((await server.client.get("/metrics")).text)
        of_rank_1 = [got[f'octavo:rank_{name}{{rank="1"}}'] for name in ("plan", "collective", "age_seconds", "behind")]
        assert of_rank_1 == [7, 30, 2.5, 1] and got['octavo:rank_behind{rank="0"}'] == 0


def test_counters_of_positions_add_up() -> None:
    engines = [EngineStats(num_draft_tokens=7, num_accepted_per_position=[2, 1]), EngineStats()]
    engines += [EngineStats(num_draft_tokens=1, num_accepted_per_position=[1, 1, 1])]
    total = sum_stats([StatsSnapshot(engine, None) for engine in engines]).engine
    assert (total.num_draft_tokens, total.num_accepted_per_position) == (8, [3, 2, 1])


def latencies_of(
    monkeypatch: pytest.MonkeyPatch, records: list[tuple[float, RequestMetrics, list[CompletionOutput]]]
) -> tuple[float, float]:
    """Number and sum of the inter-token latencies; a record is an output with its time."""
    clock = [10.0]
    monkeypatch.setattr("octavo.serve.metrics.time.monotonic", lambda: clock[0])
    metrics = Metrics("tiny", 64)
    tracker = metrics.track(SamplingParams(n=2), 3, arrival=9.0)
    for clock[0], stats, outputs in records:
        tracker.record(RequestOutput("r", None, [1, 2, 3], outputs, False, stats))
    engine = EngineState(0, StatsSnapshot(EngineStats(), None), Health("running", 0.0))
    got = values_of(metrics.render([engine]).decode())
    return got["vllm:inter_token_latency_seconds_count"], got["vllm:inter_token_latency_seconds_sum"]


@pytest.mark.parametrize(
    ("tokens", "gaps", "total"),
    [
        pytest.param([(1, 2, 0.0), (5, 2, 4.0)], 8, 8.0, id="reported at once"),
        pytest.param([(4, 2, 3.0), (5, 2, 4.0)], 8, 8.0, id="first ones reported late"),
        pytest.param([(5, 2, 4.0)], 8, 8.0, id="all at once"),
        pytest.param([(1, 1, 0.0)], 0, 0.0, id="one token"),
        pytest.param([(0, 1, None)], 0, 0.0, id="none"),
    ],
)
def test_inter_token_latency_has_one_entry_per_token_after_the_first(
    monkeypatch: pytest.MonkeyPatch, tokens: list[tuple[int, int, float | None]], gaps: int, total: float
) -> None:
    """Independent of how outputs are merged. An output is (tokens per sample so far, samples, time)."""
    records = []
    for so_far, samples, at in tokens:
        stats = RequestMetrics(9.0, 9.0, None if at is None else 10.0, None if at is None else 10.0 + at)
        stats.num_generation_tokens = so_far * samples
        records.append((10.0 + (at or 0.0), stats, [CompletionOutput(i, "", []) for i in range(samples)]))
    assert latencies_of(monkeypatch, records) == (gaps, pytest.approx(total))


@pytest.mark.parametrize("shown", [[0, 1], [1]], ids=["all shown again", "only what is new"])
def test_inter_token_latency_after_other_samples_have_finished(
    monkeypatch: pytest.MonkeyPatch, shown: list[int]
) -> None:
    finished, other = CompletionOutput(0, "", [], finish_reason="stop"), CompletionOutput(1, "", [])
    records = [
        (at, RequestMetrics(9.0, 9.0, 10.0, at, num_generation_tokens=num_tokens), outputs)
        for at, num_tokens, outputs in (
            (10.0, 2, [finished, other]),
            (16.0, 5, [c for c in (finished, other) if c.index in shown]),
        )
    ]
    assert latencies_of(monkeypatch, records) == (3, pytest.approx(6.0))


async def test_rejected_requests_are_counted(model: str) -> None:
    async with serving(model, engine_options={"max_num_seqs": 1}, max_num_queued_reqs=0) as server:
        got = values_of((await server.client.get("/metrics")).text)
        assert got['vllm:admission_rejections_total{reason="queue_full"}'] == 0  # exported before the first rejection
        with server.app.service.admission.admit(1, 1):
            assert (await server.post("/v1/completions", prompt="a")).status_code == 429
        await server.complete()
        server.app.service.admission.draining = True
        assert (await server.post("/v1/completions", prompt="a")).status_code == 503
        got = values_of((await server.client.get("/metrics")).text)
        assert got['vllm:admission_rejections_total{reason="queue_full"}'] == 1
        assert got['vllm:admission_rejections_total{reason="shutting_down"}'] == 1
        assert got['vllm:request_success_total{finished_reason="length"}'] == 1


async def test_restarts_are_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model) as server:
        monkeypatch.setattr(server.engine.transport, "health", lambda: Health("restarting", 1.0, None, 3))
        got = values_of((await server.client.get("/metrics")).text)
        assert (got["octavo:up"], got["octavo:engine_restarts_total"]) == (0, 3)


DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboard.json"


async def test_dashboard_queries_existing_metrics(model: str) -> None:
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    queried = {name for query in queries for name in re.findall(r"(?:vllm|octavo):\w+|http_\w+", query)}
    labels = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)} - {"le"}
    async with serving(model) as server:
        await server.complete()
        text = (await server.client.get("/metrics")).text
        text += (await server.client.get("/metrics")).text  # now including the first request
        assert queried <= set(re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE))
        assert all(f'{label}="' in text for label in labels)
    assert len(queries) > 30 and {"octavo:blocks", "octavo:waits_total", "http_requests_total"} <= queried


async def test_running_and_waiting_requests_are_exported(model: str) -> None:
    async with serving(model, engine_options={"max_num_seqs": 2}) as server:
        tasks = [asyncio.ensure_future(server.complete(max_tokens=100)) for _ in range(5)]
        peaks: dict[str, float] = {}
        while not all(task.done() for task in tasks):
            for name, value in values_of((await server.client.get("/metrics")).text).items():
                peaks[name] = max(peaks.get(name, 0), value)
        # Before the first step all five wait.
        assert peaks["vllm:num_requests_running"] == 2 and 3 <= peaks["vllm:num_requests_waiting"] <= 5
        assert peaks['vllm:num_requests_waiting_by_reason{reason="capacity"}'] == peaks["vllm:num_requests_waiting"]
        assert peaks["vllm:kv_cache_usage_perc"] > 0 and peaks['octavo:waits_total{reason="rows"}'] >= 1


async def test_tokens_per_step_are_recorded(model: str) -> None:
    metrics, prompt = Metrics("m", 128), [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    params = SamplingParams(max_tokens=5)
    async with oracle_client(model) as client:
        client.transport.listen(metrics.iteration_tokens.observe)
        await last_of(client, prompt, params)
        got = values_of(metrics.render([EngineState(0, await client.stats(), client.health())]).decode())
        name = "vllm:iteration_tokens_total"
        assert (got[f"{name}_count"], got[f"{name}_sum"]) == (5, 11 + 5)
        assert [got[f'{name}_bucket{{le="{le}.0"}}'] for le in (1, 8, 16)] == [4, 4, 5]  # the first step has the prompt
        again = await last_of(client, prompt, params)
        assert again.num_cached_tokens == 8
        got = values_of(metrics.render([EngineState(0, await client.stats(), client.health())]).decode())
        assert (got[f"{name}_count"], got[f"{name}_sum"]) == (10, 16 + 3 + 5)


async def test_requests_waiting_for_an_engine_are_deferred(model: str, tmp_path: Path) -> None:
    (hold := tmp_path / "hold").touch()
    metrics = Metrics("m", 128)
    async with oracle_client(model, hold=str(hold)) as client:
        first = asyncio.ensure_future(last_of(client, [1, 2], SamplingParams(max_tokens=20)))
        while not any(stream.sent for stream in client.transport.handles.values()):
            await asyncio.sleep(0.002)
        assert client.transport.pid is not None
        os.kill(client.transport.pid, signal.SIGKILL)
        while client.transport.supervisor.is_up:
            await asyncio.sleep(0.002)
        late = asyncio.ensure_future(last_of(client, [3, 4], SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        got = values_of(metrics.render([EngineState(0, await client.stats(), client.health())]).decode())
        assert (got["vllm:num_requests_waiting"], got["octavo:up"]) == (2, 0)
        by_reason = [got[f'vllm:num_requests_waiting_by_reason{{reason="{r}"}}'] for r in ("capacity", "deferred")]
        assert by_reason == [0, 2]
        hold.unlink()
        await asyncio.gather(first, late)
        got = values_of(metrics.render([EngineState(0, await client.stats(), client.health())]).decode())
        assert got["vllm:num_requests_waiting"] == 0


def test_buckets_equal_vllms() -> None:
    assert STEP_TOKEN_BUCKETS[0] == 1 and {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384} < set(
        STEP_TOKEN_BUCKETS
    )
    assert (len(LATENCY_BUCKETS), LATENCY_BUCKETS[0], LATENCY_BUCKETS[-1]) == (21, 0.3, 7680)
    assert (len(TTFT_BUCKETS), TTFT_BUCKETS[0], TTFT_BUCKETS[-1]) == (22, 0.001, 2560)
    assert (len(ITL_BUCKETS), ITL_BUCKETS[0], ITL_BUCKETS[-1]) == (19, 0.01, 80)
    for buckets in (LATENCY_BUCKETS, TTFT_BUCKETS, ITL_BUCKETS):
        assert list(buckets) == sorted(set(buckets))
    assert token_buckets(128) == [1, 2, 5, 10, 20, 50, 100] and token_buckets(1) == [1]


def test_stats_line_reads_like_vllms() -> None:
    metrics = Metrics("m", 128)
    line = StatsLogger(metrics, "CPU")
    kv = KVCacheManager(100, 4).stats()
    engine: dict[str, Any] = {"num_preemptions": 3}
    assert line.line(StatsSnapshot(EngineStats(), kv)) is None
    metrics.record_prompt(100, 60)
    metrics.record_tokens(10)
    text = line.line(StatsSnapshot(EngineStats(**engine), kv, num_running=8, num_waiting=1, num_swapped=1))
    assert text is not None
    pattern = (
        r"Engine 000: Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ tokens/s, "
        r"Running: 8 reqs, Waiting: 2 reqs, Preemptions: 3, CPU KV cache usage: 0.0%, Prefix cache hit rate: 60.0%"
    )
    assert re.fullmatch(pattern, text)
    last = line.line(StatsSnapshot(EngineStats(**engine), kv))
    assert last is not None and "Preemptions" not in last and "throughput: 0.0 tokens/s" in last
    assert line.line(StatsSnapshot(EngineStats(**engine), kv)) is None  # an idle server logs nothing


async def test_unlogged_paths_apply_behind_a_proxy(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    async with serving(model, disable_access_log_for_endpoints=["/health"]) as server:
        transport = httpx.ASGITransport(server.app.asgi, root_path="/api")  # as uvicorn passes --root-path
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny/api") as client:
            for path in ("/health", "/version"):
                assert (await client.get(path)).status_code == 200
        await server.client.get("/v1/models/%0aINFO%20forged")
    lines = [record.message for record in caplog.records if record.name == "octavo.access"]
    assert len(lines) == 2
    assert re.fullmatch(r'[\d.]+:\d+ "GET /api/version" 200, [\d.]+ ms, \w+', lines[0]), lines[0]
    assert r'"GET /v1/models/\nINFO forged" 404' in lines[1]


async def test_log_lines_can_be_json(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    async with serving(model, disable_access_log_for_endpoints=["/health"]) as server:
        await server.client.get("/health")
        await server.complete("secret")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "octavo.access"]
    assert [(line["path"], line["status"], line["method"]) for line in lines] == [("/v1/completions", 200, "POST")]
    assert lines[0]["level"] == "info" and "secret" not in caplog.text
    plain = logging.LogRecord("octavo.serve", logging.WARNING, "", 0, "a %s", ("\n",), None)
    assert json.loads(JsonFormatter().format(plain))["message"] == "a \n"
