"""The table of responses to invalid input, row by row, against `octavo serve` over its socket: status, code and param.

Faults, full queues and timeouts are tested in test_middleware, test_server and test_supervisor.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.serve.openai.errors import MAX_ERROR_BYTES
from tests.clients.tiny_server import serving

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
AUTH = ("Authorization", "Bearer key")
JSON = ("Content-Type", "application/json")
MESSAGES = [{"role": "user", "content": "Hi"}]
DROP = object()
ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
VOCAB = 97
WRONG_KEYS = ("", "Bearer", "Basic a2V5", "Bearer nope", "key", "Bearer key x", "Bearer keykey")


class Response:
    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}

    @property
    def error(self) -> tuple[int, str, str | None]:
        """Checks the common properties of errors."""
        assert self.headers["x-request-id"] and len(self.body) <= MAX_ERROR_BYTES
        error = json.loads(self.body)["error"]
        assert json.loads(self.body).keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == ERROR_TYPES.get(self.status, "invalid_request_error")
        assert error["message"] and "\n" not in error["message"]
        if self.status == 429:
            assert "retry-after" in self.headers
        return self.status, error["code"], error["param"]


class Peer:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.address = parts.hostname, parts.port

    def raw(self, data: bytes) -> Response:
        """The response to a request with Connection: close, read until the server closes."""
        with socket.create_connection(self.address, timeout=30) as connection:
            connection.sendall(data)
            parts = []
            try:
                while part := connection.recv(1 << 16):
                    parts.append(part)
            except ConnectionResetError:
                assert parts
        return Response(b"".join(parts))

    def send(self, method: str, path: str, body: bytes = b"", *headers: tuple[str, str], auth: bool = True) -> Response:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        given = [*([AUTH] if auth else []), *headers]
        if body and not any(name == "Transfer-Encoding" for name, _ in given):
            given.append(("Content-Length", str(len(body))))
        lines += [f"{name}: {value}" for name, value in given]
        return self.raw("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def post(self, path: str, body: Any) -> Response:
        return self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), JSON)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with serving(tmp_path_factory.mktemp("server"), "--max-num-seqs", "64", "--max-body-bytes", "300000") as url:
        yield Peer(url)


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def nested(levels: int) -> str:
    """The arguments of a tool call."""
    return '{"a":' * levels + "1" + "}" * levels


# (row, the body, code, param); the status is 400.
BODIES: list[tuple[int, bytes, str, str | None]] = [
    *(
        (1, body, "invalid_json", None)
        for body in (b"{", b"x", b'{"prompt": "a"', b" ", b"{'prompt': 1}", b'{"prompt": "a",}', b'{"prompt": "a"} x')
    ),
    *((2, body, "invalid_type", None) for body in (b"[]", b"null", b"7", b'"a"', b"true", b"[1, 2]", b"[" * 70_000)),
    (3, b'{"prompt": "\xff\xfe"}', "invalid_encoding", None),
    *(
        (3, b'{"prompt": "a", "%s": ["\xff"]}' % name, "invalid_encoding", None)
        for name in (b"user", b"suffix", b"structured_outputs", b"chat_template_kwargs")
    ),
    *(
        (3, '{"prompt": "a"}'.encode(name), "invalid_encoding", None)
        for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig")
    ),
    *(
        (4, b'{"prompt": "a", "%s": %s}' % (name, value), "invalid_json", None)
        for name in (b"temperature", b"seed", b"max_tokens", b"user")
        for value in (b"NaN", b"Infinity", b"-Infinity")
    ),
    (4, b'{"prompt": "a", "logit_bias": {"5": NaN}}', "invalid_json", None),
    *(
        (4, b'{"prompt": "a", "%s": 1e999}' % name, "decimal_out_of_range", name.decode())
        for name in (b"temperature", b"top_p", b"seed", b"max_tokens")
    ),
    (4, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "integer_out_of_range", "seed"),
    *(
        (5, b'{"prompt": "a", "%s": "\\ud800"}' % name, "invalid_unicode", None)
        for name in (b"stop", b"user", b"cache_salt", b"model", b"suffix")
    ),
    (5, rb'{"prompt": "\udc00"}', "invalid_unicode", None),
    (5, rb'{"prompt": "a\ud83d and a text that goes on"}', "invalid_unicode", None),
    (5, rb'{"prompt": "a", "bad_words": ["a", "\ud83d"]}', "invalid_unicode", None),
    (5, rb'{"prompt": "a", "structured_outputs": {"regex": "\ud800"}}', "invalid_unicode", None),
    (8, b'{"prompt": "a", "metadata": %s}' % deep(30_000), "too_deep", None),
    (8, b'{"prompt": "a", "structured_outputs": {"json": %s}}' % deep(65), "invalid_json_schema", "structured_outputs"),
    (9, b'{"prompt": "%s"}' % (b"[" * (1 << 18)), "too_many_parts", None),
]
# (row, changes of a good completion, code, param)
COMPLETIONS: list[tuple[int, dict[str, Any], str, str | None]] = [
    (23, {"model": None}, "missing_required_parameter", "model"),
    (23, {"model": ""}, "missing_required_parameter", "model"),
    *((23, {"model": model}, "invalid_type", "model") for model in (7, True, ["tiny"], {})),
    (26, {"temprature": 1}, "unknown_parameter", "temprature"),
    (26, {"": 1}, "unknown_parameter", ""),
    (26, {"x" * 5000: 1}, "unknown_parameter", "x" * 128),
    *(
        (27, {name: value}, "unsupported_parameter", name)
        for names, value in ((("suffix", "audio", "functions", "tools"), "x"), (("audio", "guided_json"), {}))
        for name in names
    ),
    (27, {"messages": MESSAGES}, "unsupported_parameter", "messages"),
    (27, {"max_tool_calls": 3}, "unsupported_parameter", "max_tool_calls"),
    *(
        (28, {name: value}, "invalid_type", name)
        for name, value in (
            *((name, value) for name in ("n", "max_tokens", "min_tokens") for value in (True, "7", 2.5, 2.0, [], {})),
            *((name, value) for name in ("temperature", "top_p", "min_p") for value in (True, "1", [], {})),
            *((name, value) for name in ("echo", "ignore_eos", "stream") for value in (0, 1, "true", [])),
            ("stop", {}),
            ("bad_words", "a"),
            ("stop_token_ids", 5),
            ("response_format", "json"),
            ("structured_outputs", []),
            ("seed", "1"),
            ("seed", True),
            ("top_k", 1.5),
            ("priority", "1"),
        )
    ),
    *((29, {"prompt": value}, "missing_required_parameter", "prompt") for value in (None, DROP)),
    *((30, {"prompt": value}, "empty_prompt", "prompt") for value in ("", ["a", ""])),
    (31, {"prompt": []}, "empty_array", "prompt"),
    (31, {"prompt": [[]]}, "empty_array", "prompt"),
    *(
        (31, {"prompt": v}, "invalid_type", "prompt")
        for v in (["a", []], ["a", None], [1, "a"], [[1], "a"], [[[1]]], [None], {}, 5)
    ),
    (32, {"prompt": ["a"] * 257}, "array_above_max_length", "prompt"),
    (32, {"prompt": [[5]] * 257}, "array_above_max_length", "prompt"),
    *(
        (33, {"prompt": [5, value]}, "invalid_token_id", "prompt[1]")
        for value in (-1, VOCAB, VOCAB + 64, 1 << 31, 1 << 63, 1 << 64, True, 1.5)
    ),
    *((33, {"prompt": [value]}, "invalid_token_id", "prompt[0]") for value in (VOCAB, 1 << 31, 1 << 63, True, 1.5)),
    (33, {"prompt": [[5], [5, VOCAB]]}, "invalid_token_id", "prompt[1][1]"),
    (34, {"prompt": [5] * 512}, "context_length_exceeded", "prompt"),
    (34, {"prompt": "a" * 70_000}, "context_length_exceeded", "prompt"),
    (36, {"prompt": [5] * 500, "max_tokens": 13}, "context_length_exceeded", "max_tokens"),
    *(
        (36, {"truncate_prompt_tokens": v}, "integer_out_of_range", "truncate_prompt_tokens")
        for v in (0, -1, 1 << 31, 10**400)
    ),
    (37, {"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    (39, {"min_tokens": 9}, "invalid_value", "min_tokens"),
    (39, {"min_tokens": 600, "max_tokens": None}, "invalid_value", "min_tokens"),
    (39, {"min_tokens": 600, "max_tokens": 700}, "context_length_exceeded", "max_tokens"),
    *((40, {"n": value}, "integer_out_of_range", "n") for value in (0, -1, 129, 10**6, 1 << 63, 65, 10**30)),
    (42, {"n": 3, "best_of": 2}, "invalid_value", "best_of"),
    (42, {"best_of": 21}, "invalid_value", "best_of"),
    (42, {"best_of": 2, "stream": True}, "invalid_value", "best_of"),
    (42, {"best_of": 2, "use_beam_search": True}, "invalid_value", "best_of"),
    (43, {"use_beam_search": True, "beam_width": 0}, "invalid_value", "beam_width"),
    (43, {"use_beam_search": True, "beam_width": 2, "n": 3}, "invalid_value", "beam_width"),
    (43, {"use_beam_search": True, "beam_width": 1 << 40}, "invalid_value", "beam_width"),
    *(
        (43, {"use_beam_search": True, **more}, "invalid_value", "use_beam_search")
        for more in ({"temperature": 1}, {"top_p": 0.5}, {"seed": 7})
    ),
    (43, {"use_beam_search": True, "beam_width": 98}, "integer_out_of_range", "beam_width"),
    (43, {"beam_width": 2, "use_beam_search": False}, "invalid_value", "beam_width"),
    *(
        (43, {"use_beam_search": True, name: value}, "invalid_value", name)
        for name, value in (("stream", True), ("echo", True), ("presence_penalty", 1), ("early_stopping", 1))
    ),
    *(
        (43, {"use_beam_search": True, "n": 2, "length_penalty": v}, "decimal_out_of_range", "length_penalty")
        for v in (31, 10**400)
    ),
    *((44, {"temperature": t}, "decimal_out_of_range", "temperature") for t in (-0.1, 2.1, 1e308, 3, -5, 10**400)),
    *((45, {"top_p": value}, "decimal_out_of_range", "top_p") for value in (-1, 1.0000001, 2, -(10**400))),
    *((45, {"top_k": value}, "decimal_out_of_range", "top_k") for value in (-2, 1 << 31, 1 << 40)),
    *((45, {"min_p": value}, "decimal_out_of_range", "min_p") for value in (-1, 2)),
    *((45, {name: 2.1}, "decimal_out_of_range", name) for name in ("presence_penalty", "frequency_penalty")),
    *((47, {"seed": value}, "integer_out_of_range", "seed") for value in (1 << 63, -(1 << 63) - 1, 1.5)),
    *((48, {"logprobs": value}, "invalid_value", "logprobs") for value in (-1, 21, True, "1", 1.5, 1 << 70)),
    (48, {"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    (48, {"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    *(
        (50, {"logit_bias": value}, "invalid_logit_bias", "logit_bias")
        for value in (
            *({key: 1} for key in ("abc", "-1", str(VOCAB), "1e3", "", " 5", "05", "5.0", "\u0665")),
            *({"5": value} for value in (101, -101, "1", None, True, [], 10**400)),
            {str(i): 1 for i in range(1025)},
            [],
            "a",
        )
    ),
    *(
        (52, {"allowed_token_ids": [value]}, "invalid_token_id", "allowed_token_ids")
        for value in (VOCAB, -1, 1 << 63, True)
    ),
    (52, {"allowed_token_ids": [5] * (VOCAB + 1)}, "array_above_max_length", "allowed_token_ids"),
    (52, {"allowed_token_ids": []}, "no_allowed_token", "allowed_token_ids"),
    (52, {"bad_words": ["a" * 4000] * 17}, "array_above_max_length", "bad_words"),
    (53, {"stop": ["a"] * 65}, "array_above_max_length", "stop"),
    (53, {"stop": ["a"] * 10_000}, "array_above_max_length", "stop"),
    *((53, {"stop": value}, "invalid_value", "stop") for value in ([""], "", [7], [None], "a" * 50_000)),
    *((55, {"stop_token_ids": [v]}, "invalid_token_id", "stop_token_ids") for v in (VOCAB, -1, 1 << 31, True, "5")),
    (55, {"stop_token_ids": [5] * 1025}, "array_above_max_length", "stop_token_ids"),
    *((57, {"stream_options": v}, "invalid_value", "stream_options") for v in ({"include_usage": True}, {})),
    *(
        (57, {"stream": True, "stream_options": v}, "invalid_value", "stream_options")
        for v in ({"nope": True}, {"include_usage": 1})
    ),
    (66, {"response_format": {"type": "yaml"}}, "invalid_json_schema", "response_format"),
    (66, {"response_format": {}}, "invalid_json_schema", "response_format"),
    (66, {"response_format": {"type": "json_schema"}}, "invalid_json_schema", "response_format"),
    *(
        (
            66,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": s}}},
            "invalid_json_schema",
            "response_format",
        )
        for s in (
            7,
            "a",
            None,
            {"$ref": "http://evil.example/x"},
            {"$ref": "#/nope"},
            {"type": "nope"},
            {"type": "object", "properties": 7},
            {"type": "string", "format": "nope"},
            {"uniqueItems": True, "type": "array"},
            {"multipleOf": 1e-300, "type": "number"},
        )
    ),
    *(
        (68, {"structured_outputs": value}, "invalid_grammar", "structured_outputs")
        for value in (
            {"grammar": ""},
            {"grammar": "start: start"},
            {"grammar": "nope"},
            {"choice": []},
            {"choice": [""]},
            {"regex": "("},
            {"regex": ""},
        )
    ),
    *(
        (68, {"structured_outputs": value}, "invalid_value", "structured_outputs")
        for value in ({}, {"json": {}, "regex": "a"})
    ),
    *(
        (70, {"cache_salt": v}, "invalid_value", "cache_salt")
        for v in ("", "s" * 10_000, "a\nb", "\u0000", 7, [], True)
    ),
    *((71, {"priority": value}, "invalid_value", "priority") for value in (1, -1, 10**30)),
]
CHATS: list[tuple[int, dict[str, Any], str, str | None]] = [
    (48, {"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    (48, {"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    (48, {"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
    (34, {"messages": [{"role": "user", "content": "a" * 600}]}, "context_length_exceeded", "messages"),
    (36, {"max_completion_tokens": 600}, "context_length_exceeded", "max_completion_tokens"),
    (37, {"max_completion_tokens": 0}, "integer_below_min_value", "max_completion_tokens"),
    *((59, {"messages": value}, "missing_required_parameter", "messages") for value in (DROP, None)),
    (59, {"messages": []}, "empty_array", "messages"),
    (59, {"messages": MESSAGES * 5000}, "array_above_max_length", "messages"),
    *((59, {"messages": value}, "invalid_type", "messages") for value in ("Hi", {}, ["Hi"], [7], [None], [[]])),
    *(
        (60, {"messages": [{"role": role, "content": "a"}]}, "invalid_value", "messages[0].role")
        for role in ("king", "__proto__", "", None, 7, [])
    ),
    (60, {"messages": [*MESSAGES, {"content": "a"}]}, "invalid_value", "messages[1].role"),
    *(
        (60, {"messages": [{"role": "user", **content}]}, code, "messages[0].content")
        for content, code in (
            ({"content": None}, "invalid_value"),
            ({}, "invalid_value"),
            ({"content": 7}, "invalid_type"),
        )
    ),
    (
        60,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "invalid_type",
        "messages[0].content[0].text",
    ),
    (60, {"messages": [{"role": "user", "content": "a", "colour": 1}]}, "unknown_parameter", "messages[0].colour"),
    *(
        (
            61,
            {"messages": [{"role": role, "content": "", "tool_calls": calls}]},
            "invalid_type",
            "messages[0].tool_calls",
        )
        for role, calls in (("tool", False), ("assistant", 0), ("assistant", ""), ("user", {}))
    ),
    *(
        (
            61,
            {"messages": [{"role": "assistant", "tool_calls": [call]}]},
            "invalid_value",
            f"messages[0].tool_calls[0]{at}",
        )
        for call, at in (
            (7, ""),
            ({}, ""),
            ({"function": {"arguments": "{}"}}, ""),
            ({"function": {"name": "f", "arguments": 7}}, ".function.arguments"),
            *(({"function": {"name": "f", "arguments": nested(n)}}, ".function.arguments") for n in (65, 900, 5000)),
            ({"function": {"name": "f", "arguments": json.loads(nested(65))}}, ".function.arguments"),
        )
    ),
    (
        61,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 4097}]},
        "array_above_max_length",
        "messages",
    ),
    *(
        (60, {"messages": [{"role": "user", "content": [part]}]}, "unsupported_content", "messages[0].content[0].type")
        for part in ({"type": "nope"}, {"type": "image_url", "image_url": {"url": "http://x"}}, {}, 7, None)
    ),
    (62, {"chat_template": "{{ 7 }}"}, "template_not_allowed", "chat_template"),
    (62, {"chat_template_kwargs": {"a": {}}}, "invalid_value", "chat_template_kwargs"),
    (62, {"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "invalid_value", "chat_template_kwargs"),
    *(
        (62, {"chat_template_kwargs": {name: "x"}}, "invalid_value", "chat_template_kwargs")
        for name in ("self", "messages", "tools", "template", "special_tokens", "loop", "caller", "__class__")
    ),
    (62, {"add_generation_prompt": True, "continue_final_message": True}, "invalid_value", "continue_final_message"),
    (48, {"logprobs": 1}, "invalid_value", "logprobs"),
    (27, {"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    (27, {"prompt": "a"}, "unsupported_parameter", "prompt"),
    (65, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
    (65, {"tools": [{"type": "web_search"}]}, "invalid_value", "tools"),
    (
        65,
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
        "invalid_value",
        "tools",
    ),
    (65, {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "invalid_value", "tools"),
    *(
        (65, {"tools": [{"type": "function", "function": function}]}, "invalid_value", "tools")
        for function in (
            {},
            {"name": 7},
            {"name": "a b"},
            {"name": "f", "parameters": 7},
            {"name": "f", "parameters": {"type": "array"}},
            None,
        )
    ),
    (
        65,
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "invalid_value",
        "tool_choice",
    ),
    (
        65,
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 7}}}
            ],
            "tool_choice": "required",
        },
        "invalid_json_schema",
        "tools",
    ),
]


def test_schema_errors_name_the_requests_parameter(peer: Peer) -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(1200)}
    schemas = {"invalid_json_schema": {"type": "nope"}, "grammar_too_complex": {"properties": properties}}
    for code, schema in schemas.items():
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", **schema}}}
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        tools = [{"type": "function", "function": tool}]
        responses_body = {"input": "Hi", "text": {"format": {**form["json_schema"], "type": "json_schema"}}}  # type: ignore[dict-item]
        for path, body, param in (
            (C, {"prompt": "Hi", "structured_outputs": {"json": schema}}, "structured_outputs"),
            (C, {"prompt": "Hi", "response_format": form}, "response_format"),
            (H, {"messages": MESSAGES, "response_format": form}, "response_format"),
            (H, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}, "tools"),
            (R, responses_body, "text.format"),
        ):
            limit = "max_output_tokens" if path == R else "max_tokens"
            response = peer.post(path, {**body, limit: 100})
            if code == "grammar_too_complex" and response.status == 200:
                continue  # the model generated something else
            assert response.error == (400, code, param), response.body


@pytest.mark.parametrize("row", sorted({row for row, *_ in BODIES}))
def test_unreadable_bodies(peer: Peer, row: int) -> None:
    for _, body, code, param in (case for case in BODIES if case[0] == row):
        assert peer.post(C, body).error == (400, code, param), body[:100]


@pytest.mark.parametrize(
    ("path", "row"),
    [(path, row) for path, cases in ((C, COMPLETIONS), (H, CHATS)) for row in sorted({c[0] for c in cases})],
)
def test_invalid_parameters(peer: Peer, path: str, row: int) -> None:
    mismatches, good_body = [], {"max_tokens": 8} | ({"prompt": "Hi"} if path == C else {"messages": MESSAGES})
    for _, change, code, param in (case for case in (COMPLETIONS if path == C else CHATS) if case[0] == row):
        body = {name: value for name, value in (good_body | change).items() if value is not DROP}
        if "max_completion_tokens" in body:
            del body["max_tokens"]
        response = peer.post(path, body)
        found = response.error if response.status != 200 else (200, "", None)
        if found != (400, code, param):
            mismatches.append((str(change)[:150], found, (400, code, param), response.body[:200]))
    assert not mismatches


def test_unusual_but_valid_requests_succeed(peer: Peer) -> None:
    for change in (
        {"prompt": "a\u0000\u0007b"},
        {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "auto"},
        {"temperature": -0.0},
        {"temperature": 1e-45},
        {"top_p": 0},
        {"top_k": 0},
        {"top_k": -1},
        {"seed": -(1 << 63)},
        {"seed": (1 << 63) - 1},
        {"stream": None},
        {"temperature": 0, "n": 3},
        {"max_tokens": 0, "echo": True},
        {"min_tokens": 1, "max_tokens": None},
        {"best_of": None, "n": 2},
        {"best_of": 1, "stream": True},
        {"prompt_logprobs": 0, "max_tokens": 0},
        {"priority": 0},
        {"model": "tiny", "n": None, "stop": None, "temperature": None},
        {"suffix": None, "max_tool_calls": None, "messages": None, "tools": [], "modalities": ["text"]},
        {"suffix": ""},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ):
        assert peer.post(C, {"prompt": "Hi", "max_tokens": 2, **change}).status == 200, change
    for raw in (b'"prompt": "b"', b'"metadata": ' + deep(500), b'"user": {"a": 1, "a": [ ]}, "suffix": [ ]'):
        assert peer.post(C, b'{"prompt": "a", "max_tokens": 1, %s}' % raw).status == 200, raw[:80]
    for arguments in (nested(64), '{"a": "' + "[" * 99 + '"}', "", None, {"a": 1}, "null", '{"a": ', "[1]"):
        call = {"id": None, "function": {"name": "f", "arguments": arguments}}
        refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "parsed": None}
        history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, refusal]
        assert peer.post(H, {"messages": history, "max_tokens": 1, "best_of": None, "prompt": []}).status == 200, (
            arguments
        )


def test_bodies_of_other_sizes_types_and_encodings(peer: Peer) -> None:
    ok = b'{"prompt": "Hi", "max_tokens": 1}'
    for kind in ("application/json", "application/json; charset=utf-8"):
        assert peer.send("POST", C, ok, ("Content-Type", kind)).status == 200
    for kind in ("text/plain", "multipart/form-data; boundary=x", "", "application/jsonx"):
        assert peer.send("POST", C, ok, ("Content-Type", kind)).error == (415, "unsupported_media_type", None)
    assert peer.send("POST", C, ok).error == (415, "unsupported_media_type", None)
    gzip = ("Content-Encoding", "gzip")
    assert peer.send("POST", C, ok, JSON, gzip).error == (415, "unsupported_encoding", None)
    response = peer.send("POST", C, b" " * 310_000, JSON)
    assert response.error == (413, "body_too_large", None) and response.headers["connection"] == "close"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nnope\r\n\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"Content-Length: -1\r\n\r\n{}",
        b"Content-Length: nope\r\n\r\n{}",
    ],
)
def test_invalid_framing_closes_the_connection(peer: Peer, framing: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\n"
    response = peer.raw(head + b"Content-Type: application/json\r\n" + framing)
    assert response.error[0] == 400


def test_paths_methods_and_keys(peer: Peer) -> None:
    for path in ("/nope", "//v1/completions", "/v1/../admin", "/v1/%2e%2e/admin", "/"):
        assert peer.send("GET", path, auth=False).error == (401, "invalid_api_key", None), path
        assert peer.send("GET", path).error == (404, "not_found", None), path
    response = peer.send("GET", C)
    assert response.error == (405, "method_not_allowed", None) and response.headers["allow"] == "POST"
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    for headers in (
        [],
        *([("Authorization", value)] for value in WRONG_KEYS),
        [AUTH, AUTH],
        [AUTH, ("Authorization", "Bearer nope")],
    ):
        response = peer.send("POST", C, body, JSON, *headers, auth=False)
        assert response.error == (401, "invalid_api_key", None), headers
        assert response.headers["www-authenticate"].startswith("Bearer")
    for value in ("bearer key", "BEARER key"):
        assert peer.send("POST", C, body, JSON, ("Authorization", value), auth=False).status == 200
    assert peer.send("OPTIONS", C, auth=False).error == (401, "invalid_api_key", None)
    for path in ("/health", "/ready"):
        assert peer.send("GET", path, auth=False).status == 200


def test_unknown_models_and_ids(peer: Peer) -> None:
    assert peer.post(C, {"prompt": "Hi", "model": "other"}).error == (404, "model_not_found", "model")
    assert peer.post(H, {"messages": MESSAGES, "model": "other"}).error == (404, "model_not_found", "model")
    assert peer.send("GET", "/v1/models/other").error == (404, "model_not_found", "model")
    assert peer.send("GET", "/debug/requests/other").error == (404, "not_found", "id")
    for path in ("/v1/embeddings", "/v1/score", "/rerank"):
        assert peer.post(path, {"input": "a"}).error in (
            (400, "unsupported_endpoint", None),
            (404, "unsupported_endpoint", None),
        )
