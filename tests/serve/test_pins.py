"""Pinned prefixes: through a client, across engine restarts, and by `octavo serve --pin-prefix`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine.engine_request import EngineRequest
from octavo.errors import CapacityError, ParameterError
from octavo.frontend.process_transport import ProcessClient
from octavo.serve.args import ServeArgs
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.launcher import load_pin_prefixes
from octavo.serve.service import combine_salts
from tests.engine.process.engines import (  # noqa: F401
    last_of,
    nothing_left,
    oracle_client,
    own_directory,
    reference_outputs,
    run,
    serving,
    tokens_of,
    until,
)

PREFIX = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]  # two blocks and a half
PROMPT = [*PREFIX, 20, 21]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def ids(tokens: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": tokens}


async def cached(client: ProcessClient, prompt: list[int], salt: bytes = b"") -> int | None:
    """Cached tokens of a prompt; the prefix cache is emptied of earlier prompts."""
    await client.reset_prefix_cache()
    output = await last_of(client, ids(prompt), PARAMS, salt=salt)
    assert tokens_of(output) == reference_outputs(prompt, PARAMS) or salt
    return output.num_cached_tokens


async def test_pin_survives_an_engine_restart(model: str) -> None:
    with nothing_left():
        async with oracle_client(model) as client:
            assert await client.pin_prefix(ids(PREFIX), "system") == "system"
            assert await cached(client, PROMPT) == len(PREFIX)
            for restarts in (1, 2):
                os.kill(client.transport.pid or 0, signal.SIGKILL)
                await until(lambda: client.health().num_restarts == restarts and client.transport.supervisor.is_up)  # noqa: B023
                # A request during the recomputation finds the pin's full blocks, but not its tail.
                found = [await cached(client, PROMPT) for _ in range(3)]
                assert found[-1] == len(PREFIX) and found == sorted(found)
                assert (await client.kv_stats()).num_pinned == 3
            assert await client.unpin_prefix("system") == 3
            assert await cached(client, PROMPT) == 0
            assert (await client.kv_stats()).num_used == 0


async def test_pin_that_kills_engines_is_dropped(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """Like a request that kills engines. Other pins stay, requests continue, and the engine is not restarted again."""
    async with serving(oracle_client(model, poison=50, step_s=0.002)) as client:
        assert await client.pin_prefix(ids(PREFIX), "good") == "good"
        client.transport.pins["pin:bad"] = EngineRequest.pinning(
            "bad", [1, 2, 50, 3]
        )  # as after an engine that survived it
        running = asyncio.ensure_future(asyncio.gather(*[last_of(client, ids([i] * 9), PARAMS) for i in range(3)]))
        os.kill(client.transport.pid or 0, signal.SIGKILL)
        await until(lambda: "pin:bad" not in client.transport.pins)
        outputs = await running
        assert [tokens_of(o) for o in outputs] == [reference_outputs([i] * 9, PARAMS) for i in range(3)]
        await until(lambda: not client.transport.handles)
        num_restarts = client.health().num_restarts
        assert num_restarts <= 8 and not client.transport.suspects
        assert await cached(client, PROMPT) == len(PREFIX)
        assert (await client.kv_stats()).num_pinned == 3
        assert client.health().num_restarts == num_restarts
        assert await client.unpin_prefix("good") == 3
        with pytest.raises(ParameterError, match="no prefix is pinned under the name 'bad'"):
            await client.unpin_prefix("bad")
    assert "pin:bad is not pinned any more: " in caplog.text and "engines died while they ran it" in caplog.text


async def test_pin_can_be_unpinned_while_it_is_recomputed(model: str) -> None:
    async with serving(oracle_client(model, slow_at=[0, 0.3])) as client:
        await client.pin_prefix(ids(PREFIX), "early")
        await client.pin_prefix(ids(PROMPT), "late")
        os.kill(client.transport.pid or 0, signal.SIGKILL)
        await until(lambda: client.health().num_restarts == 1 and "pin:late" in client.transport.handles)
        await client.unpin_prefix("late")
        assert "pin:late" not in client.transport.handles
        await until(lambda: not client.transport.handles)
        assert await client.unpin_prefix("early") == 3
        assert (await client.kv_stats()).num_pinned == 0


async def test_pin_refused_by_the_next_engine_is_dropped(model: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(oracle_client(model)) as client:
        client.transport.pins["pin:large"] = EngineRequest.pinning("large", [1] * 250)
        client.transport.pins["pin:larger"] = EngineRequest.pinning("larger", [2] * 250)
        os.kill(client.transport.pid or 0, signal.SIGKILL)
        await until(lambda: len(client.transport.pins) == 1)
        await until(lambda: not client.transport.handles)
        assert (await client.kv_stats()).num_pinned == 63
        assert await client.unpin_prefix("large") == 63
    assert "pin:larger is not pinned any more" in caplog.text


async def test_refused_or_cancelled_pin_leaves_nothing(model: str) -> None:
    async with oracle_client(model) as client:
        name = await client.pin_prefix(ids(PREFIX), salt=b"tenant")
        assert await cached(client, PROMPT) == 0
        assert await cached(client, PROMPT, b"tenant") == len(PREFIX)
        with pytest.raises(ParameterError, match="is pinned already"):
            await client.pin_prefix(ids([1]), name)
        for first in range(30, 37):
            await client.pin_prefix(ids([first] * 50))
        with pytest.raises(CapacityError, match="at most half of the pool's 200"):  # 94 are pinned
            await client.pin_prefix(ids([9] * 50))
        with pytest.raises(ParameterError, match="no prefix is pinned under the name 'other'"):
            await client.unpin_prefix("other")
        before = (await client.kv_stats()).num_pinned
        pinning = asyncio.ensure_future(client.pin_prefix(ids([3] * 9), "left"))
        while "pin:left" not in client.transport.handles:
            await asyncio.sleep(0)
        pinning.cancel()
        await asyncio.gather(pinning, return_exceptions=True)
        assert (await client.kv_stats()).num_pinned == before and not client.transport.handles


def test_pin_prefix_files(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    (tmp_path / "a.json").write_text(json.dumps(messages))
    (tmp_path / "b.txt").write_text("Be brief.\n")
    names = [str(tmp_path / "a.json"), str(tmp_path / "b.txt")]
    assert list(load_pin_prefixes(ServeArgs(pin_prefix=names)).values()) == [messages, "Be brief.\n"]
    for text in ("{", "{}", "[]", '["x"]', '[{"content": "x"}]', '"text"'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ParameterError, match=r"pin_prefix .*c\.json"):
            load_pin_prefixes(ServeArgs(pin_prefix=[str(tmp_path / "c.json")]))
    with pytest.raises(ParameterError, match="No such file"):
        load_pin_prefixes(ServeArgs(pin_prefix=[str(tmp_path / "none")]))
    (tmp_path / "d").write_bytes(b"\xff")
    with pytest.raises(ParameterError, match="utf-8"):
        load_pin_prefixes(ServeArgs(pin_prefix=[str(tmp_path / "d")]))


def test_each_tenant_has_its_own_pin() -> None:
    """Prompts after a pin are cached under it: tenants that shared one could infer each other's prompts from timing."""
    keys = ApiKeys(["one", "two"])
    salts = {combine_salts(found.salt) for key in (b"one", b"two") if (found := keys.find(key))}
    assert len(salts) == 2 and salts == {combine_salts(salt) for salt in keys.salts()}
    assert ApiKeys([]).salts() == ApiKeys(["one"]).salts() == {b""} and combine_salts(b"") == b""
