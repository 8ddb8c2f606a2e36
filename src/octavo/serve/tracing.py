"""A span for each prompt, sent to an OpenTelemetry collector, with vLLM's names; the extra `octavo[otel]`.

A request that brings a `traceparent` header has its span in the caller's trace. Spans are sent in batches by a thread
of the SDK's; when no collector takes them, they are dropped, and no request is held up. What the SDK reads from the
environment (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...) holds here too.
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
"""How long the collector may take to accept a batch, and the last one when the server stops."""


class Tracing:
    """Makes spans, and gives them to `processor`."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the environment gives no name
            resource = resource.merge(Resource({SERVICE_NAME: "octavo"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo", octavo.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @classmethod
    def to(cls, endpoint: str, model: str) -> Tracing:
        """To a collector that listens to OTLP over HTTP. Raises `ParameterError` where the packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            text = "otlp_traces_endpoint needs OpenTelemetry's packages; pip install 'octavo[otel]'"
            raise ParameterError(text, param="otlp_traces_endpoint") from None
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S)), model)

    def tell(
        self, name: str, params: SamplingParams | BeamSearchParams, ended: FinishedPrompt, headers: Mapping[str, str]
    ) -> None:
        """Of a prompt that is over, now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers) if headers else None,
            kind=SpanKind.SERVER,
            start_time=end_ns - round(1e9 * ended.latency_s),
            attributes=attributes_of(name, self._model, params, ended),
        )
        if ended.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, if it is taken at once."""
        sending = threading.Thread(target=self._provider.shutdown, name="octavo-tracing", daemon=True)
        sending.start()
        sending.join(EXPORT_S)


def attributes_of(
    name: str, model: str, params: SamplingParams | BeamSearchParams, ended: FinishedPrompt
) -> dict[str, str | int | float]:
    found: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reason": ended.reason,
        "gen_ai.request.id": name,
        "gen_ai.request.n": params.n or 1,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": getattr(params, "top_p", None),
        "gen_ai.usage.prompt_tokens": ended.num_prompt,
        "gen_ai.usage.completion_tokens": ended.num_generated,
        "gen_ai.latency.time_in_queue": ended.queue_s,
        "gen_ai.latency.time_to_first_token": ended.first_token_s,
        "gen_ai.latency.e2e": ended.latency_s,
        "gen_ai.latency.time_in_model_prefill": ended.prefill_s,
        "gen_ai.latency.time_in_model_decode": ended.decode_s,
        "gen_ai.latency.time_in_model_inference": ended.inference_s,
        "octavo.num_cached_tokens": ended.num_cached,
        "octavo.num_preemptions": ended.num_preemptions,
    }
    return {key: value for key, value in found.items() if value is not None}
