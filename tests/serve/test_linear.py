"""Every parser of untrusted input takes linear time.

    python -m tests.serve.test_linear        the table: milliseconds at n, 2n and 4n

Each parser is timed on n, 2n and 4n bytes of its worst input. A quadratic one takes 16 times as long for 4n, a linear
one 4 times. n grows until the time can be measured, so that a quadratic parser fails quickly.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import uvicorn
from jinja2.exceptions import SecurityError
from starlette.routing import compile_path

from octavo.errors import OctavoError
from octavo.params.sampling_params import SamplingParams
from octavo.serve import view_routes as view
from octavo.serve.http import middleware
from octavo.serve.http.allowed_hosts import AllowedHosts
from octavo.serve.http.context import RequestContext
from octavo.serve.http.server import LimitedHttpProtocol
from octavo.serve.openai import decoding, request, responses_api
from octavo.serve.openai.errors import ApiError
from octavo.serve.openai.schema import ChatRequest, CompletionRequest, ResponseRequest
from octavo.text import chat_template, grammar, tokenizer
from octavo.text.formats.gemma_calls import GemmaParser
from octavo.text.formats.harmony import HarmonyParser
from octavo.text.formats.xml_calls import XmlCallParser
from octavo.text.output_parser import OutputParser

MIN_S, MAX_BYTES = 0.004, 1 << 21
RATIO, RUNS, ATTEMPTS = 11.0, 5, 4
PARSER = request.RequestParser(("tiny",), SamplingParams(), has_tools=True)


class Case(NamedTuple):
    """A parser and its input: `make(n)` has about n bytes or characters."""

    name: str
    make: Callable[[int], Any]
    read: Callable[[Any], object]
    max_bytes: int = MAX_BYTES


def _quietly(read: Callable[[Any], object]) -> Callable[[Any], object]:
    """Ignores refusals: the input was read."""

    def quiet(given: Any) -> None:
        with contextlib.suppress(ApiError, OctavoError, SecurityError, ValueError):
            read(given)

    return quiet


def _repeated(kind: str) -> Callable[[int], str]:
    return lambda n: kind * (n // len(kind))


# -- JSON --------------------------------------------------------------------------------------------------------------


def _jsons() -> list[Case]:
    deep = b"[" * 70
    bodies: dict[str, Callable[[int], bytes]] = {
        "70 brackets, a string without an end": lambda n: deep + b'"' + b'\\"' * (n // 2),
        "70 brackets, quotes": lambda n: deep + b'"' * n,
        "70 brackets, backslashes": lambda n: deep + b'"' + b"\\" * n,
        "70 brackets, a string that ends": lambda n: deep + b'"' + b'\\"' * (n // 2) + b'"' + b"]" * 70,
        "70 brackets, many strings": lambda n: deep + b'"",' * (n // 3) + b'""' + b"]" * 70,
        "opening brackets": lambda n: b"[" * n,
        "closing brackets": lambda n: b"]" * n,
        "pairs of brackets": lambda n: b"[" + b"[]," * (n // 3) + b"[]]",
        "brackets the wrong way round": lambda n: b"][" * (n // 2),
        "objects that open": lambda n: b'{"a":' * (n // 5),
        "white space": lambda n: b" " * n + b"{}" + b"\n" * n,
        "an integer": lambda n: b'{"seed": ' + b"9" * n + b"}",
        "integers of 4,300 digits": lambda n: b'{"a": [' + b",".join([b"9" * 4300] * (n // 4300 + 1)) + b"]}",
        "a fraction": lambda n: b'{"a": 0.' + b"1" * n + b"}",
        "a fraction between two floats": lambda n: b'{"a": 9007199254740993.' + b"0" * n + b"1}",
        "an exponent": lambda n: b'{"a": 1e' + b"9" * n + b"}",
        "NaN after a long key of many values": lambda n: (
            b'{"%s": [%s], "z": NaN}' % (b"k" * (n // 2), b",".join([b"1"] * (n // 4)))
        ),
        "NaN after long keys, nested": lambda n: b'{"%s": ' % (b"k" * (n // 60)) * 60 + b"NaN" + b"}" * 60,
        "half a character after a long key": lambda n: (
            b'{"%s": [%s], "z": "\\ud800"}' % (b"k" * (n // 2), b",".join([b'""'] * (n // 6)))
        ),
        "surrogate pairs": lambda n: b'{"a": "' + b"\\ud83d\\ude00" * (n // 12) + b'"}',
        "half an escape": lambda n: b'{"a": "' + b"\\ud8" * (n // 5) + b'"}',
        "a key twice": lambda n: b'{"%s": 1, "%s": 2}' % (b"k" * (n // 2), b"k" * (n // 2)),
        "no UTF-8 at the end": lambda n: b'{"a": "' + b"\xc3\xa9" * (n // 2) + b'\xff"}',
    }
    cases = [Case(f"JSON: {name}", make, _quietly(read_completion)) for name, make in bodies.items()]
    for field in ("user", "logit_bias"):  # what is skipped, and what is read
        for name in ("pairs of brackets", "integers of 4,300 digits", "surrogate pairs", "half an escape"):
            value = bodies[name]
            make = lambda n, field=field, value=value: b'{"prompt": "a", "%s": %s}' % (field.encode(), value(n))  # noqa: E731
            cases.append(Case(f"JSON in {field}: {name}", make, _quietly(read_completion)))

    def call(arguments: str) -> bytes:
        function = {"name": "f", "arguments": arguments}
        return json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}).encode()

    def item(arguments: str) -> bytes:
        return json.dumps({"input": [{"type": "function_call", "name": "f", "arguments": arguments}]}).encode()

    for name in list(bodies)[:10]:
        for kind, wrap, read in (("call", call, read_chat), ("response item", item, read_response)):
            make = lambda n, wrap=wrap, name=name: wrap(bodies[name](n).decode())  # noqa: E731
            cases.append(Case(f"a {kind}'s arguments: {name}", make, _quietly(read)))
    return cases


def read_completion(body: bytes, *, warn: bool = False) -> object:
    return PARSER.parse_completion(decoding.decode(body, CompletionRequest, warn=warn))


def read_chat(body: bytes) -> object:
    return PARSER.parse_chat(PARSER.decode(body, ChatRequest))


def read_response(body: bytes) -> object:
    return PARSER.parse_chat(*responses_api.to_chat(PARSER.decode(body, ResponseRequest)))


# -- parameters --------------------------------------------------------------------------------------------------------


def _parameters() -> list[Case]:
    messages = [{"role": "user", "content": "a"}]
    completions: dict[str, Callable[[int], dict[str, Any]]] = {  # next to a prompt
        "an unknown name": lambda n: {"k" * n: 1},
        "unknown names": lambda n: {f"k{i}": 1 for i in range(n // 8)},
        "a model's name": lambda n: {"model": "m" * n},
        "token ids, the last wrong": lambda n: {"prompt": [1] * (n // 2) + [-1]},
        "texts": lambda n: {"prompt": ["a"] * (n // 4)},
        "lists of one id": lambda n: {"prompt": [[1]] * (n // 6)},
        "stop strings": lambda n: {"stop": ["s"] * (n // 4)},
        "a stop string": lambda n: {"stop": "s" * n},
        "bad words": lambda n: {"bad_words": ["s" * 4096] * (n // 4096)},
        "allowed tokens": lambda n: {"allowed_token_ids": [1] * (n // 2)},
        "biases": lambda n: {"logit_bias": {str(i): 1 for i in range(n // 8)}},
        "a bias of a long name": lambda n: {"logit_bias": {"1" * n: 1}},
        "choices": lambda n: {"structured_outputs": {"choice": ["c" * 60] * (n // 64)}},
        "a schema": lambda n: {"structured_outputs": {"json": {"enum": ["c"] * (n // 4)}}},
        "a schema as text": lambda n: {"structured_outputs": {"json": "[" * 70 + '"' + '\\"' * (n // 2)}},
        "a pattern": lambda n: {"structured_outputs": {"regex": "(" * n}},
    }

    def said(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    def called(*functions: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "tool_calls": [{"function": f} for f in functions]}]}

    chats: dict[str, Callable[[int], dict[str, Any]]] = {  # next to a message
        "messages": lambda n: {"messages": messages * (n // 40)},
        "shortest messages": lambda n: {"messages": [{"role": "user", "content": ""}] * (n // 32)},
        "parts of a message": lambda n: said([{"type": "text", "text": "a"}] * (n // 30)),
        "a role": lambda n: {"messages": [{"role": "r" * n}]},
        "a tool's name": lambda n: {"tools": [{"type": "function", "function": {"name": "f" * n}}]},
        "tools": lambda n: {"tools": [{"type": "function", "x": [1] * (n // 3)}]},
        "a choice of a tool": lambda n: {"tool_choice": "t" * n},
        "calls": lambda n: called(*[{"name": "f"}] * (n // 30)),
        "arguments of strings": lambda n: called({"name": "f", "arguments": '{"a":["a"%s]}' % (',""' * (n // 5))}),
        "arguments as an object": lambda n: called({"name": "f", "arguments": {"a": [""] * (n // 4)}}),
    }
    items = {
        "items of a response": lambda n: {
            "input": [{"type": "function_call", "name": "f", "arguments": "{}"}] * (n // 60)
        }
    }
    let_through = {"unknown names that are let through": completions["unknown names"]}
    prompt, message = {"prompt": "a"}, {"messages": messages}
    max_bytes = {"biases": 1 << 19}  # a larger dict outgrows the processor's cache
    return [
        Case(
            f"parameters: {name}",
            lambda n, make=make, given=given: json.dumps(given | make(n)).encode(),  # type: ignore[misc]
            read,
            max_bytes.get(name, MAX_BYTES),
        )
        for given, read, bodies in (
            (prompt, _quietly(read_completion), completions),
            (prompt, _quietly(lambda body: read_completion(body, warn=True)), let_through),
            (message, _quietly(read_chat), chats),
            ({}, _quietly(read_response), items),
        )
        for name, make in bodies.items()
    ]


# -- HTTP --------------------------------------------------------------------------------------------------------------


class _Connection:
    """A `LimitedHttpProtocol` without a socket, whose requests are never answered."""

    def __init__(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None: ...

        self.config = uvicorn.Config(app, log_config=None, lifespan="off")
        self.config.load()

    def read(self, pieces: list[bytes]) -> None:
        state = uvicorn.server.ServerState()
        tasks: list[Any] = []
        loop = mock.Mock()
        loop.create_task.side_effect = lambda task, **_: tasks.append(task) or mock.Mock()
        connection = LimitedHttpProtocol(self.config, state, {}, loop)
        transport = mock.Mock()
        transport.get_extra_info.return_value = None
        transport.is_closing.return_value = False
        transport.get_write_buffer_size.return_value = 0
        connection.connection_made(transport)
        for piece in pieces:
            connection.data_received(piece)
        for task in tasks:
            task.close()


def _connections() -> list[Case]:
    get, post = b"GET / HTTP/1.1\r\nHost: a\r\n", b"POST / HTTP/1.1\r\nHost: a\r\n"
    upgrade = get + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    read_bytes = 1 << 18  # the size of uvloop's reads

    def pieces(data: bytes, size: int) -> list[bytes]:
        return [data[i : i + size] for i in range(0, len(data), size)]

    def chunks(n: int) -> list[bytes]:
        return [post + b"Transfer-Encoding: chunked\r\n\r\n", *pieces(b"1\r\na\r\n" * (n // 6), read_bytes)]

    made: dict[str, tuple[Callable[[int], list[bytes]], int]] = {
        "a header in pieces": (lambda n: pieces(get + b"X: " + b"x" * n, 16), 60_000),
        "a header's name": (lambda n: [get + b"x" * n + b": 1\r\n\r\n"], read_bytes),
        "headers": (lambda n: [get + b"a:b\r\n" * (n // 5) + b"\r\n"], read_bytes),
        "a path": (lambda n: [b"GET /" + b"%2e" * (n // 3) + b" HTTP/1.1\r\nHost: a\r\n\r\n"], read_bytes),
        "slashes": (lambda n: [b"GET /" + b"/" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n"], read_bytes),
        "a query": (lambda n: [b"GET /?" + b"&" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n"], read_bytes),
        "requests": (lambda n: [(get + b"\r\n") * (n // 30)], read_bytes),
        "requests for another protocol": (lambda n: [upgrade * (n // len(upgrade))], read_bytes),
        "chunks of a byte": (chunks, MAX_BYTES),
        "a chunk's extension": (
            lambda n: [post + b"Transfer-Encoding: chunked\r\n\r\n", *pieces(b"1;" + b"x" * n, read_bytes)],
            MAX_BYTES,
        ),
        "no HTTP": (lambda n: [b"\n" * n, b"\r" * n, b"\x16\x03" * n], read_bytes),
    }
    connection = _Connection()
    return [Case(f"HTTP: {name}", make, connection.read, max_bytes) for name, (make, max_bytes) in made.items()]


def _exchange(**scope: Any) -> RequestContext:
    return RequestContext({"type": "http", "method": "GET", "headers": [], "query_string": b"", **scope}, "id")


def _headers() -> list[Case]:
    keys = middleware.ApiKeys(["key"])
    max_bytes = 1 << 18
    cases = [
        Case("headers: an id", lambda n: b"\x7f" * n, middleware.sanitize_request_id, max_bytes),
        Case("headers: Basic", lambda n: b"QUFB" * (n // 4) + b"=", middleware._basic_password, max_bytes),
        Case("headers: a key", lambda n: b"k" * n, keys.find, max_bytes),
    ]
    for kind in (b"a", b".", b":", b"[", b"1", b"[::", b"a."):
        make_host = lambda n, kind=kind: {"headers": [(b"host", kind * (n // len(kind)))]}  # noqa: E731
        cases.append(Case(f"headers: a host of {kind.decode()!r}", make_host, AllowedHosts().check, max_bytes))
    for name, query in {
        "ampersands": lambda n: b"&" * n,
        "percents": lambda n: b"a=" + b"%" * n,
        "escapes": lambda n: b"time_s=" + b"%2e" * (n // 3),
        "digits": lambda n: b"time_s=" + b"9" * n,
        "plus signs": lambda n: b"time_s=" + b"+" * n,
    }.items():
        seconds = _quietly(lambda text: view._seconds(_exchange(query_string=text), "time_s"))
        cases.append(Case(f"query: {name}", query, seconds, max_bytes))
    for path in ("/v1/models/{model:path}", "/debug/requests/{id}", "/view/static/{name:path}"):
        pattern = compile_path(path)[0]
        for kind in ("/", "a", "/a", "\n", "%"):
            start = path.partition("{")[0]
            read = lambda text, pattern=pattern: pattern.match(text)  # noqa: E731
            make = lambda n, start=start, kind=kind: start + kind * n  # noqa: E731
            cases.append(Case(f"route {path}: {kind!r}", make, read, max_bytes))
    for name, text in {
        "control characters": "\x00a",
        "half characters": "\ud800",
        "quotes": '"',
        "letters": "a",
    }.items():
        cases.append(Case(f"an error's text: {name}", _repeated(text), lambda t: ApiError(400, "a", t, t).body()))
    return cases


# -- text --------------------------------------------------------------------------------------------------------------


def _parsed(size: int, kind: Any, **options: Any) -> Callable[[str], object]:
    """An output in pieces; 0: at once. `kind`: the class of the parser."""

    def read(text: str) -> None:
        parser = kind(**options)
        for i in range(0, len(text), size or len(text)):
            parser.push(text[i : i + (size or len(text))])
        parser.finish()

    return read


def _answers() -> list[Case]:
    hermes: dict[str, Any] = {"reasoning": True, "tools": "hermes", "tool_names": ["f"]}
    llama: dict[str, Any] = {"tools": "llama3_json", "tool_names": ["f"]}
    thinking: dict[str, Any] = {"reasoning": True, "starts_in_reasoning": True, "tools": "hermes"}
    texts: dict[str, tuple[dict[str, Any], Callable[[int], str]]] = {
        "white space": (hermes, lambda n: " " * n),
        "white space after reasoning": (hermes, lambda n: "<think></think>" + " \n" * (n // 2)),
        "beginnings of a call": (hermes, lambda n: "<tool_call" * (n // 10)),
        "a call without an end": (hermes, lambda n: "<tool_call>" + "a" * n),
        "white space in a call": (hermes, lambda n: "<tool_call>" + " " * n),
        "white space in a call's head": (hermes, lambda n: '<tool_call>{"name"' + " " * n),
        "beginnings of an end": (hermes, lambda n: "<tool_call>" + "</tool_call" * (n // 11)),
        "brackets in a call": (hermes, lambda n: "<tool_call>" + "[" * n + "</tool_call>"),
        "a string without an end": (hermes, lambda n: '<tool_call>{"a": "' + '\\"' * (n // 2) + "</tool_call>"),
        "calls that are none": (hermes, lambda n: "<tool_call>a</tool_call>" * (n // 24)),
        "calls": (hermes, lambda n: '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * (n // 54)),
        "arguments": (hermes, lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"' * (n // 2)),
        "after the arguments": (hermes, lambda n: '<tool_call>{"name": "f", "arguments": {}' + "}" * n),
        "reasoning": (thinking, lambda n: "</" * (n // 2)),
        "reasoning that ends often": (thinking, lambda n: "</think>" * (n // 8)),
        "Llama: white space": (llama, lambda n: " " * n),
        "Llama: white space after the tag": (llama, lambda n: "<|python_tag|>" + " " * n),
        "Llama: a head without an end": (llama, lambda n: '{"name"' + " " * n),
        "Llama: calls": (llama, lambda n: '{"name": "f", "parameters": {}};' * (n // 32)),
        "Llama: braces": (llama, lambda n: '{"name": "f", "parameters": {}' + "}" * n),
    }
    parsers: list[tuple[str, Callable[[int], str], Any, dict[str, Any]]] = [
        (name, make, OutputParser, options) for name, (options, make) in texts.items()
    ]
    tool = {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}
    value = "<tool_call><function=f><parameter=n>"
    xml: dict[str, Callable[[int], str]] = {
        "calls": lambda n: "<tool_call><function=f></function></tool_call>" * (n // 46),
        "a name without an end": lambda n: "<tool_call><function=" + "a" * n,
        "white space in a call": lambda n: "<tool_call>" + " " * n,
        "parameters": lambda n: "<tool_call><function=f>" + "<parameter=a>b</parameter>" * (n // 26),
        "openings of parameters": lambda n: "<tool_call><function=f>" + "<parameter=" * (n // 11),
        "brackets between parameters": lambda n: "<tool_call><function=f>" + "<" * n,
        "a number without an end": lambda n: value + "1" * n,
        "a number": lambda n: value + "1" * n + "</parameter>",
        "beginnings of an end in a number": lambda n: value + "\n</parameter" * (n // 12),
        "beginnings of an end in a text": lambda n: value.replace("=n", "=a") + "\n</function>" * (n // 12),
        "line breaks in a number": lambda n: value + "\n" * n,
        "deep JSON": lambda n: value + "[" * n + "</parameter>",
        "after a call": lambda n: "<tool_call><function=f></function>" + " " * n,
    }
    parsers += [(f"XML: {name}", make, XmlCallParser, {"tools": [tool]}) for name, make in xml.items()]
    kinds = ("<|start|>", "<|channel|>a <|constrain|>", "<|message|>", "<|call|", " to=f", "<|", "a", " ", "<|a|>")
    call = "<|channel|>a to=functions.f<|message|>"
    heads = {"": "", "a role": "<|start|>", "a recipient": " to=", "a channel": "<|channel|>", "a call": call}
    for name, head in heads.items():
        for part in kinds:
            make = lambda n, head=head, part=part: head + part * (n // len(part))  # noqa: E731
            parsers.append((f"harmony: {name} {part!r}", make, HarmonyParser, {"tool_names": ["f"]}))
    heads = {"": "", "a call": "<|tool_call>", "arguments": "<|tool_call>call:f{", "a value": "<|tool_call>call:f{a:"}
    heads |= {name: f"{heads['a value']}{quote}" for name, quote in (("a string", '<|"|>'), ("JSON", '"'))}
    kinds = (
        "<|channel>",
        "<|tool_call>call:f{",
        "<tool_call|>",
        '<|"|>',
        '"',
        "\\",
        "<|",
        "{",
        "[",
        "}",
        "a:",
        ",",
        " ",
    )
    for name, head in heads.items():
        for part in kinds:
            make = lambda n, head=head, part=part: head + part * (n // len(part))  # noqa: E731
            parsers.append((f"Gemma: {name} {part!r}", make, GemmaParser, {"skipped": ["<pad>"]}))
    return [
        Case(f"an answer {how}: {name}", make, _parsed(size, kind, **options))
        for how, size in (("in pieces", 8), ("at once", 0))
        for name, make, kind, options in parsers
    ]


def _texts() -> list[Case]:
    marker = tokenizer._Marker(["<|im_start|>", "<|im_end|>", "</s>", "<s>"])
    end = chat_template.END_SENTINEL
    cut, pattern = _quietly(chat_template._cut_after_final_message), _quietly(grammar.regex_grammar)
    cases = []
    for name, read, max_bytes, kinds in (
        ("special tokens in a text", marker.mark, MAX_BYTES, ("<|im_", "<", "<|im_end|>", " ", "<s", "a")),
        ("special tokens named", marker.find, MAX_BYTES, ("<|im_", "<", "<|im_end|>", " ", "<s", "a")),
        ("a rendered text", cut, MAX_BYTES, ("a", "\n", " ", end, end.strip())),
        ("a grammar's error", grammar._one_line, MAX_BYTES, ("\n", "\n 1", "\n1 | ", " ", "1")),
        ("a pattern", pattern, 1 << 18, ("(", "a", "[a-z]", "\\d", "(a|b)", "{", "/", "a{1,2}")),
    ):
        cases += [Case(f"{name}: {kind!r}", _repeated(kind), read, max_bytes) for kind in kinds]
    cases.append(Case("choices", lambda n: ["a"] * (n // 4), grammar.choice_grammar))
    schema = lambda n: '{"enum": [' + ",".join(['"\\\\"'] * (n // 6)) + "]}"  # noqa: E731
    cases.append(Case("a schema", schema, grammar.json_grammar))
    return cases


CASES = [*_jsons(), *_parameters(), *_connections(), *_headers(), *_answers(), *_texts()]


def seconds(case: Case, num_bytes: int, runs: int = RUNS, enough_s: float = 0.0) -> float:
    """The minimal CPU time of some runs; stops when one took at most `enough_s`."""
    given, min_s = case.make(num_bytes), float("inf")
    gc.disable()  # full collections would distort the times
    try:
        for _ in range(runs):
            begin = time.thread_time()
            case.read(given)
            min_s = min(min_s, time.thread_time() - begin)
            if min_s <= enough_s:
                break
    finally:
        gc.enable()
    return min_s


def measured(case: Case) -> tuple[int, float, float, float]:
    """n, and the times for n, 2n and 4n bytes in seconds."""
    num_bytes = 1 << 10
    while seconds(case, num_bytes, 2) < MIN_S and 8 * num_bytes <= case.max_bytes:
        num_bytes *= 2
    first = seconds(case, num_bytes)
    allowed = max(first, MIN_S) * RATIO
    return num_bytes, first, seconds(case, 2 * num_bytes), seconds(case, 4 * num_bytes, enough_s=allowed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("ascii", "backslashreplace").decode())
def test_time_is_linear(case: Case) -> None:
    """A quadratic parser is slow every time, a linear one only while others use up the cache and the memory."""
    failed = []
    while len(failed) < ATTEMPTS:
        num_bytes, first, second, fourth = measured(case)
        if fourth <= max(first, MIN_S) * RATIO:
            return
        failed.append((num_bytes, first, second, fourth))
    raise AssertionError(failed)


def main() -> None:
    print(f"{'':<70} {'n':>8} {'n, ms':>8} {'2n, ms':>8} {'4n, ms':>8} {'4n / n':>7}")
    for case in CASES:
        num_bytes, *times = measured(case)
        row = " ".join(f"{1000 * t:8.2f}" for t in times)
        print(f"{ascii(case.name)[1:-1]:<70} {num_bytes:>8} {row} {times[2] / max(times[0], 1e-9):7.1f}", flush=True)


if __name__ == "__main__":
    main()
