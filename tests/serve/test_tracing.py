"""One span per prompt, in the caller's trace if there is one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.serve.args import ServeArgs
from octavo.serve.metrics import FinishedPrompt
from octavo.serve.tracing import Tracing
from tests.serve.in_process_server import NAME, serving

otel = pytest.importorskip("opentelemetry.sdk.trace.export", reason="opentelemetry-sdk is not installed (octavo[otel])")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATENCIES = {
    f"gen_ai.latency.{name}"
    for name in (
        "time_in_queue",
        "time_to_first_token",
        "e2e",
        "time_in_model_prefill",
        "time_in_model_decode",
        "time_in_model_inference",
    )
}


@pytest.fixture
def spans() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


async def test_spans_describe_requests(model: str, spans: Any) -> None:
    tracing = Tracing(otel.SimpleSpanProcessor(spans), NAME)
    async with serving(model, tracing=tracing) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "Hello,world", "max_tokens": 6, "n": 2, "temperature": 0.5, "ignore_eos": True}
        done = await server.client.post("/v1/completions", json=body, headers=headers)
        (span,) = spans.get_finished_spans()
        assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        got = dict(span.attributes)
        latency = {name: got.pop(name) for name in LATENCIES}
        assert got == {
            "gen_ai.response.model": NAME,
            "gen_ai.response.finish_reason": "length",
            "gen_ai.request.id": done.json()["id"],
            "gen_ai.request.n": 2,
            "gen_ai.request.max_tokens": 6,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.usage.prompt_tokens": 11,
            "gen_ai.usage.completion_tokens": 12,
            "octavo.num_cached_tokens": 0,
            "octavo.num_preemptions": 0,
        }
        assert 0 <= latency["gen_ai.latency.time_in_queue"] <= latency["gen_ai.latency.time_to_first_token"]
        assert latency["gen_ai.latency.time_to_first_token"] <= latency["gen_ai.latency.e2e"]
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(latency["gen_ai.latency.e2e"], abs=1e-6)
        assert (span.name, span.kind.name, span.status.status_code.name) == ("llm_request", "SERVER", "UNSET")
        assert span.resource.attributes["service.name"] == "octavo"

        spans.clear()
        await server.complete(["a", "b"])
        await server.chat()
        await server.post("/v1/completions", prompt="a", temperature=-1)  # refused requests have no span
        roots = spans.get_finished_spans()
        assert len(roots) == 3 and all(span.parent is None for span in roots)
        assert len({span.attributes["gen_ai.request.id"] for span in roots}) == 3


def test_failed_request_span_and_service_name_from_environment(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo import SamplingParams

    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing(otel.SimpleSpanProcessor(spans), NAME)
    tracing.export("a", SamplingParams(), FinishedPrompt("error", 3, 0, 0.5), {"traceparent": "nonsense"})
    tracing.close()
    (span,) = spans.get_finished_spans()
    assert span.status.status_code.name == "ERROR" and span.parent is None
    assert not LATENCIES - {"gen_ai.latency.e2e"} & set(span.attributes)
    assert span.resource.attributes["service.name"] == "mine"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        server.shutdown()
        thread.join()


def test_remaining_spans_are_exported_on_close(
    collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo import SamplingParams
    from octavo.serve import tracing as module

    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the exporter is not installed")
    monkeypatch.setattr(module, "EXPORT_S", 60)
    url, got = collector
    tracing = Tracing.to(url, NAME)
    tracing.export("a", SamplingParams(), FinishedPrompt("stop", 3, 1, 0.5), {})
    tracing.close()
    assert len(got) == 1 and b"gen_ai.request.id" in got[0] and b"llm_request" in got[0]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ParameterError, match=r"pip install 'octavo\[otel\]'"):
        Tracing.to("http://localhost:4318/v1/traces", NAME)


@pytest.mark.parametrize("url", ["localhost:4317", "", "grpc://localhost", 7])
def test_endpoint_must_be_a_url(url: Any) -> None:
    with pytest.raises(ParameterError, match="must be a URL") as caught:
        ServeArgs(otlp_traces_endpoint=url)
    assert caught.value.param == "otlp_traces_endpoint"
