"""OpenTelemetry tracing: one span per prompt, with vLLM's attribute names. Needs the extra `octavo[otel]`.

A `traceparent` header puts the span into the caller's trace. A thread of the SDK sends spans in batches. Spans that no
collector accepts are dropped and delay no request. The SDK's environment variables apply (OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import octavo
from octavo.errors import ParameterError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.metrics import FinishedPrompt

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

EXPORT_S = 2.0
"""Timeout for a batch, and for the last one when the server stops."""


class Tracing:
    """Creates spans and passes them to `processor`."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # not set in the environment
            resource = resource.merge(Resource({SERVICE_NAME: "octavo"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo", octavo.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @classmethod
    def to(cls, endpoint: str, model: str) -> Tracing:
        """Exports to a collector by OTLP over HTTP. Raises `ParameterError` if the packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            text = "otlp_traces_endpoint needs OpenTelemetry's packages; pip install 'octavo[otel]'"
            raise ParameterError(text, param="otlp_traces_endpoint") from None
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S)), model)

    def export(
        self, name: str, params: SamplingParams | BeamSearchParams, finished: FinishedPrompt, headers: Mapping[str, str]
    ) -> None:
        """Exports the span of a prompt that has just finished. `headers`: the caller's trace context."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers) if headers else None,
            kind=SpanKind.SERVER,
            start_time=end_ns - round(1e9 * finished.latency_s),
            attributes=attributes_of(name, self._model, params, finished),
        )
        if finished.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Sends the remaining spans, for at most `EXPORT_S`."""
        thread = threading.Thread(target=self._provider.shutdown, name="octavo-tracing", daemon=True)
        thread.start()
        thread.join(EXPORT_S)


def attributes_of(
    name: str, model: str, params: SamplingParams | BeamSearchParams, finished: FinishedPrompt
) -> dict[str, str | int | float]:
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reason": finished.reason,
        "gen_ai.request.id": name,
        "gen_ai.request.n": params.n or 1,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": getattr(params, "top_p", None),
        "gen_ai.usage.prompt_tokens": finished.num_prompt,
        "gen_ai.usage.completion_tokens": finished.num_generated,
        "gen_ai.latency.time_in_queue": finished.queue_s,
        "gen_ai.latency.time_to_first_token": finished.first_token_s,
        "gen_ai.latency.e2e": finished.latency_s,
        "gen_ai.latency.time_in_model_prefill": finished.prefill_s,
        "gen_ai.latency.time_in_model_decode": finished.decode_s,
        "gen_ai.latency.time_in_model_inference": finished.inference_s,
        "octavo.num_cached_tokens": finished.num_cached,
        "octavo.num_preemptions": finished.num_preemptions,
    }
    return {key: value for key, value in attributes.items() if value is not None}
