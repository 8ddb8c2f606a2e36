"""The routes of the OpenAI-compatible server, and its OpenAPI document."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.engine.executor import RankPlace
from octavo.engine.query import DescribeKV
from octavo.errors import UsageError
from octavo.frontend.cooperative import iter_cooperatively, run_cooperatively
from octavo.serve.debug_rate_limit import CoalescedQuery, EngineQueries
from octavo.serve.http.allowed_hosts import AllowedHosts
from octavo.serve.http.body import Bodies
from octavo.serve.http.context import EventStream, HttpResponse, RequestContext, json_response
from octavo.serve.http.endpoint import ActiveRequest, Endpoint, Handler
from octavo.serve.http.middleware import OPEN_PATHS, ApiKeys, AuthMiddleware
from octavo.serve.metrics import EngineState
from octavo.serve.openai import schema
from octavo.serve.openai.errors import ApiError, bad_request, not_found, redact_paths, to_api_error
from octavo.serve.openai.request import ParsedRequest, check_tools, parse_messages, parse_tools
from octavo.serve.openai.response import ResponseBuilder
from octavo.serve.openai.responses_api import ResponseEventBuilder, to_chat, to_responses_error
from octavo.serve.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    TokenizeRequest,
)
from octavo.serve.service import Prompts, Service, TokenizedPrompt
from octavo.serve.view_routes import EVENTS, View, replica_number
from octavo.view.live.hub import AskQuery, Hub
from octavo.view.live.per_engine import PerEngine

logger = logging.getLogger("octavo.serve")
B = TypeVar("B", bound=schema.Body)

RESTART_GRACE_S = 60.0
"""/health fails when a restart of the engine takes longer."""
STALL_S = 10.0
"""/ready fails when the engine has work and has finished no step for so long."""
UNSUPPORTED_ROUTES = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/v1/moderations",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
)
"""OpenAI's and vLLM's routes for models that do not generate text; answered with 404 unsupported_endpoint."""


class App:
    """The routes over one `Service`.

    engines           those that the view and /debug/kv ask; there may be more later. Default: the transport's
    active_requests   in progress; a shutdown may have to end them
    """

    def __init__(
        self, service: Service, keys: ApiKeys | None = None, engines: Sequence[AskQuery] | None = None
    ) -> None:
        self.service = service
        self.active_requests: set[ActiveRequest] = set()
        self.bodies = Bodies()
        self._engines = engines or [engine.query for engine in service.backend.transport.engines]
        self._kv_queries = PerEngine(self._engines, lambda ask: CoalescedQuery(debug_kv_of(ask)))
        self._queries = EngineQueries()
        settings = service.settings
        app = Starlette(exception_handlers={HTTPException: on_http_exception})
        app.router.redirect_slashes = False
        self._add(app, "POST", "/v1/completions", self.completions)
        self._add(app, "POST", "/v1/chat/completions", self.chat_completions)
        self._add(app, "POST", "/v1/responses", self.responses)
        self._add(app, "GET", "/v1/models", self.models)
        self._add(app, "GET", "/v1/models/{model:path}", self.model)
        self._add(app, "POST", "/tokenize", self.tokenize)
        self._add(app, "POST", "/detokenize", self.detokenize)
        if settings.enable_tokenizer_info_endpoint:
            self._add(app, "GET", "/tokenizer_info", self.tokenizer_info)
        self._add(app, "GET", "/health", self.health)
        self._add(app, "GET", "/ping", self.health)
        self._add(app, "GET", "/ready", self.ready)
        self._add(app, "GET", "/version", self.version)
        self._add(app, "GET", "/load", self.load)
        self._add(app, "GET", "/metrics", self.metrics)
        self._add(app, "GET", "/debug/requests/{id}", self.debug_request)
        self._add(app, "GET", "/debug/kv", self.debug_kv)
        self._add(app, "GET", "/debug/router", self.debug_router)
        for method, path, handler in self._view(service).routes():
            self._add(app, method, path, handler, streams=path == EVENTS)
        self._add(app, "POST", "/view/play", self.no_playground)
        for path in UNSUPPORTED_ROUTES:
            self._add(app, "POST", path, self.unsupported_route)
        self._add(app, "GET", "/openapi.json", self.openapi)
        self.starlette = app
        self.asgi = AuthMiddleware(
            app,
            keys=keys or ApiKeys(()),
            metrics=service.metrics,
            open_paths=OPEN_PATHS | ({b"/metrics"} if settings.metrics_public else set()),
            unlogged_paths=settings.disable_access_log_for_endpoints,
            origins=settings.allowed_origins,
            hosts=AllowedHosts.for_server(
                settings.allowed_hosts, host=settings.host, uds=settings.uds, has_keys=bool(keys)
            ),
        )

    def _view(self, service: Service) -> View:
        text_of: Callable[[list[int]], str] | None = None
        if service.settings.view_text:
            text_of = functools.partial(service.tokenizer.decode, skip_special_tokens=False)
        numbers = itertools.count()
        hubs = PerEngine(self._engines, lambda ask: Hub(ask, functools.partial(self._ranks, next(numbers))))
        return View(service.model_names[0], hubs=hubs, text_of=text_of, queries=self._queries, playground=False)

    def _ranks(self, number: int) -> Sequence[RankPlace]:
        engines = self.service.backend.transport.engines
        return engines[number].health().ranks if number < len(engines) else ()

    def _add(self, app: Starlette, method: str, path: str, handler: Handler, *, streams: bool = False) -> None:
        def body_limit() -> int:
            return self.service.settings.body_limit(self.service.backend.max_model_len)

        has_body = method == "POST" and handler not in (self.unsupported_route, self.no_playground)
        endpoint = Endpoint(
            path,
            handler,
            body_limit=body_limit if has_body else None,
            bodies=self.bodies,
            active=self.active_requests,
            streams=streams,
        )
        app.router.add_route(path, endpoint, methods=[method])  # type: ignore[arg-type]  # an ASGI application

    async def start(self) -> None:
        """Starts a text worker, so that the first request need not wait for it."""
        await self.service.text_workers.start()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress. Streams of viewers do not count."""
        return all(request.open_ended for request in self.active_requests)

    async def close(self) -> None:
        await self.service.text_workers.aclose()

    async def _body(self, context: RequestContext, kind: type[B]) -> B:
        """The route's body. Raises `ApiError` 400."""
        return await self.bodies.parse(context, lambda body: self.service.request_parser.decode(body, kind))

    # -- generation ----------------------------------------------------------------------------------------------------

    async def completions(self, context: RequestContext) -> HttpResponse | EventStream:
        parser = self.service.request_parser
        request = parser.parse_completion(await self._body(context, CompletionRequest))
        name = f"cmpl-{context.request_id}"
        prompts = await self.service.encode(request, context.tenant.number)
        return await self._generate(context, request, name, prompts, self.service.completion_response(request, name))

    async def chat_completions(self, context: RequestContext) -> HttpResponse | EventStream:
        parser = self.service.request_parser
        request = parser.parse_chat(await self._body(context, ChatRequest))
        name = f"chatcmpl-{context.request_id}"
        prompt = await self.service.encode_chat(request, context.tenant.number)
        builder = self.service.chat_response(request, name, prompt)
        return await self._generate(context, request, name, [prompt], builder)

    async def _generate(
        self, context: RequestContext, request: ParsedRequest, name: str, prompts: Prompts, builder: ResponseBuilder
    ) -> HttpResponse | EventStream:
        service = self.service
        if service.settings.enable_log_requests:
            logger.info("request %s: %s", name, request.params)
        events = self._chunks(context, request, name, prompts, builder)
        if request.stream:
            return EventStream(events, keep_alive_s=service.settings.sse_keep_alive_interval)
        async with contextlib.aclosing(events):
            async for chunk in events:
                for choice in chunk["choices"]:
                    builder.merge(choice)
        (response,) = await run_cooperatively(builder.build())
        return json_response(response)

    async def _chunks(
        self, context: RequestContext, request: ParsedRequest, name: str, prompts: Prompts, builder: ResponseBuilder
    ) -> AsyncGenerator[Any, None]:
        generation = self.service.generate(request, prompts, name, context.tenant, context.trace_headers)
        async with contextlib.aclosing(generation) as outputs:
            async for i, output in outputs:
                async for choice in iter_cooperatively(builder.choices(i, output)):
                    yield builder.chunk([choice])
        if request.include_usage:
            yield builder.usage_chunk()

    async def responses(self, context: RequestContext) -> HttpResponse | EventStream:
        service, name = self.service, f"resp_{context.request_id}"
        body = await self._body(context, ResponseRequest)
        chat, messages, tools = to_chat(body)
        try:
            request = service.request_parser.parse_chat(chat, messages, tools)
            prompt = await service.encode_chat(request, context.tenant.number)
        except (ApiError, UsageError) as error:
            raise to_responses_error(to_api_error(error, context.request_id)) from None
        response = ResponseEventBuilder(name, request.model, body, tools)
        events = self._response_events(context, request, prompt, response)
        if request.stream:
            keep_alive_s = service.settings.sse_keep_alive_interval
            return EventStream(events, end_marker=b"", keep_alive_s=keep_alive_s, error_event=response.error_event)
        async with contextlib.aclosing(events):
            async for _ in events:
                pass
        return json_response(response.response)

    async def _response_events(
        self, context: RequestContext, request: ParsedRequest, prompt: TokenizedPrompt, response: ResponseEventBuilder
    ) -> AsyncGenerator[Any, None]:
        name, finish_reason, has_started = response.response["id"], None, False
        chat = self.service.chat_response(request, "", prompt)
        try:
            generation = self.service.generate(request, [prompt], name, context.tenant, context.trace_headers)
            async with contextlib.aclosing(generation) as outputs:
                async for i, output in outputs:
                    if not has_started:
                        has_started = True
                        for event in response.begin():
                            yield event
                    async for choice in iter_cooperatively(chat.choices(i, output)):
                        finish_reason = choice["finish_reason"] or finish_reason
                        for event in response.add(choice["delta"], choice["logprobs"]):
                            yield event
        except ApiError as api_error:
            raise to_responses_error(api_error) from None
        for event in response.finish(finish_reason, chat.usage.as_dict(has_reasoning=chat.has_reasoning)):
            yield event

    # -- tokenizer -----------------------------------------------------------------------------------------------------

    async def tokenize(self, context: RequestContext) -> HttpResponse:
        service, parser, tenant = self.service, self.service.request_parser, context.tenant.number
        body = await self._body(context, TokenizeRequest)
        parser.resolve_model(body)
        template, tools = parser.chat_template_options(body), parse_tools(body.tools)
        check_tools(tools)
        if body.messages is not None:
            messages = parse_messages(body.messages)
            if tools:
                template["tools"] = tools
            service.prompts.check_length("".join(m["content"] for m in messages), "messages")
            token_ids = (await service.render(messages, template, tenant)).token_ids
        elif body.prompt is not None:
            service.prompts.check_length(body.prompt)
            (token_ids,) = await service.encode_texts([body.prompt], body.add_special_tokens is not False, tenant)
        else:
            raise bad_request("missing_required_parameter", "prompt is missing; send prompt or messages", "prompt")
        token_strings = None
        if body.return_token_strs:
            token_strings = await service.text_workers.token_strings(token_ids, tenant)
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": service.backend.max_model_len,
                "tokens": token_ids,
                "token_strs": token_strings,
            }
        )

    async def detokenize(self, context: RequestContext) -> HttpResponse:
        service = self.service
        body = await self._body(context, DetokenizeRequest)
        service.request_parser.resolve_model(body)
        service.check_ids(body.tokens, "tokens")
        return json_response({"prompt": await service.decode(body.tokens, False, context.tenant.number)})

    async def tokenizer_info(self, context: RequestContext) -> HttpResponse:
        """What clients read that tokenize through the server, lm-eval for example."""
        tokenizer = self.service.tokenizer
        info = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": self.service.backend.max_model_len}
        return json_response({**info, **tokenizer.special_tokens, "chat_template": tokenizer.chat_template})

    # -- models and state ----------------------------------------------------------------------------------------------

    async def models(self, context: RequestContext) -> HttpResponse:
        return json_response({"object": "list", "data": [self._card(name) for name in self.service.model_names]})

    async def model(self, context: RequestContext) -> HttpResponse:
        name = context.path_params["model"]
        if not name:  # some clients request the list with a trailing slash
            return await self.models(context)
        if name not in self.service.model_names:
            raise ApiError(404, "model_not_found", f"The model `{name}` does not exist.", "model")
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "octavo",
            "root": self.service.model_names[0],
            "parent": None,
            "max_model_len": self.service.backend.max_model_len,
            "permission": [],
        }

    async def health(self, context: RequestContext) -> HttpResponse:
        """200 while the engine runs, or restarts within `RESTART_GRACE_S`."""
        health = self.service.backend.health()
        failed = health.state == "failed" or (health.state == "restarting" and health.since_s > RESTART_GRACE_S)
        return HttpResponse(b"", 503 if failed else 200, "text/plain; charset=utf-8")

    async def ready(self, context: RequestContext) -> HttpResponse:
        """200 if a new request would be processed now; else 503 with the reason."""
        reason = self._not_ready_reason()
        if reason is None:
            return json_response({"status": "ready"})
        response = json_response({"status": "not ready", "reason": reason}, 503)
        response.headers["retry-after"] = "1"
        return response

    def _not_ready_reason(self) -> str | None:
        admission, health = self.service.admission, self.service.backend.health()
        if admission.draining:
            return "shutting down"
        if health.state != "running":
            state = "has failed" if health.state == "failed" else f"is {health.state}"
            return f"the engine {state}" + (f": {redact_paths(health.reason)}" if health.reason else "")
        if health.last_step_age_s is not None and health.last_step_age_s > STALL_S:
            return f"no step for {health.last_step_age_s:.0f} s"
        return "the queue is full" if admission.is_full else None

    async def openapi(self, context: RequestContext) -> HttpResponse:
        return json_response(openapi_document())

    async def version(self, context: RequestContext) -> HttpResponse:
        return json_response({"version": octavo.__version__})

    async def load(self, context: RequestContext) -> HttpResponse:
        return json_response({"server_load": self.service.admission.num_requests})

    async def metrics(self, context: RequestContext) -> HttpResponse:
        service = self.service
        engines = enumerate(service.backend.transport.engines)
        text = service.metrics.render([EngineState(i, await e.stats(), e.health()) for i, e in engines])
        return HttpResponse(text, content_type="text/plain; version=0.0.4; charset=utf-8")

    async def debug_request(self, context: RequestContext) -> HttpResponse:
        name, tenant = context.path_params["id"], context.tenant
        for candidate in (name, f"chatcmpl-{name}", f"cmpl-{name}", f"resp_{name}"):
            if not tenant.sees(candidate):  # the same 404 as for an unknown id
                continue
            query = functools.partial(self.service.backend.debug_request, candidate)
            found = await self._queries.run(query, tenant.number)
            if found is not None:
                return json_response(tenant.redact_request(found))
        raise not_found("no running or recent request has this id", "id")

    async def debug_kv(self, context: RequestContext) -> HttpResponse:
        kv_query = self._kv_queries[replica_number(context, len(self._kv_queries))]
        return json_response(context.tenant.redact_kv(await kv_query.get()))

    async def debug_router(self, context: RequestContext) -> HttpResponse:
        """What the router knows of each replica, and why the latest requests went where they did."""
        transport = self.service.backend.transport
        if (router := transport.router) is None:
            raise not_found("the server has one engine and no router; start it with --data-parallel-size")
        health = [engine.health() for engine in transport.engines]
        engines = [{"state": engine.state, "num_restarts": engine.num_restarts} for engine in health]
        decisions = [asdict(d) for d in reversed(router.decisions) if context.tenant.sees(d.request_id)]
        found = {"policy": router.policy, "replicas": router.describe(), "engines": engines, "decisions": decisions}
        return json_response(found)

    async def no_playground(self, context: RequestContext) -> HttpResponse:
        """404: a playground's history costs work and memory that the caller determines."""
        raise ApiError(404, "unsupported_endpoint", "the server has no playground; run `octavo view` locally")

    async def unsupported_route(self, context: RequestContext) -> HttpResponse:
        raise ApiError(404, "unsupported_endpoint", "the model generates text; use /v1/completions or chat")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The router's errors as API errors: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        api_error = ApiError(405, "method_not_allowed", f"the path has no {request.method[:16]}", headers=allowed)
    else:
        api_error = not_found("no such path; see /openapi.json")
    request.scope["state"]["context"].status = api_error.status
    return Response(api_error.body(), api_error.status, api_error.headers())


def debug_kv_of(ask: AskQuery) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def debug_kv() -> dict[str, Any]:
        return (await ask(DescribeKV())).as_dict()

    return debug_kv


def openapi_document() -> dict[str, Any]:
    """The document at /openapi.json, from the types that also parse bodies."""

    def json_content(name: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    def route(summary: str, body: str | None = None, *, path_param: str | None = None) -> dict[str, Any]:
        responses: dict[str, Any] = {"200": {"description": "OK"}}
        for status in ("400", "401", "404", "413", "415", "429", "503"):
            responses[status] = {"description": "Error", "content": json_content("Error")}
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        if path_param is not None:
            parameter = {"name": path_param, "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [parameter]
        if body is not None:
            operation["requestBody"] = {"required": True, "content": json_content(body)}
        return operation

    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": octavo.__version__},
        "paths": {
            "/v1/completions": {"post": route("Create a completion", "CompletionRequest")},
            "/v1/chat/completions": {"post": route("Create a chat completion", "ChatRequest")},
            "/v1/responses": {"post": route("Create a response", "ResponseRequest")},
            "/v1/models": {"get": route("List models")},
            "/v1/models/{model}": {"get": route("Retrieve a model", path_param="model")},
            "/tokenize": {"post": route("Tokenize text or messages", "TokenizeRequest")},
            "/detokenize": {"post": route("Detokenize token ids", "DetokenizeRequest")},
            "/health": {"get": route("Liveness")},
            "/ping": {"get": route("Liveness (same as /health)")},
            "/ready": {"get": route("Readiness")},
            "/version": {"get": route("Server version")},
            "/load": {"get": route("Number of requests in progress")},
            "/metrics": {"get": route("Prometheus metrics")},
            "/debug/kv": {"get": route("State of the KV cache's block pool; of replica=N, if there are several")},
            "/debug/router": {"get": route("What the router knows of each replica, and its latest decisions")},
            "/debug/requests/{id}": {"get": route("State and timeline of a request", path_param="id")},
        },
        "components": {"schemas": schema.component_schemas()},
    }
