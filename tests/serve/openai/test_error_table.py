"""The table of responses to invalid input, row by row, against `octavo serve` over its socket: status, code and param.

Faults, full queues and timeouts are tested in test_middleware, test_server and test_supervisor.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
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
ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 500: "server_error"}
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
        return checked_error(self.status, self.headers, self.body)


def checked_error(status: int, headers: Mapping[str, str], body: bytes) -> tuple[int, str, str | None]:
    assert headers["x-request-id"] and len(body) <= MAX_ERROR_BYTES
    error = json.loads(body)["error"]
    assert json.loads(body).keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ERROR_TYPES.get(status, "invalid_request_error")
    assert error["message"] and "\n" not in error["message"]
    assert status != 429 or "retry-after" in headers
    return status, error["code"], error["param"]


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
# (row, changes of a good request, code, param)
Case = tuple[int, dict[str, Any], str, str | None]


def each(row: int, code: str, names: str | tuple[str, ...], *values: Any, **others: Any) -> list[Case]:
    """A case for each value of each parameter, next to other parameters."""
    names = (names,) if isinstance(names, str) else names
    return [(row, {**others, name: value}, code, name) for name in names for value in values]


BEAMS: dict[str, Any] = {"use_beam_search": True}
COMPLETIONS: list[Case] = [
    *each(23, "invalid_type", "model", 7, True, ["tiny"], {}),
    *each(26, "unknown_parameter", ("temprature", ""), 1),
    (26, {"x" * 5000: 1}, "unknown_parameter", "x" * 128),
    *each(27, "unsupported_parameter", ("suffix", "audio", "functions", "tools"), "x"),
    *each(27, "unsupported_parameter", ("audio", "guided_json"), {}),
    *each(27, "unsupported_parameter", "messages", MESSAGES),
    *each(27, "unsupported_parameter", "max_tool_calls", 3),
    *each(27, "unsupported_parameter", "logprob_token_ids", [5]),
    *each(28, "invalid_type", ("n", "max_tokens", "min_tokens"), True, "7", 2.5, 2.0, [], {}),
    *each(28, "invalid_type", ("temperature", "top_p", "min_p"), True, "1", [], {}),
    *each(28, "invalid_type", ("echo", "ignore_eos", "spec", "stream"), 0, 1, "true", []),
    *each(28, "invalid_type", "stop", {}),
    *each(28, "invalid_type", "bad_words", "a"),
    *each(28, "invalid_type", "stop_token_ids", 5),
    *each(28, "invalid_type", "response_format", "json"),
    *each(28, "invalid_type", "structured_outputs", []),
    *each(28, "invalid_type", "seed", "1", True),
    *each(28, "invalid_type", "top_k", 1.5),
    *each(28, "invalid_type", "priority", "1"),
    *each(29, "missing_required_parameter", "prompt", None, DROP),
    *each(30, "empty_prompt", "prompt", "", ["a", ""]),
    *each(31, "empty_array", "prompt", [], [[]]),
    *each(31, "invalid_type", "prompt", ["a", []], ["a", None], [1, "a"], [[1], "a"], [[[1]]], [None], {}, 5),
    *each(32, "array_above_max_length", "prompt", ["a"] * 257, [[5]] * 257),
    *(
        (33, {"prompt": [5, value]}, "invalid_token_id", "prompt[1]")
        for value in (-1, VOCAB, VOCAB + 64, 1 << 31, 1 << 63, 1 << 64, True, 1.5)
    ),
    *((33, {"prompt": [value]}, "invalid_token_id", "prompt[0]") for value in (VOCAB, 1 << 31, 1 << 63, True, 1.5)),
    (33, {"prompt": [[5], [5, VOCAB]]}, "invalid_token_id", "prompt[1][1]"),
    *each(34, "context_length_exceeded", "prompt", [5] * 512, "a" * 70_000),
    *each(36, "context_length_exceeded", "max_tokens", 13, prompt=[5] * 500),
    *each(36, "integer_out_of_range", "truncate_prompt_tokens", 0, -2, 1 << 31, 10**400),
    *each(37, "integer_below_min_value", "max_tokens", 0),
    *each(39, "invalid_value", "min_tokens", 9),
    *each(39, "invalid_value", "min_tokens", 600, max_tokens=None),
    *each(39, "context_length_exceeded", "max_tokens", 700, min_tokens=600),
    *each(40, "integer_out_of_range", "n", 0, -1, 129, 10**6, 1 << 63, 65, 10**30),
    *each(42, "invalid_value", "best_of", 2, n=3),
    *each(42, "invalid_value", "best_of", 21),
    *each(42, "invalid_value", "best_of", 2, stream=True),
    *each(42, "invalid_value", "best_of", 2, **BEAMS),
    *each(43, "invalid_value", "beam_width", 0, 1 << 40, **BEAMS),
    *each(43, "invalid_value", "beam_width", 2, n=3, **BEAMS),
    *each(43, "invalid_value", "use_beam_search", True, temperature=1),
    *each(43, "invalid_value", "use_beam_search", True, top_p=0.5),
    *each(43, "invalid_value", "use_beam_search", True, seed=7),
    *each(43, "integer_out_of_range", "beam_width", 98, **BEAMS),
    *each(43, "invalid_value", "beam_width", 2, use_beam_search=False),
    *each(43, "invalid_value", ("stream", "echo"), True, **BEAMS),
    *each(43, "invalid_value", ("presence_penalty", "early_stopping"), 1, **BEAMS),
    *each(43, "decimal_out_of_range", "length_penalty", 31, 10**400, n=2, **BEAMS),
    *each(43, "invalid_value", "length_penalty", 31, 0.5, use_beam_search=None),
    *each(43, "invalid_value", "early_stopping", True, "never"),
    *each(44, "decimal_out_of_range", "temperature", -0.1, 1e31, 1e308, -5, 10**400),
    *each(45, "decimal_out_of_range", "top_p", -1, 1.0000001, 2, -(10**400)),
    *each(45, "decimal_out_of_range", "top_k", -2, 1 << 31, 1 << 40),
    *each(45, "decimal_out_of_range", "min_p", -1, 2),
    *each(45, "decimal_out_of_range", ("presence_penalty", "frequency_penalty"), 2.1),
    *each(47, "integer_out_of_range", "seed", 1 << 63, -(1 << 63) - 1, 1.5),
    *each(48, "invalid_value", "logprobs", -1, 21, True, "1", 1.5, 1 << 70),
    *each(48, "invalid_value", "prompt_logprobs", 21),
    *each(48, "invalid_value", "prompt_logprobs", 1, stream=True),
    *(
        each(50, "invalid_logit_bias", "logit_bias", {key: 1})[0]
        for key in ("abc", "-1", str(VOCAB), "1e3", "", " 5", "05", "5.0", "\u0665")
    ),
    *(
        each(50, "invalid_logit_bias", "logit_bias", {"5": value})[0]
        for value in (101, -101, "1", None, True, [], 10**400)
    ),
    *each(50, "invalid_logit_bias", "logit_bias", {str(i): 1 for i in range(1025)}, [], "a"),
    *each(52, "invalid_token_id", "allowed_token_ids", [VOCAB], [-1], [1 << 63], [True]),
    *each(52, "array_above_max_length", "allowed_token_ids", [5] * (VOCAB + 1)),
    *each(52, "no_allowed_token", "allowed_token_ids", []),
    *each(52, "array_above_max_length", "bad_words", ["a" * 4000] * 17),
    *each(53, "array_above_max_length", "stop", ["a"] * 65, ["a"] * 10_000),
    *each(53, "invalid_value", "stop", [""], "", [7], [None], "a" * 50_000),
    *each(55, "invalid_token_id", "stop_token_ids", [VOCAB], [-1], [1 << 31], [True], ["5"]),
    *each(55, "array_above_max_length", "stop_token_ids", [5] * 1025),
    *each(57, "invalid_value", "stream_options", {"include_usage": True}, {}),
    *each(57, "invalid_value", "stream_options", {"nope": True}, {"include_usage": 1}, stream=True),
    *each(66, "invalid_json_schema", "response_format", {"type": "yaml"}, {}, {"type": "json_schema"}),
    *each(66, "invalid_json_schema", "response_format", {"type": "text", "schema": {}}),
    *each(66, "invalid_json_schema", "response_format", {"type": "json_object", "schema": 7}),
    *each(66, "invalid_json_schema", "response_format", {"type": "json_object", "schma": {}}),
    *each(66, "invalid_json_schema", "response_format", {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}),
    *(
        each(66, "invalid_json_schema", "response_format", {"type": "json_schema", "json_schema": {"schema": schema}})[
            0
        ]
        for schema in (
            *(7, "a", None, {"$ref": "http://evil.example/x"}, {"$ref": "#/nope"}, {"type": "nope"}),
            {"type": "object", "properties": 7},
            {"uniqueItems": True, "type": "array"},
            {"multipleOf": 1e-300, "type": "number"},
        )
    ),
    *each(68, "invalid_grammar", "structured_outputs", *({"grammar": g} for g in ("", "start: start", "nope"))),
    *each(68, "invalid_grammar", "structured_outputs", {"choice": []}, {"choice": [""]}, {"regex": "("}, {"regex": ""}),
    *each(68, "invalid_value", "structured_outputs", {}, {"json": {}, "regex": "a"}),
    *each(70, "invalid_value", "cache_salt", "", "s" * 10_000, "a\nb", "\u0000", 7, [], True),
    *each(71, "invalid_value", "priority", 1, -1, 10**30),
]


def turn(row: int, code: str, at: str, *turns: dict[str, Any]) -> list[Case]:
    """A case for each message; the error is at that place of it."""
    return [(row, {"messages": [{"role": "user", **message}]}, code, f"messages[0].{at}") for message in turns]


def called(*calls: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [call]} for call in calls]


def functions(*definitions: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": definition} for definition in definitions]


CHATS: list[Case] = [
    *each(48, "invalid_value", "top_logprobs", 3),
    *each(48, "invalid_value", "top_logprobs", 21, -1, logprobs=True),
    *each(34, "context_length_exceeded", "messages", [{"role": "user", "content": "a" * 600}]),
    *each(36, "context_length_exceeded", "max_completion_tokens", 600),
    *each(37, "integer_below_min_value", "max_completion_tokens", 0),
    *each(59, "missing_required_parameter", "messages", DROP, None),
    *each(59, "empty_array", "messages", []),
    *each(59, "array_above_max_length", "messages", MESSAGES * 5000),
    *each(59, "invalid_type", "messages", "Hi", {}, ["Hi"], [7], [None], [[]]),
    *turn(
        *(60, "invalid_value", "role"),
        *({"role": role, "content": "a"} for role in ("a king", "<s>", "k" * 65, "", None, 7, [])),
    ),
    (60, {"messages": [*MESSAGES, {"content": "a"}]}, "invalid_value", "messages[1].role"),
    *turn(60, "invalid_value", "content", {"content": None}, {}),
    *turn(60, "invalid_type", "content", {"content": 7}),
    *turn(60, "invalid_type", "content[0].text", {"content": [{"type": "text"}]}),
    *turn(60, "unknown_parameter", "colour", {"content": "a", "colour": 1}),
    *turn(
        *(61, "invalid_type", "tool_calls"),
        {"role": "tool", "content": "", "tool_calls": False},
        *({"role": "assistant", "content": "", "tool_calls": calls} for calls in (0, "")),
        {"content": "", "tool_calls": {}},
    ),
    *turn(61, "invalid_value", "tool_calls[0]", *called(7, {}, {"function": {"arguments": "{}"}})),
    *turn(
        *(61, "invalid_value", "tool_calls[0].function.arguments"),
        *called(
            *(
                {"function": {"name": "f", "arguments": arguments}}
                for arguments in (7, nested(65), nested(900), nested(5000), json.loads(nested(65)))
            )
        ),
    ),
    *each(
        *(61, "array_above_max_length", "messages"),
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 4097}],
    ),
    *turn(
        *(60, "unsupported_content", "content[0].type"),
        {"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        *({"content": [part]} for part in ({"type": "nope"}, {}, 7, None)),
    ),
    *each(62, "template_not_allowed", "chat_template", "{{ 7 }}"),
    *each(62, "invalid_value", "chat_template_kwargs", {"a": {}}, {f"a{i}": 1 for i in range(65)}),
    *(
        each(62, "invalid_value", "chat_template_kwargs", {name: "x"})[0]
        for name in ("self", "messages", "tools", "template", "special_tokens", "loop", "caller", "__class__")
    ),
    *each(62, "invalid_value", "continue_final_message", True, add_generation_prompt=True),
    *each(48, "invalid_value", "logprobs", 1),
    *each(27, "unsupported_parameter", "modalities", ["audio"]),
    *each(27, "unsupported_parameter", "prompt", "a"),
    *each(65, "invalid_value", "tool_choice", *functions({"name": "f"})),
    *each(65, "invalid_value", "tools", [{"type": "web_search"}]),
    *each(65, "invalid_value", "tools", functions(*({"name": f"f{i}"} for i in range(129)))),
    *each(65, "invalid_value", "tools", functions({"name": "f"}) * 2),
    *each(65, "invalid_value", "tools", *([one] for one in functions({}, {"name": 7}, {"name": "a b"}, None))),
    *each(65, "invalid_value", "tools", functions({"name": "f", "parameters": 7})),
    *each(65, "invalid_value", "tools", functions({"name": "f", "parameters": {"type": "array"}})),
    *each(65, "invalid_value", "tool_choice", *functions({"name": "g"}), tools=functions({"name": "f"})),
    *each(
        *(65, "invalid_json_schema", "tools"),
        functions({"name": "f", "parameters": {"type": "object", "properties": 7}}),
        tool_choice="required",
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
        {"temperature": 2.5},
        {"temperature": 1e30, "bad_words": ["a"], "top_p": 0.9},
        {"model": ""},
        {"model": None},
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
    for path in ("/nope", "//v1/completions", "/v1/../admin", "/v1/%2e%2e/admin"):
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
