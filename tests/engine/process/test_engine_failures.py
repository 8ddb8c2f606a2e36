"""Responses of `octavo serve` when its engine fails, for good or for one request: raw sockets, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.engine.models import make_talking_checkpoint
from tests.engine.process.engines import children_of
from tests.proof.server_trials import Server
from tests.serve.raw_client import RawClient, RawResponse

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GROWS = "(" * 30 + "a" + "{1,9})" * 30
"""A regex that compiles, but whose automaton exceeds the limit after a few tokens."""
GROWS_LATE = "((a?b?c?d?){200}){200}"
"""Exceeds it after some dozens of tokens."""
ORACLE = str(Path(__file__).parents[2] / "proof" / "oracle_server.py")


@contextlib.asynccontextmanager
async def server_of(model: Path, program: tuple[str, ...] = ("-m", "octavo.cli.main")) -> AsyncIterator[Server]:
    arguments = ("serve", str(model), "--port", "0", "--api-key", "key", "--block-size", "4", "--max-num-seqs", "16")
    server = Server([sys.executable, *program, *arguments, "--num-gpu-blocks-override", "2100"])
    try:
        await server.ready()
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        try:
            assert await server.left(30) is not None
        finally:
            server.process.kill()
            server.process.wait()
        text = server.log.read_text()
        server.log.unlink()
    assert "Traceback" not in text or program[0] == ORACLE, text


def engine_of(server: Server) -> int:
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(server.process.pid)}
    (pid,) = [pid for pid, name in names.items() if b"oracle_engine" in name]
    return pid


async def post(server: Server, body: Any = None, path: str = COMPLETIONS, **options: Any) -> RawResponse:
    client = RawClient(server.port)
    try:
        return await client.ask(body, path, **options)
    finally:
        client.close()


def error_of(answer: RawResponse) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.body)["error"]
    return error


def make_model(directory: Path, **sizes: Any) -> Path:
    directory.mkdir()
    make_talking_checkpoint(directory, **sizes)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


async def test_failed_engine_is_reported_as_unavailable(tmp_path: Path) -> None:
    """Its model directory is deleted, so no engine starts again. Responses mention neither a restart nor a path."""
    model = make_model(tmp_path / "secret")
    async with server_of(model, (ORACLE, json.dumps({"needs": str(model), "step_s": 0.05}))) as server:
        begun = asyncio.Event()
        long = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
        stream = asyncio.ensure_future(post(server, long | {"stream": True}, on_data=lambda data: begun.set()))
        whole = asyncio.ensure_future(post(server, long))
        await asyncio.wait_for(begun.wait(), 60)
        shutil.rmtree(model)
        os.kill(engine_of(server), signal.SIGKILL)
        while (await post(server, path="/ready")).status != 503:
            await asyncio.sleep(0.01)
        assert (await post(server, path="/health")).status == 200  # it may recover
        waiting = asyncio.ensure_future(post(server, {"prompt": "Hello", "max_tokens": 2}))
        cut = await stream
        assert cut.status == 200 and cut.code == "engine_unavailable"
        assert cut.body.endswith(b"data: [DONE]\n\n")
        failed = [await whole, await waiting]
        ready, health = [await post(server, path=path) for path in ("/ready", "/health")]
        assert (ready.status, health.status) == (503, 503) and "retry-after" in ready.headers
        assert "the engine has failed" in json.loads(ready.body)["reason"]
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        for path, body in [
            (COMPLETIONS, {"prompt": "Hello"}),
            (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}),
            (CHAT, chat),
            (CHAT, chat | {"stream": True}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/responses", {"input": "Hello", "stream": True}),
            ("/debug/kv", None),
            ("/debug/requests/x", None),
        ]:
            failed.append(await post(server, body, path))
        for answer in failed:
            error = error_of(answer)
            assert (answer.status, error["code"], error["type"]) == (503, "engine_unavailable", "server_error")
            assert "will not be restarted" in error["message"] and int(answer.headers["retry-after"]) > 0
        bye = await post(server, path="/view/events")
        for answer in [cut, ready, bye, *failed]:
            shown = b"".join(line for line in answer.body.splitlines() if b'"choices"' not in line)
            assert b"secret" not in shown and b"restarting" not in shown and b"is started again" not in shown


async def test_too_complex_grammar_fails_its_request_only(tmp_path: Path) -> None:
    """With status 400 before the first byte, and with an error event in the stream after it."""
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    async with server_of(model) as server:
        plain = {"prompt": "Hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        wanted = json.loads((await post(server, plain)).body)["choices"]
        grows = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "structured_outputs": {"regex": GROWS}}
        late = grows | {"stream": True, "structured_outputs": {"regex": GROWS_LATE}}
        statuses = []
        while 200 not in statuses:  # on a busy machine, the error may precede the first byte
            assert len(statuses) < 10, statuses
            neighbours = [asyncio.ensure_future(post(server, plain)) for _ in range(4)]
            whole, stream = await asyncio.gather(post(server, grows), post(server, late))
            error = error_of(whole)
            assert (whole.status, error["code"], error["type"], error["param"]) == (
                400,
                "grammar_too_complex",
                "invalid_request_error",
                "structured_outputs",
            )
            statuses.append(stream.status)
            assert stream.code == "grammar_too_complex"
            if stream.status == 200:
                assert stream.body.endswith(b"data: [DONE]\n\n")
                events = [e for e in stream.events if isinstance(e, dict) and "choices" in e]
                assert set("".join(e["choices"][0]["text"] for e in events)) <= set("abcd")
            for neighbour in await asyncio.gather(*neighbours):
                assert json.loads(neighbour.body)["choices"] == wanted
        assert await server.at_rest()


async def test_failing_debug_calls_fail_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    faults = json.dumps({"no_answer": ["DescribeKV", "DescribeRequest"]})
    async with server_of(model, (ORACLE, faults)) as server:
        for path in ("/debug/kv", "/debug/requests/x"):
            answer = await post(server, path=path)
            error = error_of(answer)
            assert (answer.status, error["code"], error["type"]) == (500, "internal_error", "server_error")
            assert "the engine has failed" not in error["message"] and b"home" not in answer.body
            assert (await post(server, path="/ready")).status == 200
            assert (await post(server, {"prompt": [1, 2], "max_tokens": 2})).status == 200
