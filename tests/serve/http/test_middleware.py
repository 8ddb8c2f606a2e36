"""Keys, request ids, queue limits, disconnecting clients and shutdown."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.serve.admission import Admission
from octavo.serve.args import ServeArgs
from octavo.serve.http import body as body_module
from octavo.serve.http import endpoint as endpoint_module
from octavo.serve.http.allowed_hosts import is_loopback
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.launcher import load_keys
from octavo.serve.openai.errors import ApiError, shutting_down
from tests.engine.models import WrappedModel
from tests.serve.in_process_server import Server, events_of, good, serving

C = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 110, "temperature": 0, "ignore_eos": True}


# -- keys --------------------------------------------------------------------------------------------------------------


async def test_every_path_except_probes_needs_a_key(model: str) -> None:
    async with serving(model, keys=("one", "two")) as server:
        server.client.headers.pop("authorization")
        for path in ("/v1/models", "/metrics", "/openapi.json", "/debug/kv", "/nope", "/%2fhealth", "/health/"):
            response = await server.client.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready"):
            assert (await server.client.get(path)).status_code == 200
            assert (await server.client.post(path)).status_code == 401
        assert (await server.client.get("/%68ealth")).status_code == 401  # the raw path is checked
        assert (await server.post("/tokenize", prompt="a")).status_code == 401
        preflight = {"origin": "http://x", "access-control-request-method": "POST"}
        response = await server.client.options(C, headers=preflight)
        assert response.status_code == 200 and response.content == b""
        assert "access-control-allow-origin" not in response.headers


async def test_public_metrics_and_allowed_origins(model: str) -> None:
    async with serving(model, keys=("k",), metrics_public=True, allowed_origins=["http://a"]) as server:
        assert (await server.client.get("/metrics", headers={"authorization": ""})).status_code == 200
        for origin, allowed in (("http://a", True), ("http://b", False)):
            response = await server.client.get("/version", headers={"origin": origin})
            assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
            requested = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"  # OpenAI's package
            preflight = {"access-control-request-method": "POST", "access-control-request-headers": requested}
            response = await server.client.options(C, headers={"origin": origin, **preflight})
            assert response.headers.get("access-control-allow-headers") == (requested if allowed else None)


async def test_different_keys_share_no_blocks(model: str) -> None:
    async def cached(server: Server, key: str, **more: Any) -> int:
        body = {"prompt": "Hello,world", "max_tokens": 1, **more}
        response = await server.client.post(C, json=body, headers={"authorization": f"Bearer {key}"})
        return int(good(response)["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with serving(model, keys=("one", "two")) as server:
        assert [await cached(server, key) for key in ("one", "one", "two", "two")] == [0, 8, 0, 8]
        assert [await cached(server, "one", cache_salt=salt) for salt in ("a", "a", "b")] == [0, 8, 0]
    async with serving(model, keys=("one",)) as server:
        assert [await cached(server, "one") for _ in range(2)] == [0, 8]


def test_keys_and_exposure(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    for key in ("", "a b", "a\n", "ä"):
        with pytest.raises(ParameterError, match="api_key"):
            ServeArgs(api_key=[key])
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    path.chmod(0o644)
    assert load_keys(ServeArgs(api_key=["zero"], api_key_file=str(path)), ["env"]) == ["zero", "env", "one", "two"]
    assert "is readable by other users" in caplog.text
    path.write_text("\n")
    with pytest.raises(ParameterError, match="no keys"):
        load_keys(ServeArgs(api_key_file=str(path)))
    for host, key, insecure, fine in (
        ("127.0.0.1", (), False, True),
        ("::1", (), False, True),
        ("localhost", (), False, True),
        ("0.0.0.0", (), False, False),
        ("example.org", (), False, False),
        ("0.0.0.0", ("k",), False, True),
        ("0.0.0.0", (), True, True),
    ):
        settings = ServeArgs(host=host, insecure=insecure)
        if fine:
            settings.check_exposure(key)
        else:
            with pytest.raises(ParameterError, match="insecure"):
                settings.check_exposure(key)
    assert is_loopback("127.8.8.8") and not is_loopback("10.0.0.1")
    assert ApiKeys(["one"]).find(b"on") is None


# -- ids ---------------------------------------------------------------------------------------------------------------


async def test_request_ids_are_generated_by_the_server(model: str) -> None:
    async with serving(model) as server:
        for given, shown in (("abc-1", "abc-1"), ("x" * 1000, "x" * 128), ("a b\tc", "abc")):
            response = await server.client.post(C, json=LONG | {"max_tokens": 1}, headers={"x-request-id": given})
            assert response.headers["x-request-id"] == shown
            assert given not in response.json()["id"]
        same = [
            server.client.post(C, json=LONG | {"max_tokens": 3}, headers={"x-request-id": "same"}) for _ in range(3)
        ]
        bodies = [good(response) for response in await asyncio.gather(*same)]
        assert len({body["id"] for body in bodies}) == 3
        response = await server.client.get("/version", headers={b"x-request-id": b"\xff\xfe"})
        assert response.status_code == 200 and len(response.headers["x-request-id"]) == 32


# -- queues ------------------------------------------------------------------------------------------------------------


async def test_full_queue_returns_429_at_once(model: str) -> None:
    async with serving(model, engine_options={"max_num_seqs": 2}, max_num_queued_reqs=1) as server:
        running = [asyncio.ensure_future(server.client.post(C, json=LONG)) for _ in range(5)]
        answers = await asyncio.gather(*running)
        statuses = sorted(a.status_code for a in answers)
        assert statuses == [200, 200, 200, 429, 429]
        refused = next(a for a in answers if a.status_code == 429)
        error = refused.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("queue_full", "rate_limit_error", None)
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        await server.at_rest()
        await server.complete()
    async with serving(model, max_num_queued_tokens=12) as server:
        answers = await asyncio.gather(*(server.client.post(C, json=LONG) for _ in range(4)))
        assert sorted(a.status_code for a in answers) == [200, 200, 429, 429]
        refused = await server.post(C, prompt="a" * 40, max_tokens=1)  # larger than the queue
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_too_large")


async def test_admission_counts() -> None:
    door = Admission(max_num_seqs=2, max_num_queued_reqs=0, max_num_queued_tokens=None)
    with door.admit(2, 10) as ticket:
        assert door.is_full and door.num_queued_tokens == 10
        door.start(ticket)
        assert door.num_queued_tokens == 0
        with pytest.raises(ApiError, match="queue is full"), door.admit(1, 1):
            pass
    assert (door.num_requests, door.num_sequences, door.num_queued_tokens, door.num_rejected) == (0, 0, 0, 1)
    await asyncio.wait_for(door.drained(), 50)
    door.draining = True
    with pytest.raises(ApiError) as caught, door.admit(1, 1):
        pass
    assert (caught.value.status, caught.value.code, caught.value.close) == (503, "shutting_down", True)


async def test_queue_timeout_returns_503(model: str) -> None:
    options = {"max_num_seqs": 1, "enforce_eager": True}
    async with serving(model, engine_options=options, queue_timeout=0.4) as server:
        answers = await asyncio.gather(*(server.client.post(C, json=LONG) for _ in range(12)))
        statuses = [a.status_code for a in answers]
        assert set(statuses) == {200, 503}
        late = next(a for a in answers if a.status_code == 503)
        assert late.json()["error"]["code"] == "queue_timeout" and "retry-after" in late.headers
        await server.at_rest()


# -- leaving -----------------------------------------------------------------------------------------------------------


class Call:
    """One ASGI request by hand: records what the application sends, and can disconnect."""

    def __init__(self, server: Server, body: dict[str, Any], path: str = C) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.stalled = False
        self.aborted = False
        self._content = json.dumps(body).encode()
        self._server = server
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "extensions": {endpoint_module.ABORT: {"call": self._abort}},
        }

    def _abort(self) -> None:
        self.aborted = True

    async def receive(self) -> dict[str, Any]:
        if self._content:
            content, self._content = self._content, b""
            return {"type": "http.request", "body": content, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.stalled:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def run(self) -> None:
        await self._server.app.asgi(self.scope, self.receive, self.send)  # type: ignore[arg-type]

    async def until(self, num_messages: int) -> None:
        while len(self.sent) < num_messages:
            await asyncio.sleep(0.001)

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent).decode()


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts_the_request(model: str, stream: bool) -> None:
    async with serving(model) as server:
        for num_seen in (0, 3) if stream else (0,):
            call = Call(server, LONG | {"stream": stream, "n": 2})
            task = asyncio.ensure_future(call.run())
            await call.until(num_seen)
            while not server.app.service.admission.num_requests:
                await asyncio.sleep(0.001)
            call.gone.set()
            await asyncio.wait_for(task, 50)
            assert "[DONE]" not in call.text
            await server.at_rest()
        metrics = (await server.client.get("/metrics")).text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="499"}' in metrics
        assert 'finished_reason="abort"' in metrics


async def test_client_that_does_not_read_is_aborted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "SEND_TIMEOUT_S", 0.05)
    async with serving(model) as server:
        call = Call(server, LONG | {"stream": True})
        task = asyncio.ensure_future(call.run())
        await call.until(3)
        call.stalled = True
        await asyncio.wait_for(task, 50)
        assert call.aborted
        await server.at_rest()


async def test_client_that_does_not_read_keep_alives_is_aborted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine produces no output meanwhile, so the stream sends only keep-alives."""
    monkeypatch.setattr(endpoint_module, "SEND_TIMEOUT_S", 0.05)
    async with serving(model, sse_keep_alive_interval=0.01) as server:
        advance, silent = server.built.engine.step, threading.Event()

        def slowly() -> Any:
            while silent.is_set():
                time.sleep(0.005)
            time.sleep(0.01)
            return advance()

        server.built.engine.step = slowly  # type: ignore[method-assign]
        call = Call(server, LONG | {"stream": True})
        task = asyncio.ensure_future(call.run())
        await call.until(3)
        silent.set()
        while [m.get("body") for m in call.sent[-5:]] != [b": keep-alive\n\n"] * 5:
            await asyncio.sleep(0.001)
        call.stalled = True
        try:
            await asyncio.wait_for(task, 50)
        finally:
            silent.clear()
        assert call.aborted
        await server.at_rest()


async def test_shutdown_ends_requests_with_an_error(model: str) -> None:
    async with serving(model) as server:
        stream, whole = Call(server, LONG | {"stream": True}), Call(server, LONG)
        tasks = [asyncio.ensure_future(call.run()) for call in (stream, whole)]
        await stream.until(3)
        server.app.service.admission.draining = True
        assert (await server.client.get("/health")).status_code == 200
        ready = await server.client.get("/ready")
        assert ready.status_code == 503 and ready.json()["reason"] == "shutting down"
        late = await server.client.post(C, json=LONG)
        assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
        assert late.headers["connection"] == "close" and "retry-after" in late.headers
        for request in list(server.app.active_requests):
            request.end(shutting_down())
        await asyncio.gather(*tasks)
        assert events_of(stream.text)[-1]["error"]["code"] == "shutting_down"
        assert whole.sent[0]["status"] == 503 and "shutting_down" in whole.text
        await server.at_rest()


async def test_slow_body_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_RATE_WINDOW_S", 0.05)
    monkeypatch.setattr(endpoint_module, "LINGER_S", 0.05)
    async with serving(model) as server:
        call = Call(server, {})
        call._content = b""
        await asyncio.wait_for(call.run(), 50)
        assert call.sent[0]["status"] == 408 and "request_timeout" in call.text


async def test_non_finite_logits_end_only_one_request(model: str) -> None:
    async with serving(model, engine_options={"enforce_eager": True}) as server:
        poison = server.engine.get_tokenizer().encode("~")[0]
        want = (await server.complete("Hello", max_tokens=20))["choices"][0]["text"]

        def spoil(number: int, tokens: list[int], logits: Any) -> None:
            if poison in tokens and len(tokens) > 1:
                logits[-1] = float("nan")

        WrappedModel(SimpleNamespace(engine=server.built.engine), after=spoil)  # type: ignore[arg-type]
        good_ones = [server.complete("Hello", max_tokens=20) for _ in range(3)]
        *answers, bad = await asyncio.gather(*good_ones, server.post(C, prompt="abc~", max_tokens=20))
        assert [a["choices"][0]["text"] for a in answers] == [want] * 3
        error = bad.json()["error"]
        assert (bad.status_code, error["code"], error["type"]) == (500, "numerical_error", "server_error")
        assert bad.headers["x-should-retry"] == "false"
        await server.at_rest()


async def test_dead_engine_is_reported_and_nothing_hangs(model: str) -> None:
    async with serving(model) as server:
        call = Call(server, LONG | {"stream": True})
        task = asyncio.ensure_future(call.run())
        await call.until(3)
        await asyncio.to_thread(server.engine.shutdown)
        await asyncio.wait_for(task, 50)
        assert events_of(call.text)[-1]["error"]["code"] == "engine_unavailable"
        response = await server.client.post(C, json=LONG)
        assert response.status_code == 503 and "retry-after" in response.headers
        assert response.json()["error"]["code"] == "engine_unavailable"
        for path in ("/health", "/ready"):
            assert (await server.client.get(path)).status_code == 503
