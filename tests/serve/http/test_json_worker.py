"""Large bodies are parsed in a worker process, with the same results and without blocking the event loop."""

from __future__ import annotations

import asyncio
import io
import json
import os
from typing import Any

import pytest

from octavo.frontend.cooperative import YIELD_POINT
from octavo.serve.http import json_parser
from octavo.serve.http import json_worker as json_worker
from octavo.serve.http.json_worker import LARGE_BYTES, LENGTH, JsonWorker, main
from octavo.serve.openai import request as request
from octavo.serve.openai.errors import ApiError
from tests.serve.in_process_server import run, serving

PADDING = "x" * LARGE_BYTES


async def answer_of(worker: JsonWorker, body: bytes) -> Any:
    try:
        return await worker.parse(body)
    except ApiError as api_error:
        return api_error.code, api_error.param


def test_worker_and_direct_parsing_agree() -> None:
    tails = [
        b'"a": [1, -2, 2.5, true, null, {"b": "\xc3\xa9\\u0000"}]}',
        b'"a": NaN}',
        b'"a": {"b": 1, "b": 2}}',
        rb'"a": "\ud800"}',
        b'"a": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'"a": "\xff"}',
        b'"a": {"b": [1, ' + b"9" * 5000 + b"]}}",
        b'"a": ',
    ]

    async def both() -> None:
        worker = JsonWorker()
        try:
            for tail in tails:
                small = await answer_of(worker, b'{"pad": "", ' + tail)
                large = await answer_of(worker, b'{"pad": "' + PADDING.encode() + b'", ' + tail)
                assert large == (small if isinstance(small, tuple) else small | {"pad": PADDING})
            for number in (10**30, -(10**30), -(2**63), 2**64 - 1, 2**64):
                body = f'{{"pad": "{PADDING}", "a": [{number}, {{"b": {number}}}]}}'.encode()
                assert await answer_of(worker, body) == {"pad": PADDING, "a": [number, {"b": number}]}
            before = worker._starting
            assert before is not None
            os.kill((await before).pid, 9)
            assert await answer_of(worker, json.dumps({"pad": PADDING}).encode()) == {"pad": PADDING}
            assert worker._starting is not before
        finally:
            await worker.close()
        assert worker._starting is None

    run(both())


def test_hung_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hung() -> None:
        worker = JsonWorker()
        body = json.dumps({"pad": PADDING}).encode()
        try:
            await worker.parse(body)
            monkeypatch.setattr(json_worker, "MAX_PARSE_S", 0.0)
            assert await answer_of(worker, body) == ("invalid_json", None)
            monkeypatch.setattr(json_worker, "MAX_PARSE_S", 10.0)
            assert await worker.parse(body) == {"pad": PADDING}
            left = asyncio.ensure_future(worker.parse(body))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert await worker.parse(body) == {"pad": PADDING}
        finally:
            await worker.close()

    run(hung())


def test_event_loop_is_not_blocked(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": {str(i): [[i]] for i in range(30_000)}}).encode()

    def parse(_: bytes) -> dict[str, Any]:
        raise AssertionError("it was read here")

    async def respond_meanwhile() -> None:
        async with serving(model, max_body_bytes=8 << 20) as server:
            monkeypatch.setattr(json_worker.json_parser, "parse", parse)
            headers = {"content-type": "application/json"}
            post = asyncio.ensure_future(server.client.post("/v1/completions", content=body, headers=headers))
            num_turns = 0
            while not post.done():
                await asyncio.sleep(0.001)
                num_turns += 1
            assert post.result().status_code == 200 and num_turns > 10

    run(respond_meanwhile())


def test_worker_protocol() -> None:
    bodies = [b'{"a": 1}', b"[]"]
    requests = io.BytesIO(b"".join(LENGTH.pack(len(body)) + body for body in bodies) + b"\0")
    answers = io.BytesIO()
    main(requests, answers)
    assert answers.getvalue().count(b"invalid_type") == 1


def test_keys_and_parts_of_a_body_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes many times its size in the body, and is freed on the event loop."""
    monkeypatch.setattr(json_parser, "MAX_KEYS", 100)
    monkeypatch.setattr(json_parser, "MAX_PARTS", 100)

    def code_of(value: Any) -> str | None:
        try:
            json_parser.parse(json.dumps(value).encode())
        except ApiError as api_error:
            return api_error.code
        return None

    assert code_of({str(i): i for i in range(100)}) is None
    assert code_of({str(i): i for i in range(101)}) == "too_many_keys"
    assert code_of({"a": [{str(i): i for i in range(101)}]}) == "too_many_keys"
    assert code_of({"a": [[]] * 98}) is None  # a hundred, with the two enclosing ones
    assert code_of({"a": [[]] * 99}) == code_of({"a": [{}] * 99}) == "too_many_parts"
    assert code_of({"a": ["[]" * 5000]}) is None  # brackets in strings do not count


def test_tool_call_arguments_are_parsed_in_slices_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(num: int, arguments: str = '{"a": 1}') -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        item = {"type": "function_call", "name": "f", "arguments": arguments}
        return {"messages": [{"role": "assistant", "tool_calls": [call]} for _ in range(num)], "input": [item]}

    given = json.loads(json.dumps(body(3)))
    assert list(request.decode_tool_arguments(given)) == [YIELD_POINT] * 4  # other tasks can run after each
    assert [m["tool_calls"][0]["function"]["arguments"] for m in given["messages"]] == [{"a": 1}] * 3
    assert given["input"][0]["arguments"] == {"a": 1}
    for wrong in ("{", "7", "[" * 70):  # reported by parse_messages, which knows the path
        given = json.loads(json.dumps(body(1, wrong)))
        list(request.decode_tool_arguments(given))
        assert given == body(1, wrong)
        with pytest.raises(ApiError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
            request.parse_messages(given["messages"])
    monkeypatch.setattr(request, "MAX_ARGUMENT_CHARS", 7)
    with pytest.raises(ApiError, match="has 8 characters; the limit is 7"):
        request.parse_messages(body(1)["messages"])
    monkeypatch.setattr(request, "MAX_CALLS", 2)
    with pytest.raises(ApiError) as caught:
        list(request.decode_tool_arguments(json.loads(json.dumps(body(3)))))
    assert (caught.value.code, caught.value.param) == ("array_above_max_length", "messages")
    for odd in ({}, {"messages": 7}, {"messages": [7, {"tool_calls": 7}, {"tool_calls": [7, {"function": 7}]}]}):
        assert not list(request.decode_tool_arguments(odd))
