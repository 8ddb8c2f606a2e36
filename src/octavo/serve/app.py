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
from octavo.serve.debug_queries import SharedAnswer, Turns
from octavo.serve.http.allowed_hosts import Hosts
from octavo.serve.http.endpoint import Endpoint, Exchange, Handler, Reply, Running, Stream, as_json
from octavo.serve.http.json_worker import BodyWorker
from octavo.serve.http.middleware import OPEN_PATHS, Guard, Keys
from octavo.serve.openai import request as protocol
from octavo.serve.openai import schema as parameters
from octavo.serve.openai.errors import Problem, bad, not_found, without_paths
from octavo.serve.openai.errors import of as problem_of
from octavo.serve.openai.request import Ask
from octavo.serve.openai.response import Answer
from octavo.serve.openai.responses_api import FIELDS as RESPONSE_FIELDS
from octavo.serve.openai.responses_api import ResponseEvents, blamed, to_chat
from octavo.serve.service import Encoded, Service
from octavo.serve.view_routes import EVENTS, View
from octavo.view.live.hub import Hub

logger = logging.getLogger("octavo.serve")

RESTART_GRACE_S = 60.0
"""An engine that has been restarting for longer counts as gone."""
STALL_S = 10.0
"""Seconds without a step, while there is work, after which a request sent now is not promised any progress."""
ELSEWHERE = (
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

    def __init__(self, service: Service, keys: Keys | None = None) -> None:
        self.service = service
        self.running: set[Running] = set()
        self.bodies = BodyWorker()
        service.admission.several = keys is not None and len(keys) > 1
        self._turns, self._kv = Turns(), SharedAnswer(service.backend.debug_kv)
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
        for path in ELSEWHERE:
            self._add(app, "POST", path, self.elsewhere)
        app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
        self.fastapi = app
        self.asgi = Guard(
            app,
            keys=keys or Keys(()),
            metrics=service.metrics,
            open_paths=OPEN_PATHS | ({b"/metrics"} if settings.metrics_public else set()),
            quiet_paths=settings.disable_access_log_for_endpoints,
            origins=settings.allowed_origins,
            hosts=Hosts.of(settings.allowed_hosts, host=settings.host, uds=settings.uds, has_keys=bool(keys)),
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

    async def completions(self, exchange: Exchange) -> Reply | Stream:
        ask = self.service.rules.completion(exchange.body)
        name = f"cmpl-{exchange.request_id}"
        prompts = await self.service.encode(ask)
        return await self._generate(exchange, ask, name, prompts, self.service.completion_answer(ask, name))

    async def chat_completions(self, exchange: Exchange) -> Reply | Stream:
        await run_cooperatively(protocol.read_arguments(exchange.body))
        ask = self.service.rules.chat(exchange.body)
        name = f"chatcmpl-{exchange.request_id}"
        prompt = await self.service.encode_chat(ask.messages, ask.template, ask.truncate)
        answer = self.service.chat_answer(ask, name, prompt)
        return await self._generate(exchange, ask, name, [prompt], answer)

    async def _generate(
        self, exchange: Exchange, ask: Ask, name: str, prompts: Sequence[Encoded], answer: Answer
    ) -> Reply | Stream:
        service = self.service
        if service.settings.enable_log_requests:
            logger.info("request %s: %s", name, ask.params)
        events = self._chunks(exchange, ask, name, prompts, answer)
        if ask.stream:
            return Stream(events, keep_alive_s=service.settings.sse_keep_alive_interval)
        async with contextlib.aclosing(events):
            async for chunk in events:
                for choice in chunk["choices"]:
                    answer.fold(choice)
        (whole,) = await run_cooperatively(answer.whole())
        return as_json(whole)

    async def _chunks(
        self, exchange: Exchange, ask: Ask, name: str, prompts: Sequence[Encoded], answer: Answer
    ) -> AsyncGenerator[Any, None]:
        run = self.service.run(ask, prompts, name, exchange.salt, exchange.trace, exchange.tenant.number)
        async with contextlib.aclosing(run) as outputs:
            async for i, output in outputs:
                async for choice in iter_cooperatively(answer.take(i, output)):
                    yield answer.chunk([choice])
        if ask.include_usage:
            yield answer.usage_chunk()

    async def responses(self, exchange: Exchange) -> Reply | Stream:
        service, name = self.service, f"resp_{exchange.request_id}"
        await run_cooperatively(protocol.read_arguments(exchange.body))
        chat = to_chat(exchange.body, warn=service.rules.warn_of_unknown)
        try:
            ask = service.rules.chat(chat)
            prompt = await service.encode_chat(ask.messages, ask.template)
        except (Problem, UsageError) as error:
            raise blamed(problem_of(error, exchange.request_id)) from None
        making = ResponseEvents(name, ask.model, chat, exchange.body.get("instructions"))
        events = self._response_events(exchange, ask, prompt, making)
        if ask.stream:
            keep_alive_s = service.settings.sse_keep_alive_interval
            return Stream(events, closing=b"", keep_alive_s=keep_alive_s, last_words=making.last_words)
        async with contextlib.aclosing(events):
            async for _ in events:
                pass
        return as_json(making.response)

    async def _response_events(
        self, exchange: Exchange, ask: Ask, prompt: Encoded, making: ResponseEvents
    ) -> AsyncGenerator[Any, None]:
        answer, reason, has_begun = self.service.chat_answer(ask, "", prompt), None, False
        try:
            run = self.service.run(
                ask, [prompt], making.response["id"], exchange.salt, exchange.trace, exchange.tenant.number
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
        except Problem as problem:
            raise blamed(problem) from None
        for event in making.finish(reason, answer.usage.as_dict(reasons=answer.reasons)):
            yield event

    # -- text ----------------------------------------------------------------------------------------------------------

    async def tokenize(self, exchange: Exchange) -> Reply:
        service = self.service
        given = parameters.read(exchange.body, parameters.TOKENIZE, warn=service.rules.warn_of_unknown)
        service.rules.model_of(exchange.body)
        if "messages" in given:
            await run_cooperatively(protocol.read_arguments(given))
            messages = protocol.messages_of(given["messages"])
            template = service.rules.template_of(given)
            if given.get("tools"):
                protocol.check_tools(given["tools"])
                template["tools"] = given["tools"]
            token_ids = (await service.encode_chat(messages, template)).token_ids
        elif "prompt" in given:
            service.prompts.check_length(given["prompt"])
            (token_ids,) = await service.encode_texts([given["prompt"]], given.get("add_special_tokens", True))
        else:
            raise bad("missing_required_parameter", "prompt is missing; or give messages", "prompt")
        pieces = None
        if given.get("return_token_strs"):
            pieces = await service.texts.pieces(token_ids)
        return as_json(
            {
                "count": len(token_ids),
                "max_model_len": service.backend.max_model_len,
                "tokens": token_ids,
                "token_strs": pieces,
            }
        )

    async def detokenize(self, exchange: Exchange) -> Reply:
        service = self.service
        given = parameters.read(exchange.body, parameters.DETOKENIZE, warn=service.rules.warn_of_unknown)
        service.rules.model_of(exchange.body)
        if "tokens" not in given:
            raise bad("missing_required_parameter", "tokens is missing", "tokens")
        tokens = protocol.token_ids_of(given["tokens"], "tokens")
        service.check_ids(tokens, "tokens")
        return as_json({"prompt": await service.decode(tokens, False)})

    # -- looking -------------------------------------------------------------------------------------------------------

    async def models(self, exchange: Exchange) -> Reply:
        return as_json({"object": "list", "data": [self._card(name) for name in self.service.names]})

    async def model(self, exchange: Exchange) -> Reply:
        name = exchange.path_params["model"]
        if not name:  # some clients end the path of the list with a slash
            return await self.models(exchange)
        if name not in self.service.names:
            raise Problem(404, "model_not_found", f"The model `{name}` does not exist.", "model")
        return as_json(self._card(name))

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

    async def health(self, exchange: Exchange) -> Reply:
        """200 while the engine runs, or is being restarted and may come back."""
        health = self.service.backend.health()
        gone = health.state == "failed" or (health.state == "restarting" and health.since_s > RESTART_GRACE_S)
        return Reply(b"", 503 if gone else 200, "text/plain; charset=utf-8")

    async def ready(self, exchange: Exchange) -> Reply:
        """503 whenever a request that is sent now would not get on, with the reason."""
        reason = self._why_not_ready()
        if reason is None:
            return as_json({"status": "ready"})
        reply = as_json({"status": "not ready", "reason": reason}, 503)
        reply.headers["retry-after"] = "1"
        return reply

    def _why_not_ready(self) -> str | None:
        admission, health = self.service.admission, self.service.backend.health()
        if admission.draining:
            return "shutting down"
        if health.state != "running":
            state = "has failed" if health.state == "failed" else f"is {health.state}"
            return f"the engine {state}" + (f": {without_paths(health.reason)}" if health.reason else "")
        if health.last_step_age_s is not None and health.last_step_age_s > STALL_S:
            return f"no step for {health.last_step_age_s:.0f} s"
        return "the queue is full" if admission.is_full else None

    async def version(self, exchange: Exchange) -> Reply:
        return as_json({"version": octavo.__version__})

    async def load(self, exchange: Exchange) -> Reply:
        return as_json({"server_load": self.service.admission.num_requests})

    async def metrics(self, exchange: Exchange) -> Reply:
        service = self.service
        text = service.metrics.text(await service.backend.stats(), service.backend.health())
        return Reply(text, content_type="text/plain; version=0.0.4; charset=utf-8")

    async def debug_request(self, exchange: Exchange) -> Reply:
        name, tenant = exchange.path_params["id"], exchange.tenant
        for known in (name, f"chatcmpl-{name}", f"cmpl-{name}", f"resp_{name}"):
            if not tenant.sees(known):  # as if there were none
                continue
            async with self._turns.of(tenant):
                found = await self.service.backend.debug_request(known)
            if found is not None:
                return as_json(tenant.request(found))
        raise not_found("request of this id that still runs or ran of late", "id")

    async def debug_kv(self, exchange: Exchange) -> Reply:
        return as_json(exchange.tenant.kv(await self._kv.get()))

    async def no_playground(self, exchange: Exchange) -> Reply:
        """A history is work and memory that a caller sizes, and no part of serving."""
        text = "a server has no playground; run `octavo view` on a machine of your own"
        raise Problem(404, "unsupported_endpoint", text)

    async def elsewhere(self, exchange: Exchange) -> Reply:
        raise Problem(404, "unsupported_endpoint", "the model generates text; there is /v1/completions and chat")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router says: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        problem = Problem(405, "method_not_allowed", f"this path does not take {request.method[:16]}", headers=allowed)
    else:
        problem = not_found("such path; see /openapi.json")
    request.scope["state"]["exchange"].status = problem.status
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
