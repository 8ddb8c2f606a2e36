"""Large bodies are read elsewhere, with the same answers, and nobody waits for it."""

from __future__ import annotations

import asyncio
import io
import json
import os
from typing import Any

import pytest

from octavo.serve import body_worker
from octavo.serve.body_worker import LARGE_BYTES, LENGTH, BodyWorker, main
from octavo.serve.problems import Problem

from .http_lab import run, serving

PADDING = "x" * LARGE_BYTES


async def answer_of(worker: BodyWorker, body: bytes) -> Any:
    try:
        return await worker.parse(body)
    except Problem as problem:
        return problem.code, problem.param


def test_the_same_answers_wherever_a_body_is_read() -> None:
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
        worker = BodyWorker()
        try:
            for tail in tails:
                small = await answer_of(worker, b'{"pad": "", ' + tail)
                large = await answer_of(worker, b'{"pad": "' + PADDING.encode() + b'", ' + tail)
                assert large == (small if isinstance(small, tuple) else small | {"pad": PADDING})
            for number in (10**30, -(10**30), -(2**63), 2**64 - 1, 2**64):
                body = f'{{"pad": "{PADDING}", "a": [{number}, {{"b": {number}}}]}}'.encode()
                assert await answer_of(worker, body) == {"pad": PADDING, "a": [number, {"b": number}]}
            before = worker._process
            assert before is not None
            os.kill(before.pid, 9)
            assert await answer_of(worker, json.dumps({"pad": PADDING}).encode()) == {"pad": PADDING}
            assert worker._process is not before
        finally:
            await worker.close()
        assert worker._process is None

    run(both())


def test_a_worker_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hung() -> None:
        worker = BodyWorker()
        body = json.dumps({"pad": PADDING}).encode()
        try:
            await worker.parse(body)
            monkeypatch.setattr(body_worker, "MOST_S", 0.0)
            assert await answer_of(worker, body) == ("invalid_json", None)
            monkeypatch.setattr(body_worker, "MOST_S", 10.0)
            assert await worker.parse(body) == {"pad": PADDING}
            left = asyncio.ensure_future(worker.parse(body))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert await worker.parse(body) == {"pad": PADDING}
        finally:
            await worker.close()

    run(hung())


def test_the_loop_goes_on_meanwhile(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": {str(i): [[i]] for i in range(30_000)}}).encode()

    def parse(_: bytes) -> dict[str, Any]:
        raise AssertionError("it was read here")

    async def beside() -> None:
        async with serving(model, max_body_bytes=8 << 20) as server:
            monkeypatch.setattr(body_worker.json_body, "parse", parse)
            headers = {"content-type": "application/json"}
            post = asyncio.ensure_future(server.client.post("/v1/completions", content=body, headers=headers))
            num_turns = 0
            while not post.done():
                await asyncio.sleep(0.001)
                num_turns += 1
            assert post.result().status_code == 200 and num_turns > 10

    run(beside())


def test_the_worker_itself() -> None:
    bodies = [b'{"a": 1}', b"[]"]
    requests = io.BytesIO(b"".join(LENGTH.pack(len(body)) + body for body in bodies) + b"\0")
    answers = io.BytesIO()
    main(requests, answers)
    assert answers.getvalue().count(b"invalid_type") == 1
