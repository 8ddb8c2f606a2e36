"""Every invalid request has its error: status, type, code and param, in a body of at most 4 KiB."""

from __future__ import annotations

import json
import operator
from typing import Any

import httpx
import pytest

from octavo.serve.args import ServeArgs
from octavo.serve.http import endpoint
from octavo.serve.openai.errors import MAX_ERROR_BYTES, ApiError, to_api_error
from tests.serve.in_process_server import LONGEST, Server, good, run, serving

C, H = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 500: "server_error"}


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Checks the common properties of errors."""
    assert len(response.content) <= MAX_ERROR_BYTES
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["message"] and "\n" not in error["message"]
    assert error["type"] == ERROR_TYPES.get(response.status_code, "invalid_request_error")
    return response.status_code, error["code"], error["param"]


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def nested(levels: int) -> str:
    """The arguments of a tool call."""
    return '{"a":' * levels + "1" + "}" * levels


# Raw bodies: (body, code, param).
RAW: list[tuple[bytes, str, str | None]] = [
    (b"", "invalid_json", None),
    (b"  ", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b'{"prompt": "a",}', "invalid_json", None),
    (b'{"prompt": "a"} x', "invalid_json", None),
    (b"[]", "invalid_type", None),
    (b"null", "invalid_type", None),
    (b"7", "invalid_type", None),
    (b'"text"', "invalid_type", None),
    (b'{"prompt": "\xff"}', "invalid_encoding", None),
    ('{"prompt": "a"}'.encode("utf-16"), "invalid_encoding", None),
    ('{"prompt": "a"}'.encode("utf-16-le"), "invalid_encoding", None),
    ('{"prompt": "a"}'.encode("utf-32"), "invalid_encoding", None),
    (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_encoding", None),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "temperature"),
    (b'{"prompt": "a", "temperature": Infinity}', "invalid_json", "temperature"),
    (b'{"prompt": "a", "top_p": -Infinity}', "invalid_json", "top_p"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_json", "temperature"),
    (b'{"prompt": "a", "logit_bias": {"5": NaN}}', "invalid_json", "logit_bias.5"),
    (b'{"prompt": "a", "priority": NaN}', "invalid_json", "priority"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "integer_out_of_range", "seed"),
    (rb'{"prompt": "a\ud800"}', "invalid_unicode", "prompt"),
    (rb'{"prompt": ["a", "\udc00b"]}', "invalid_unicode", "prompt[1]"),
    (rb'{"prompt": "a", "stop": "\ud83d"}', "invalid_unicode", "stop"),
    (rb'{"prompt": "a", "user": "\ud800"}', "invalid_unicode", "user"),
    (rb'{"prompt": "a", "cache_salt": "\ud800"}', "invalid_unicode", "cache_salt"),
    (b'{"prompt": "a", "prompt": "b"}', "duplicate_key", "prompt"),
    (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "duplicate_key", "1"),
    (b'{"prompt": ' + deep(64).encode() + b"}", "too_deep", None),
    (b'{"prompt": ' + deep(100_000).encode() + b"}", "too_deep", None),
    (b'{"metadata": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}", "too_deep", None),
]

# Completions: (changes to a valid body, code, param). DROP removes the parameter.
DROP = object()
COMPLETIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": None}, "missing_required_parameter", "model"),
    ({"model": ""}, "missing_required_parameter", "model"),
    ({"model": 3}, "invalid_type", "model"),
    ({"temprature": 1}, "unknown_parameter", "temprature"),
    ({"x" * 5000: 1}, "unknown_parameter", "x" * 128),
    ({"suffix": "end"}, "unsupported_parameter", "suffix"),
    ({"audio": {}}, "unsupported_parameter", "audio"),
    ({"guided_json": {}}, "unsupported_parameter", "guided_json"),
    ({"messages": MESSAGES}, "unsupported_parameter", "messages"),
    ({"n": True}, "invalid_type", "n"),
    ({"n": "7"}, "invalid_type", "n"),
    ({"n": 2.0}, "invalid_type", "n"),
    ({"max_tokens": 2.5}, "invalid_type", "max_tokens"),
    ({"echo": 1}, "invalid_type", "echo"),
    ({"temperature": "hot"}, "invalid_type", "temperature"),
    ({"stop": {}}, "invalid_type", "stop"),
    ({"prompt": DROP}, "missing_required_parameter", "prompt"),
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": ["a", ""]}, "empty_prompt", "prompt"),
    ({"prompt": 5}, "invalid_type", "prompt"),
    ({"prompt": {}}, "invalid_type", "prompt"),
    ({"prompt": []}, "empty_array", "prompt"),
    ({"prompt": [[]]}, "empty_array", "prompt"),
    ({"prompt": ["a", []]}, "invalid_type", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt"),
    ({"prompt": [[1], "a"]}, "invalid_type", "prompt"),
    ({"prompt": [[[1]]]}, "invalid_type", "prompt"),
    ({"prompt": [None]}, "invalid_type", "prompt"),
    ({"prompt": ["a"] * 257}, "array_above_max_length", "prompt"),
    ({"prompt": [[1]] * 257}, "array_above_max_length", "prompt"),
    ({"prompt": [5, -1]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [97]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [1 << 31]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [1 << 63]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [5, True]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [True]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [1.5]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [[5], [5, 97]]}, "invalid_token_id", "prompt[1][1]"),
    ({"prompt": "a" * LONGEST, "max_tokens": None}, "context_length_exceeded", "prompt"),
    ({"prompt": "a" * 50_000}, "context_length_exceeded", "prompt"),
    ({"prompt": "a" * 100, "max_tokens": 29}, "context_length_exceeded", "max_tokens"),
    ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    ({"min_tokens": 9}, "invalid_value", "min_tokens"),
    ({"min_tokens": 500, "max_tokens": None}, "invalid_value", "min_tokens"),
    ({"n": 0}, "integer_out_of_range", "n"),
    ({"n": -1}, "integer_out_of_range", "n"),
    ({"n": 129}, "integer_out_of_range", "n"),
    ({"n": 10**6}, "integer_out_of_range", "n"),
    ({"n": 1 << 63}, "integer_out_of_range", "n"),
    ({"n": 17}, "integer_out_of_range", "n"),
    ({"n": 3, "best_of": 2}, "invalid_value", "best_of"),
    ({"best_of": 21}, "invalid_value", "best_of"),
    ({"best_of": 2, "stream": True}, "invalid_value", "best_of"),
    ({"best_of": 2, "use_beam_search": True, "n": 2}, "invalid_value", "best_of"),
    ({"use_beam_search": True, "beam_width": 0}, "invalid_value", "beam_width"),
    ({"use_beam_search": True, "beam_width": 98}, "integer_out_of_range", "beam_width"),
    ({"use_beam_search": True, "beam_width": 2, "n": 3}, "invalid_value", "beam_width"),
    ({"use_beam_search": True, "temperature": 0.5}, "invalid_value", "use_beam_search"),
    ({"use_beam_search": True, "top_p": 0.5}, "invalid_value", "use_beam_search"),
    ({"use_beam_search": True, "seed": 1}, "invalid_value", "use_beam_search"),
    ({"use_beam_search": True, "stream": True}, "invalid_value", "stream"),
    ({"use_beam_search": True, "echo": True}, "invalid_value", "echo"),
    ({"use_beam_search": True, "presence_penalty": 1}, "invalid_value", "presence_penalty"),
    ({"beam_width": 2, "use_beam_search": False}, "invalid_value", "beam_width"),
    ({"temperature": -0.1}, "decimal_out_of_range", "temperature"),
    ({"temperature": 2.1}, "decimal_out_of_range", "temperature"),
    ({"temperature": 1e308}, "decimal_out_of_range", "temperature"),
    ({"temperature": 10**400}, "decimal_out_of_range", "temperature"),
    ({"top_p": -(10**400)}, "decimal_out_of_range", "top_p"),
    ({"use_beam_search": True, "n": 2, "length_penalty": 10**400}, "decimal_out_of_range", "length_penalty"),
    ({"top_p": -1}, "decimal_out_of_range", "top_p"),
    ({"top_p": 1.0000001}, "decimal_out_of_range", "top_p"),
    ({"top_k": -2}, "decimal_out_of_range", "top_k"),
    ({"top_k": 1 << 40}, "decimal_out_of_range", "top_k"),
    ({"top_k": 1 << 31}, "decimal_out_of_range", "top_k"),
    ({"use_beam_search": True, "n": 2, "length_penalty": 31}, "decimal_out_of_range", "length_penalty"),
    ({"use_beam_search": True, "n": 2, "early_stopping": 1}, "invalid_value", "early_stopping"),
    ({"min_p": -1}, "decimal_out_of_range", "min_p"),
    ({"min_p": 2}, "decimal_out_of_range", "min_p"),
    ({"seed": 1 << 63}, "integer_out_of_range", "seed"),
    ({"seed": 1.5}, "integer_out_of_range", "seed"),
    ({"logprobs": -1}, "invalid_value", "logprobs"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"logprobs": True}, "invalid_value", "logprobs"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"logit_bias": {"abc": 1}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": {"97": 1}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": {"1e3": 1}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "invalid_logit_bias", "logit_bias"),
    ({"logit_bias": [5]}, "invalid_logit_bias", "logit_bias"),
    ({"allowed_token_ids": [97]}, "invalid_token_id", "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "invalid_token_id", "allowed_token_ids"),
    ({"allowed_token_ids": []}, "no_allowed_token", "allowed_token_ids"),
    ({"stop": ["a"] * 65}, "array_above_max_length", "stop"),
    ({"stop": ["a"] * 10_000}, "array_above_max_length", "stop"),
    ({"stop": [""]}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [7]}, "invalid_value", "stop"),
    ({"stop": "a" * 10_000}, "invalid_value", "stop"),
    ({"stop_token_ids": [97]}, "invalid_token_id", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "invalid_token_id", "stop_token_ids"),
    ({"stream": "true"}, "invalid_type", "stream"),
    ({"stream": 1}, "invalid_type", "stream"),
    ({"stream_options": {}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_value", "stream_options"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": "s" * 10_000}, "invalid_value", "cache_salt"),
    ({"cache_salt": "a\u0007"}, "invalid_value", "cache_salt"),
    ({"cache_salt": 7}, "invalid_value", "cache_salt"),
    ({"priority": 1}, "invalid_value", "priority"),
    ({"priority": 10**30}, "invalid_value", "priority"),
    ({"response_format": {"type": "yaml"}}, "invalid_json_schema", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "invalid_json_schema", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
        "invalid_json_schema",
        "response_format",
    ),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "invalid_value", "structured_outputs"),
    ({"truncate_prompt_tokens": 0}, "integer_out_of_range", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, "integer_out_of_range", "truncate_prompt_tokens"),
]

CHATS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": DROP}, "missing_required_parameter", "messages"),
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "empty_array", "messages"),
    ({"messages": "Hi"}, "invalid_type", "messages"),
    ({"messages": MESSAGES * 5000}, "array_above_max_length", "messages"),
    ({"messages": ["Hi"]}, "invalid_type", "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [*MESSAGES, {"content": "a"}]}, "invalid_value", "messages[1].role"),
    ({"messages": [{"role": "__proto__", "content": "a"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "invalid_type", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "unknown_parameter", "messages[0].colour"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "invalid_value",
        "messages[0].tool_calls[0].function.arguments",
    ),
    *(
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(n)}}]}]},
            "invalid_value",
            "messages[0].tool_calls[0].function.arguments",
        )
        for n in (65, 900, 5000)
    ),
    *(
        (
            {"messages": [{"role": role, "content": "", "tool_calls": calls}]},
            "invalid_type",
            "messages[0].tool_calls",
        )
        for role, calls in (("tool", False), ("assistant", 0), ("assistant", ""), ("user", {}))
    ),
    ({"messages": [{"role": "user", "content": "a" * 200}]}, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "a" * 100}], "max_tokens": 50}, "context_length_exceeded", "max_tokens"),
    ({"chat_template": "{{ 1 }}"}, "template_not_allowed", "chat_template"),
    ({"chat_template_kwargs": {"a": [1]}}, "invalid_value", "chat_template_kwargs"),
    *(
        ({"chat_template_kwargs": {name: "x"}}, "invalid_value", "chat_template_kwargs")
        for name in ("self", "messages", "tools", "template", "special_tokens", "loop", "caller", "__class__")
    ),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": 1}, "invalid_value", "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "invalid_value", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "invalid_value", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "invalid_value", "tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    ({"prompt": "a"}, "unsupported_parameter", "prompt"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "invalid_value", "continue_final_message"),
]


def changed(body: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (body | change).items() if value is not DROP}


async def is_unmoved(server: Server) -> None:
    """Afterwards the server works as before and holds no blocks."""
    await server.complete()
    await server.at_rest()


def test_bodies_that_are_not_json_objects(model: str) -> None:
    async def main() -> None:
        async with serving(model) as server:
            for raw, code, param in RAW:
                headers = {"content-type": "application/json"}
                limit = server.app.service.settings.body_limit(LONGEST)
                if len(raw) > limit:
                    continue
                response = await server.client.post(C, content=raw, headers=headers)
                assert error_of(response) == (400, code, param), raw[:80]
            await is_unmoved(server)

    run(main())


def test_depth_limit_is_inclusive(model: str) -> None:
    async def main() -> None:
        async with serving(model, max_body_bytes=1 << 20) as server:
            headers = {"content-type": "application/json"}
            for levels, status in ((63, 200), (64, 400), (100_000, 400)):
                raw = f'{{"prompt": "a", "max_tokens": 1, "metadata": {deep(levels)}}}'.encode()
                response = await server.client.post(C, content=raw, headers=headers)
                assert response.status_code == status
            wide = json.dumps({"prompt": "a[[[[" * 9, "max_tokens": 1, "metadata": {str(i): [[]] for i in range(99)}})
            assert (await server.client.post(C, content=wide, headers=headers)).status_code == 200

    run(main())


@pytest.mark.parametrize(("path", "cases"), [(C, COMPLETIONS), (H, CHATS)], ids=["completions", "chats"])
def test_invalid_parameters(model: str, path: str, cases: list[tuple[dict[str, Any], str, str | None]]) -> None:
    good_body: dict[str, Any] = {"max_tokens": 8} | ({"prompt": "Hi"} if path == C else {"messages": MESSAGES})

    async def main() -> None:
        async with serving(model, max_body_bytes=1 << 20) as server:
            for change, code, param in cases:
                response = await server.client.post(path, json=changed(good_body, change))
                assert error_of(response) == (400, code, param), (str(change)[:200], response.text)
            response = await server.client.post(path, json={**good_body, "model": "other"})
            assert error_of(response) == (404, "model_not_found", "model")
            assert "The model `other` does not exist." in response.text
            await is_unmoved(server)

    run(main())


def test_unusual_but_valid_parameters(model: str) -> None:
    async def main() -> None:
        async with serving(model) as server:
            for arguments in (nested(64), '{"a": "' + "[" * 99 + '"}', ""):
                call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
                messages = [
                    *MESSAGES,
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "assistant", "content": None},
                ]
                good(await server.post(H, messages=messages, max_tokens=1))
            for body in (
                {"prompt": "a\u0000b\u0007"},
                {
                    "prompt": "Hi",
                    "model": "tiny",
                    "user": "u",
                    "store": True,
                    "metadata": {"a": 1},
                    "service_tier": "auto",
                },
                {"prompt": "Hi", "stream": None, "n": None, "stop": None, "temperature": None, "suffix": None},
                {"prompt": "Hi", "temperature": -0.0},
                {"prompt": "Hi", "temperature": 1e-45},
                {"prompt": "Hi", "top_p": 0},
                {"prompt": "Hi", "top_k": -1},
                {"prompt": "Hi", "seed": -(1 << 63)},
                {"prompt": "Hi", "seed": (1 << 63) - 1},
                {"prompt": "Hi", "temperature": 0, "n": 3},
                {"prompt": "Hi", "max_tokens": 0, "echo": True},
                {"prompt": "Hi", "max_tokens": 0, "prompt_logprobs": 0},
                {"prompt": "Hi", "min_tokens": 3, "max_tokens": None},
                {"prompt": "Hi", "priority": 0},
                {"prompt": "a" * 127},
            ):
                full = {"max_tokens": 1, **body}
                good(await server.client.post(C, json=full))
            await server.at_rest()

    run(main())


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
        and ("minimum" not in schema or value >= schema["minimum"])
        and ("anyOf" not in schema or any(fits(choice, value) for choice in schema["anyOf"]))
        and all(name in inside for name in schema.get("required", ()))
        and all(fits(part, inside[name]) for name, part in schema.get("properties", {}).items() if name in inside)
    )


def test_openapi_document_matches_the_parser(model: str) -> None:
    contents: list[dict[str, Any]] = [{}, *({"content": c} for c in (None, "a", [{"type": "text", "text": "a"}], 7))]

    async def main() -> None:
        async with serving(model) as server:
            schemas = good(await server.client.get("/openapi.json"))["components"]["schemas"]
            num_taken = 0
            for role in ("system", "user", "assistant", "tool", "king"):
                for content in contents:
                    message = {"role": role, **content}
                    response = await server.post("/tokenize", messages=[message])
                    num_taken += response.status_code == 200
                    assert fits(schemas["Message"], message) == (response.status_code == 200), message
            assert num_taken == 4 * 2 + 2  # an assistant's content may be null
            for number in (-1, 0, 1):
                response = await server.post(C, prompt="ab", max_tokens=1, truncate_prompt_tokens=number)
                schema = schemas["CompletionRequest"]["properties"]["truncate_prompt_tokens"]
                assert fits(schema, number) == (response.status_code == 200), number

    run(main())


def test_paths_and_methods(model: str) -> None:
    async def main() -> None:
        async with serving(model) as server:
            for path in ("/", "/v2/completions", "//v1/completions", "/v1/%2e%2e/admin", "/docs"):
                assert error_of(await server.client.get(path)) in (
                    (404, "not_found", None),
                    (404, "model_not_found", "model"),
                )
            response = await server.client.get(C)
            assert error_of(response) == (405, "method_not_allowed", None) and response.headers["allow"] == "POST"
            assert error_of(await server.client.post("/v1/models")) == (405, "method_not_allowed", None)
            response = await server.client.post("/v1/embeddings", json={})
            assert error_of(response) == (404, "unsupported_endpoint", None)
            assert error_of(await server.client.get("/v1/models/other")) == (404, "model_not_found", "model")
            assert error_of(await server.client.get("/debug/requests/x")) == (404, "not_found", "id")

    run(main())


def test_bodies_of_other_types_and_sizes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LINGER_S", 0.01)

    async def main() -> None:
        async with serving(model, max_body_bytes=1000) as server:
            post = server.client.post
            for kind in ("text/plain", "multipart/form-data; boundary=x", "", "application/jsonx"):
                response = await post(C, content=b"{}", headers={"content-type": kind})
                assert error_of(response) == (415, "unsupported_media_type", None)
            headers = {"content-type": "application/json; charset=utf-8"}
            ok = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
            assert (await post(C, content=ok, headers=headers)).status_code == 200
            response = await post(C, content=ok, headers=headers | {"content-encoding": "gzip"})
            assert error_of(response) == (415, "unsupported_encoding", None)
            for length in (1000, 1001, 100_000):

                async def chunks(length: int = length) -> Any:
                    for begin in range(0, length, 300):
                        yield b" " * min(300, length - begin)

                for content in (b" " * length, chunks()):
                    response = await post(C, content=content, headers=headers)
                    expected = (400, "invalid_json", None) if length == 1000 else (413, "body_too_large", None)
                    assert error_of(response) == expected
                    if length > 1000:
                        assert response.headers["connection"] == "close"
        assert ServeArgs().body_limit(1024) == 64 * 1024 + 32 * 1024
        assert ServeArgs().body_limit(1 << 20) == 8 << 20

    run(main())


def test_kv_capacity_and_context_length_errors_differ(model: str) -> None:
    async def main() -> None:
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

    run(main())


def test_stricter_and_more_lenient_options(model: str) -> None:
    async def main() -> None:
        async with serving(model, strict_openai=True) as server:
            assert error_of(await server.post(C, prompt="a")) == (400, "missing_required_parameter", "model")
            for change, code, param in (
                ({"stop": list("abcde")}, "array_above_max_length", "stop"),
                ({"logprobs": 6}, "invalid_value", "logprobs"),
            ):
                assert error_of(await server.post(C, model="tiny", prompt="a", **change)) == (400, code, param)
        async with serving(model, unknown_params="warn", trust_request_chat_template=True) as server:
            await server.complete(temprature=1)
            answer = await server.chat("abc", chat_template="{{ messages[0].content }}", logprobs=True)
            assert answer["usage"]["prompt_tokens"] == 3
        async with serving(model, engine_options={"scheduling_policy": "priority"}) as server:
            await server.complete(priority=-5)
        async with serving(model, engine_options={"chat_template": None}) as server:
            assert error_of(await server.post(H, messages=MESSAGES)) == (400, "no_chat_template", "messages")

    run(main())


def test_internal_error_hides_the_exception() -> None:
    api_error = to_api_error(RuntimeError("the secret is 42"), "abc")
    assert (api_error.status, api_error.code) == (500, "internal_error") and b"secret" not in api_error.body()
    assert api_error.headers()["x-should-retry"] == "false"


@pytest.mark.parametrize("part", ["json_worker.parse", "service.encode", "service.generate"])
def test_bugs_become_internal_errors(model: str, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A bug while the body is parsed, before the engine is called, or in it."""

    def bug(*args: Any) -> Any:
        raise RuntimeError("the secret is 42")

    async def main() -> None:
        async with serving(model) as server:
            holder, _, name = f"app.{part}".rpartition(".")
            with monkeypatch.context() as patch:
                patch.setattr(operator.attrgetter(holder)(server), name, bug)
                response = await server.post(C, prompt="a")
            assert error_of(response) == (500, "internal_error", None) and "secret" not in response.text
            await server.complete()

    run(main())


def test_error_body_is_at_most_4_kib() -> None:
    for text in ("x" * 100_000, "\u20ac" * 4000, '"' * 4000, "\ud800" * 2000, "\x00\n" * 3000):
        body = ApiError(400, "c", text, text).body()
        assert len(body) <= MAX_ERROR_BYTES and json.loads(body)["error"]["code"] == "c"
