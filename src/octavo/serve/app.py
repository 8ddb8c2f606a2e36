"""The OpenAI-compatible server's routes."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.errors import UsageError
from octavo.frontend.cooperative import iter_cooperatively, run_cooperatively
from octavo.serve.debug_rate_limit import CoalescedQuery, TenantRateLimiter
from octavo.serve.http.allowed_hosts import AllowedHosts
from octavo.serve.http.endpoint import (
    ActiveRequest,
    Endpoint,
    EventStream,
    Handler,
    HttpResponse,
    RequestContext,
    json_response,
)
from octavo.serve.http.json_worker import JsonWorker
from octavo.serve.http.middleware import OPEN_PATHS, ApiKeys, AuthMiddleware
from octavo.serve.openai import request as protocol
from octavo.serve.openai import schema as parameters
from octavo.serve.openai.errors import ApiError, bad_request, not_found, redact_paths, to_api_error
from octavo.serve.openai.request import ParsedRequest
from octavo.serve.openai.response import ResponseBuilder
from octavo.serve.openai.responses_api import FIELDS as RESPONSE_FIELDS
from octavo.serve.openai.responses_api import ResponseEventBuilder, blamed, to_chat
from octavo.serve.service import Service, TokenizedPrompt
from octavo.serve.view_routes import EVENTS, View
from octavo.view.live.hub import Hub

logger = logging.getLogger("octavo.serve")

RESTART_GRACE_S = 60.0
"""An engine that has been restarting for longer counts as gone."""
STALL_S = 10.0
"""Seconds without a step, while there is work, after which a request sent now is not promised any progress."""
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
"""OpenAI's and vLLM's routes for models that do not generate text."""


class App:
    """The routes over one `Service`. `running` are the exchanges that generate now; a shutdown may have to end them."""

    def __init__(self, service: Service, keys: ApiKeys | None = None) -> None:
        self.service = service
        self.running: set[ActiveRequest] = set()
        self.bodies = JsonWorker()
        service.admission.several = keys is not None and len(keys) > 1
        self._turns, self._kv = TenantRateLimiter(), CoalescedQuery(service.backend.debug_kv)
        settings = service.settings
        app = FastAPI(
            title="Octavo",
            version=octavo.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        app.add_exception_handler(HTTPException, on_http_exception)
        self._add(app, "POST", "/v1/completions", self.completions)
        self._add(app, "POST", "/v1/chat/completions", self.chat_completions)
        self._add(app, "POST", "/v1/responses", self.responses)
        self._add(app, "GET", "/v1/models", self.models)
        self._add(app, "GET", "/v1/models/{model:path}", self.model)
        self._add(app, "POST", "/tokenize", self.tokenize)
        self._add(app, "POST", "/detokenize", self.detokenize)
        self._add(app, "GET", "/health", self.health)
        self._add(app, "GET", "/ping", self.health)
        self._add(app, "GET", "/ready", self.ready)
        self._add(app, "GET", "/version", self.version)
        self._add(app, "GET", "/load", self.load)
        self._add(app, "GET", "/metrics", self.metrics)
        self._add(app, "GET", "/debug/requests/{id}", self.debug_request)
        self._add(app, "GET", "/debug/kv", self.debug_kv)
        for method, path, handler in self._view(service).routes():
            self._add(app, method, path, handler, streams=path == EVENTS)
        self._add(app, "POST", "/view/play", self.no_playground)
        for path in UNSUPPORTED_ROUTES:
            self._add(app, "POST", path, self.elsewhere)
        app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
        self.fastapi = app
        self.asgi = AuthMiddleware(
            app,
            keys=keys or ApiKeys(()),
            metrics=service.metrics,
            open_paths=OPEN_PATHS | ({b"/metrics"} if settings.metrics_public else set()),
            quiet_paths=settings.disable_access_log_for_endpoints,
            origins=settings.allowed_origins,
            hosts=AllowedHosts.of(settings.allowed_hosts, host=settings.host, uds=settings.uds, has_keys=bool(keys)),
        )

    def _view(self, service: Service) -> View:
        text_of: Callable[[list[int]], str] | None = None
        if service.settings.view_text:
            text_of = functools.partial(service.tokenizer.decode, skip_special_tokens=False)
        hub = Hub(service.backend.view_rpc)
        return View(service.names[0], hub=hub, text_of=text_of, turns=self._turns, playground=False)

    def _add(self, app: FastAPI, method: str, path: str, handler: Handler, *, streams: bool = False) -> None:
        def body_limit() -> int:
            return self.service.settings.body_limit(self.service.backend.max_model_len)

        reads = method == "POST" and handler not in (self.elsewhere, self.no_playground)
        endpoint = Endpoint(
            path,
            handler,
            body_limit=body_limit if reads else None,
            bodies=self.bodies,
            running=self.running,
            streams=streams,
        )
        app.router.add_route(path, endpoint, methods=[method])  # type: ignore[arg-type]  # an ASGI application

    async def start(self) -> None:
        """Before the first request: what would keep it waiting."""
        await self.service.texts.start()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, streams for looking aside."""
        return all(running.endless for running in self.running)

    async def close(self) -> None:
        await self.bodies.close()
        await self.service.texts.close()

    # -- generating ----------------------------------------------------------------------------------------------------

    async def completions(self, context: RequestContext) -> HttpResponse | EventStream:
        request = self.service.request_parser.parse_completion(context.body)
        name = f"cmpl-{context.request_id}"
        prompts = await self.service.encode(request)
        return await self._generate(context, request, name, prompts, self.service.completion_response(request, name))

    async def chat_completions(self, context: RequestContext) -> HttpResponse | EventStream:
        await run_cooperatively(protocol.decode_tool_arguments(context.body))
        request = self.service.request_parser.parse_chat(context.body)
        name = f"chatcmpl-{context.request_id}"
        prompt = await self.service.encode_chat(request.messages, request.template, request.truncate)
        answer = self.service.chat_response(request, name, prompt)
        return await self._generate(context, request, name, [prompt], answer)

    async def _generate(
        self,
        context: RequestContext,
        request: ParsedRequest,
        name: str,
        prompts: Sequence[TokenizedPrompt],
        answer: ResponseBuilder,
    ) -> HttpResponse | EventStream:
        service = self.service
        if service.settings.enable_log_requests:
            logger.info("request %s: %s", name, request.params)
        events = self._chunks(context, request, name, prompts, answer)
        if request.stream:
            return EventStream(events, keep_alive_s=service.settings.sse_keep_alive_interval)
        async with contextlib.aclosing(events):
            async for chunk in events:
                for choice in chunk["choices"]:
                    answer.fold(choice)
        (whole,) = await run_cooperatively(answer.whole())
        return json_response(whole)

    async def _chunks(
        self,
        context: RequestContext,
        request: ParsedRequest,
        name: str,
        prompts: Sequence[TokenizedPrompt],
        answer: ResponseBuilder,
    ) -> AsyncGenerator[Any, None]:
        run = self.service.run(request, prompts, name, context.salt, context.trace, context.tenant.number)
        async with contextlib.aclosing(run) as outputs:
            async for i, output in outputs:
                async for choice in iter_cooperatively(answer.take(i, output)):
                    yield answer.chunk([choice])
        if request.include_usage:
            yield answer.usage_chunk()

    async def responses(self, context: RequestContext) -> HttpResponse | EventStream:
        service, name = self.service, f"resp_{context.request_id}"
        await run_cooperatively(protocol.decode_tool_arguments(context.body))
        chat = to_chat(context.body, warn=service.request_parser.warn_unknown)
        try:
            request = service.request_parser.parse_chat(chat)
            prompt = await service.encode_chat(request.messages, request.template)
        except (ApiError, UsageError) as error:
            raise blamed(to_api_error(error, context.request_id)) from None
        making = ResponseEventBuilder(name, request.model, chat, context.body.get("instructions"))
        events = self._response_events(context, request, prompt, making)
        if request.stream:
            keep_alive_s = service.settings.sse_keep_alive_interval
            return EventStream(events, closing=b"", keep_alive_s=keep_alive_s, last_words=making.last_words)
        async with contextlib.aclosing(events):
            async for _ in events:
                pass
        return json_response(making.response)

    async def _response_events(
        self, context: RequestContext, request: ParsedRequest, prompt: TokenizedPrompt, making: ResponseEventBuilder
    ) -> AsyncGenerator[Any, None]:
        answer, reason, has_begun = self.service.chat_response(request, "", prompt), None, False
        try:
            run = self.service.run(
                request, [prompt], making.response["id"], context.salt, context.trace, context.tenant.number
            )
            async with contextlib.aclosing(run) as outputs:
                async for i, output in outputs:
                    if not has_begun:
                        has_begun = True
                        for event in making.begin():
                            yield event
                    async for choice in iter_cooperatively(answer.take(i, output)):
                        reason = choice["finish_reason"] or reason
                        for event in making.take(choice["delta"]):
                            yield event
        except ApiError as problem:
            raise blamed(problem) from None
        for event in making.finish(reason, answer.usage.as_dict(reasons=answer.reasons)):
            yield event

    # -- text ----------------------------------------------------------------------------------------------------------

    async def tokenize(self, context: RequestContext) -> HttpResponse:
        service = self.service
        given = parameters.read(context.body, parameters.TOKENIZE, warn=service.request_parser.warn_unknown)
        service.request_parser.resolve_model(context.body)
        if "messages" in given:
            await run_cooperatively(protocol.decode_tool_arguments(given))
            messages = protocol.parse_messages(given["messages"])
            template = service.request_parser.chat_template_options(given)
            if given.get("tools"):
                protocol.validate_tools(given["tools"])
                template["tools"] = given["tools"]
            token_ids = (await service.encode_chat(messages, template)).token_ids
        elif "prompt" in given:
            service.prompts.check_length(given["prompt"])
            (token_ids,) = await service.encode_texts([given["prompt"]], given.get("add_special_tokens", True))
        else:
            raise bad_request("missing_required_parameter", "prompt is missing; or give messages", "prompt")
        pieces = None
        if given.get("return_token_strs"):
            pieces = await service.texts.pieces(token_ids)
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": service.backend.max_model_len,
                "tokens": token_ids,
                "token_strs": pieces,
            }
        )

    async def detokenize(self, context: RequestContext) -> HttpResponse:
        service = self.service
        given = parameters.read(context.body, parameters.DETOKENIZE, warn=service.request_parser.warn_unknown)
        service.request_parser.resolve_model(context.body)
        if "tokens" not in given:
            raise bad_request("missing_required_parameter", "tokens is missing", "tokens")
        tokens = protocol.parse_token_ids(given["tokens"], "tokens")
        service.check_ids(tokens, "tokens")
        return json_response({"prompt": await service.decode(tokens, False)})

    # -- looking -------------------------------------------------------------------------------------------------------

    async def models(self, context: RequestContext) -> HttpResponse:
        return json_response({"object": "list", "data": [self._card(name) for name in self.service.names]})

    async def model(self, context: RequestContext) -> HttpResponse:
        name = context.path_params["model"]
        if not name:  # some clients end the path of the list with a slash
            return await self.models(context)
        if name not in self.service.names:
            raise ApiError(404, "model_not_found", f"The model `{name}` does not exist.", "model")
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "octavo",
            "root": self.service.names[0],
            "parent": None,
            "max_model_len": self.service.backend.max_model_len,
            "permission": [],
        }

    async def health(self, context: RequestContext) -> HttpResponse:
        """200 while the engine runs, or is being restarted and may come back."""
        health = self.service.backend.health()
        gone = health.state == "failed" or (health.state == "restarting" and health.since_s > RESTART_GRACE_S)
        return HttpResponse(b"", 503 if gone else 200, "text/plain; charset=utf-8")

    async def ready(self, context: RequestContext) -> HttpResponse:
        """503 whenever a request that is sent now would not get on, with the reason."""
        reason = self._why_not_ready()
        if reason is None:
            return json_response({"status": "ready"})
        reply = json_response({"status": "not ready", "reason": reason}, 503)
        reply.headers["retry-after"] = "1"
        return reply

    def _why_not_ready(self) -> str | None:
        admission, health = self.service.admission, self.service.backend.health()
        if admission.draining:
            return "shutting down"
        if health.state != "running":
            state = "has failed" if health.state == "failed" else f"is {health.state}"
            return f"the engine {state}" + (f": {redact_paths(health.reason)}" if health.reason else "")
        if health.last_step_age_s is not None and health.last_step_age_s > STALL_S:
            return f"no step for {health.last_step_age_s:.0f} s"
        return "the queue is full" if admission.is_full else None

    async def version(self, context: RequestContext) -> HttpResponse:
        return json_response({"version": octavo.__version__})

    async def load(self, context: RequestContext) -> HttpResponse:
        return json_response({"server_load": self.service.admission.num_requests})

    async def metrics(self, context: RequestContext) -> HttpResponse:
        service = self.service
        text = service.metrics.text(await service.backend.stats(), service.backend.health())
        return HttpResponse(text, content_type="text/plain; version=0.0.4; charset=utf-8")

    async def debug_request(self, context: RequestContext) -> HttpResponse:
        name, tenant = context.path_params["id"], context.tenant
        for known in (name, f"chatcmpl-{name}", f"cmpl-{name}", f"resp_{name}"):
            if not tenant.sees(known):  # as if there were none
                continue
            async with self._turns.of(tenant):
                found = await self.service.backend.debug_request(known)
            if found is not None:
                return json_response(tenant.request(found))
        raise not_found("request of this id that still runs or ran of late", "id")

    async def debug_kv(self, context: RequestContext) -> HttpResponse:
        return json_response(context.tenant.kv(await self._kv.get()))

    async def no_playground(self, context: RequestContext) -> HttpResponse:
        """A history is work and memory that a caller sizes, and no part of serving."""
        text = "a server has no playground; run `octavo view` on a machine of your own"
        raise ApiError(404, "unsupported_endpoint", text)

    async def elsewhere(self, context: RequestContext) -> HttpResponse:
        raise ApiError(404, "unsupported_endpoint", "the model generates text; there is /v1/completions and chat")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router says: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        problem = ApiError(405, "method_not_allowed", f"this path does not take {request.method[:16]}", headers=allowed)
    else:
        problem = not_found("such path; see /openapi.json")
    request.scope["state"]["context"].status = problem.status
    return Response(problem.body(), problem.status, problem.headers())


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document at /openapi.json, from the same table that bodies are read by."""

    def route(summary: str, body: str | None = None, *, of: str | None = None) -> dict[str, Any]:
        answers: dict[str, Any] = {"200": {"description": "OK"}}
        for status in ("400", "401", "404", "413", "415", "429", "503"):
            schema = {"$ref": "#/components/schemas/Error"}
            content = {"application/json": {"schema": schema}}
            answers[status] = {"description": "an error object", "content": content}
        operation: dict[str, Any] = {"summary": summary, "responses": answers}
        if of is not None:
            operation["parameters"] = [{"name": of, "in": "path", "required": True, "schema": {"type": "string"}}]
        if body is not None:
            schema = {"$ref": f"#/components/schemas/{body}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        return operation

    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": app.version},
        "paths": {
            "/v1/completions": {"post": route("Complete prompts", "CompletionRequest")},
            "/v1/chat/completions": {"post": route("Answer a conversation", "ChatRequest")},
            "/v1/responses": {"post": route("Answer a conversation, in newer words", "ResponseRequest")},
            "/v1/models": {"get": route("The models served")},
            "/v1/models/{model}": {"get": route("One of them", of="model")},
            "/tokenize": {"post": route("Text to token ids", "TokenizeRequest")},
            "/detokenize": {"post": route("Token ids to text", "DetokenizeRequest")},
            "/health": {"get": route("Whether the engine lives")},
            "/ping": {"get": route("The same")},
            "/ready": {"get": route("Whether a request would get on")},
            "/version": {"get": route("The server's version")},
            "/load": {"get": route("Requests in flight")},
            "/metrics": {"get": route("Numbers for Prometheus")},
            "/debug/kv": {"get": route("The block pool")},
            "/debug/requests/{id}": {"get": route("What became of a request", of="id")},
        },
        "components": {
            "schemas": parameters.schemas() | {"ResponseRequest": parameters.body(RESPONSE_FIELDS, "input")}
        },
    }
