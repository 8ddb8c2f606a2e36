"""Errors that depend on the server's options or its bugs; test_error_table has those of bodies."""

from __future__ import annotations

import json
import operator
import re
from typing import Any

import httpx
import pytest

from octavo.serve.args import ServeArgs
from octavo.serve.http import endpoint
from octavo.serve.openai.errors import MAX_ERROR_BYTES, ApiError
from tests.serve.in_process_server import LONGEST, Server, good, serving
from tests.serve.openai.test_error_table import MESSAGES, checked_error

C, H = "/v1/completions", "/v1/chat/completions"


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    return checked_error(response.status_code, response.headers, response.content)


async def is_unmoved(server: Server) -> None:
    """Afterwards the server works as before and holds no blocks."""
    await server.complete()
    await server.at_rest()


TYPE_OF = {"string": str, "array": list, "object": dict, "null": type(None), "integer": int}


def fits(schema: dict[str, Any], value: Any) -> bool:
    """The subset of JSON Schema that messages need."""
    kinds = schema.get("type", list(TYPE_OF))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    inside = value if isinstance(value, dict) else {}
    return (
        isinstance(value, tuple(TYPE_OF[kind] for kind in kinds))
        and ("enum" not in schema or value in schema["enum"])
        and ("const" not in schema or value == schema["const"])
        and ("not" not in schema or not fits(schema["not"], value))
        and ("minimum" not in schema or value >= schema["minimum"])
        and ("anyOf" not in schema or any(fits(choice, value) for choice in schema["anyOf"]))
        and all(name in inside for name in schema.get("required", ()))
        and all(fits(part, inside[name]) for name, part in schema.get("properties", {}).items() if name in inside)
    )


async def test_openapi_document_matches_the_parser(model: str) -> None:
    contents: list[dict[str, Any]] = [{}, *({"content": c} for c in (None, "a", [{"type": "text", "text": "a"}], 7))]
    async with serving(model) as server:
        schemas = good(await server.client.get("/openapi.json"))["components"]["schemas"]
        properties = schemas["ChatRequest"]["properties"]
        assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1e30}
        assert properties["logprobs"]["anyOf"][0] == {"type": "boolean"}
        num_taken = 0
        for role in ("system", "user", "assistant", "tool", "king"):
            for content in contents:
                message = {"role": role, **content}
                response = await server.post("/tokenize", messages=[message])
                num_taken += response.status_code == 200
                assert fits(schemas["Message"], message) == (response.status_code == 200), message
        assert num_taken == 5 * 2 + 2  # an assistant's content may be null
        nameless = [{"type": "function", "function": {"description": "d"}}]
        for prompt in ({"prompt": "ab"}, {"messages": MESSAGES}):
            assert (await server.post("/tokenize", tools=nameless, **prompt)).status_code == 400
        for number in (-2, -1, 0, 1):
            response = await server.post(C, prompt="ab", max_tokens=1, truncate_prompt_tokens=number)
            schema = schemas["CompletionRequest"]["properties"]["truncate_prompt_tokens"]
            assert fits(schema, number) == (response.status_code == 200), number


async def test_bodies_up_to_the_limit_are_read(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LINGER_S", 0.01)
    headers = {"content-type": "application/json"}
    async with serving(model, max_body_bytes=1000) as server:
        for length in (1000, 1001, 100_000):

            async def chunks(length: int = length) -> Any:
                for begin in range(0, length, 300):
                    yield b" " * min(300, length - begin)

            for content in (b" " * length, chunks()):
                response = await server.client.post(C, content=content, headers=headers)
                expected = (400, "invalid_json", None) if length == 1000 else (413, "body_too_large", None)
                assert error_of(response) == expected
                assert length == 1000 or response.headers["connection"] == "close"
    assert ServeArgs().body_limit(1024) == 64 * 1024 + 32 * 1024
    assert ServeArgs().body_limit(1 << 20) == 8 << 20


async def test_kv_capacity_and_context_length_errors_differ(model: str) -> None:
    async with serving(model, engine_options={"num_gpu_blocks_override": 10}) as server:
        limit = server.engine.max_model_len
        response = await server.post(C, prompt="a" * 41, max_tokens=5)
        assert error_of(response)[:2] in ((400, "exceeds_kv_capacity"), (400, "context_length_exceeded"))
        assert limit <= LONGEST
        response = await server.post(C, prompt="a" * 30, max_tokens=4, n=16)
        assert error_of(response) == (400, "exceeds_kv_capacity", "prompt")
        response = await server.post(H, messages=[{"role": "user", "content": "a" * 24}], max_tokens=4, n=16)
        assert error_of(response) == (400, "exceeds_kv_capacity", "messages")
        await is_unmoved(server)


async def test_stricter_and_more_lenient_options(model: str) -> None:
    async with serving(model, strict_openai=True) as server:
        assert error_of(await server.post(C, prompt="a")) == (400, "missing_required_parameter", "model")
        for change, code, param in (
            ({"stop": list("abcde")}, "array_above_max_length", "stop"),
            ({"logprobs": 6}, "invalid_value", "logprobs"),
            ({"model": None}, "missing_required_parameter", "model"),
            ({"model": ""}, "missing_required_parameter", "model"),
            ({"temperature": 2.5}, "decimal_out_of_range", "temperature"),
        ):
            assert error_of(await server.post(C, **{"model": "tiny", "prompt": "a", **change})) == (400, code, param)
    async with serving(model, unknown_params="warn", trust_request_chat_template=True) as server:
        await server.complete(temprature=1)
        for change, param in (({"suffix": "a", "temprature": 1}, "suffix"), ({"tools": "a"}, "tools")):
            assert error_of(await server.post(C, prompt="a", **change)) == (400, "unsupported_parameter", param)
        message = {"role": "user", "content": "a", "colour": 1}
        assert (await server.post(H, messages=[message], max_tokens=1)).status_code == 200
        answer = await server.chat("abc", chat_template="{{ messages[0].content }}", logprobs=True)
        assert answer["usage"]["prompt_tokens"] == 3
    async with serving(model, engine_options={"scheduling_policy": "priority"}) as server:
        await server.complete(priority=-5)
        answer = await server.post(H, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
        assert error_of(answer) == (400, "unsupported_parameter", "tools")
    async with serving(model, engine_options={"chat_template": None}) as server:
        assert error_of(await server.post(H, messages=MESSAGES)) == (400, "no_chat_template", "messages")


@pytest.mark.parametrize("part", ["service.request_parser", "service.encode", "service.generate"])
async def test_bugs_become_internal_errors(model: str, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A bug while the body is parsed, before the engine is called, or in it."""

    def bug(*args: Any) -> Any:
        raise RuntimeError("the secret is 42")

    async with serving(model) as server:
        holder, _, name = f"app.{part}".rpartition(".")
        with monkeypatch.context() as patch:
            patch.setattr(operator.attrgetter(holder)(server), name, bug)
            response = await server.post(C, prompt="a")
        assert error_of(response) == (500, "internal_error", None) and "secret" not in response.text
        assert response.headers["x-should-retry"] == "false"
        await server.complete()


def test_error_body_is_at_most_4_kib() -> None:
    for text in ("x" * 100_000, "\u20ac" * 4000, '"' * 4000, "\ud800" * 2000, "\x00\n" * 3000):
        body = ApiError(400, "c", text, text).body()
        assert len(body) <= MAX_ERROR_BYTES and json.loads(body)["error"]["code"] == "c"


async def test_errors_use_the_names_that_the_client_sent(model: str) -> None:
    a, form = {"regex": "a"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": None}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"bad_words": ["a"], "structured_outputs": a}, "bad_words"),
        ({"bad_words": ["1"], "response_format": form}, "bad_words"),
        ({"allowed_token_ids": [5], "structured_outputs": a}, "allowed_token_ids"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
        ({"n": 17, "use_beam_search": True}, "n"),
        ({"beam_width": 17, "use_beam_search": True}, "beam_width"),
        ({"best_of": 17}, "best_of"),
        ({**chat, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({**chat, "max_completion_tokens": 5, "max_tokens": -1}, ""),
        ({**chat, "max_completion_tokens": 10**400}, "max_completion_tokens"),
        ({**chat, "max_completion_tokens": 600}, "max_completion_tokens"),
    )
    async with serving(model) as server:
        for body, param in cases:
            path, prompt = (H, {}) if "messages" in body else (C, {"prompt": "a"})
            response = await server.post(path, **{"max_tokens": 4, **prompt, **body})
            found = error_of(response)[2] if response.status_code != 200 else ""
            assert found == param, (body, response.text)
            other = {"max_completion_tokens": "max_tokens", "prompt_logprobs": "logprobs", "best_of": "n"}.get(
                param, "nothing"
            )
            assert not re.search(rf"\b{other}\b", response.text), response.text


async def test_long_texts_are_cut(model: str) -> None:
    words = "word " * 100
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (C, {"prompt": "a", "model": words}),
        (C, {"prompt": "a", "use_beam_search": True, "early_stopping": words}),
        (C, {"prompt": "a", "response_format": {"type": words}}),
        (H, {"messages": [{"role": words, "content": "a"}]}),
        (H, {"messages": [{"role": "user", "content": [{"type": words}]}]}),
        (H, {"messages": MESSAGES, "tool_choice": words}),
        (H, {"messages": MESSAGES, "tools": [{"type": words}]}),
    )
    async with serving(model) as server:
        for path, body in cases:
            response = await server.post(path, **body)
            assert response.status_code in (400, 404) and response.text.count("word") < 25, response.text


def test_long_numbers_and_names_are_cut() -> None:
    text = f"n is 1{'0' * 400}; the model `{'m' * 99}` with {'x' * 100}"
    message = ApiError(400, "invalid_value", text).as_dict()["error"]["message"]
    assert message == f"n is 1{'0' * 59}...; the model `{'m' * 99}` with {'x' * 60}..."
