"""Garbage, impossible and fatal messages between the engine process and its client.

They go over the socket of a real process, on uvloop. Each ends the connection: the process is replaced, and all
requests finish with their own tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo import SamplingParams
from octavo.engine.beam_search import Hypothesis
from octavo.engine.engine_request import EngineRequest
from octavo.engine.outputs import RequestMetrics
from octavo.engine.process.ipc import (
    AbortRequest,
    AddRequest,
    MessageError,
    RequestError,
    RpcCall,
    RpcReply,
    StepReport,
    StopSample,
    pack_tokens,
    read_commands,
    read_heartbeat,
    read_message,
)
from octavo.engine.process.supervisor import EngineProcess
from octavo.engine.query import GetKVStats
from octavo.engine.request_update import RequestStats, RequestUpdate, SampleUpdate
from octavo.errors import RequestFailedError
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.process_transport import ProcessClient
from octavo.params.beam_search_params import BeamSearchParams
from tests.engine.process.engines import (
    PARAMS,
    expected,
    kill_engine,
    last_of,
    many,
    oracle_client,
    prompt,
    real_client,
    reference_outputs,
    serving,
    tokens_of,
    until,
)

LONGER = SamplingParams(max_tokens=100, seed=1)
GARBAGE = [
    b"",
    b"\xc1",
    b"\x90",
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 5000,
    b"\x91\x92\xa3add\xa2\xff\xfe",
    b"\0" * 70000,
]
P = pack_tokens([1, 2, 3])
encode = msgspec.msgpack.encode


def process_of(client: ProcessClient) -> EngineProcess:
    assert client.transport.supervisor.process is not None
    return client.transport.supervisor.process


def has_started(client: ProcessClient, name: str) -> bool:
    return name in client.transport.handles and client.transport.handles[name].started


async def break_amid_requests(client: ProcessClient, break_it: Callable[[], None], why: str) -> None:
    """Break the connection amid eight requests: they finish right, on another engine process."""
    task = asyncio.ensure_future(many(client, 8, LONGER))
    mine = asyncio.ensure_future(last_of(client, prompt(9), LONGER, request_id="mine"))
    await until(lambda: has_started(client, "mine"))
    pid = client.transport.pid
    break_it()
    assert await task == expected(8, LONGER)
    assert tokens_of(await mine) == reference_outputs(prompt(9), LONGER)
    assert client.transport.pid != pid
    assert (client.health().num_restarts, why in client.health().reason) == (1, True), client.health()


@pytest.mark.parametrize("data", [GARBAGE[1], encode([["stop", "mine", -1]])])
async def test_unreadable_command_replaces_the_engine(model: str, data: bytes) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:
        await break_amid_requests(client, lambda: process_of(client).channel.send_bytes(data), "is unreadable")


async def test_second_request_of_one_id_replaces_the_engine(model: str) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:
        again = encode([AddRequest("mine", P, {})])
        await break_amid_requests(client, lambda: process_of(client).channel.send_bytes(again), "is running already")


@pytest.mark.parametrize("make", [oracle_client, real_client])
async def test_request_that_no_client_sends_fails_alone(model: str, make: Callable[[str], ProcessClient]) -> None:
    wrong: list[Any] = [
        ["w1", P, {"max_tokens": 4}, False, -(1 << 63), 1 << 60],
        ["w2", b"abc", {}],
        ["w3", b"", {}],
        ["w4", pack_tokens([-1, 1 << 30]), {}],
        ["w5", P, {"n": -1}],
        ["w6", P, {"detokenize": True, "stop_strings": []}],
        ["w7", P, {"logit_bias": [[[1]]], "seed": {}}],
        ["w8", P, {"max_tokens": 4}, True],
        ["w9", P, {"max_tokens": 4}, False, 0, 0, b"", {9: pack_tokens([1])}],
        ["w10", P, {"max_tokens": 4}, False, 0, 0, b"", {0: b""}],
        ["w11", P, {"max_tokens": 4}, False, 0, 0, b"", {0: pack_tokens([1] * 9)}],
        ["w12", P, {"max_tokens": 4}, False, 0, 0, b"", {0: pack_tokens([9999])}],
        ["w13", P, {"beam_width": 2, "max_tokens": 4}, True, 0, 0, b"", {0: pack_tokens([1])}],
        ["w14", P, {"structured_outputs": {"regex": 5}}],
        ["w16", P, {"max_tokens": 4}, False, 0, 0, b"", None, True],
        ["pin:w18", P, {"max_tokens": 1, "n": 2}, False, 0, 0, b"", {0: pack_tokens([1])}, True],
    ]
    async with serving(make(model)) as client:
        wanted, pid = await many(client, 4, LONGER), client.transport.pid
        good = asyncio.ensure_future(many(client, 4, LONGER))
        others = [AbortRequest("unknown"), StopSample("unknown", 3), RpcCall(10**6, "no such question")]
        process_of(client).channel.send_bytes(encode([*(["add", *one] for one in wrong), *others]))
        assert await good == wanted == await many(client, 4, LONGER)
        assert (client.transport.pid, client.health().num_restarts) == (pid, 0)
        while (await client.kv_stats()).num_used:
            await asyncio.sleep(0.01)


async def test_request_whose_arrival_meets_a_bug_fails_alone(model: str) -> None:
    async with serving(oracle_client(model, raise_in=["engine.add_request", 3])) as client:
        ends = await asyncio.gather(*(last_of(client, prompt(i), PARAMS) for i in range(8)), return_exceptions=True)
        (error,) = [end for end in ends if isinstance(end, BaseException)]
        assert isinstance(error, RequestFailedError) and "a bug in engine.add_request" in str(error)
        for i, end in enumerate(ends):
            assert end is error or tokens_of(end) == reference_outputs(prompt(i), PARAMS)  # type: ignore[arg-type]
        assert client.health().num_restarts == 0


# -- the client's end --------------------------------------------------------------------------------------------------

IMPOSSIBLE: list[Any] = [
    ["mine", [[1, [3], "", None, None, 0]]],
    ["mine", [[1 << 40, [3]]]],
    ["mine", [[0, [1 << 31]]]],
    ["mine", [[0, [3], "", None, None, 250]]],
    ["mine", [[0, [3], "because"]]],
    ["mine", [], True],
]


async def test_impossible_update_replaces_the_engine(model: str) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:
        data = encode(["step", IMPOSSIBLE[:1], [], []])
        await break_amid_requests(client, lambda: process_of(client).receive(data), "the connection to it ended")


@pytest.mark.parametrize("data", [b"\xc1", encode([-1])])
async def test_unreadable_heartbeat_replaces_the_engine(model: str, data: bytes) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:
        lifeline = process_of(client).lifeline
        receive, broken = lifeline.receive, [data]

        def receive_broken(*, wait: bool = True) -> bytes | None:
            return broken.pop() if broken else receive(wait=wait)

        await break_amid_requests(
            client, lambda: setattr(lifeline, "receive", receive_broken), "its heartbeat is broken"
        )


@pytest.mark.parametrize("update", IMPOSSIBLE)
def test_impossible_update_is_rejected(update: list[Any]) -> None:
    request = ClientRequest(EngineRequest("mine", prompt(9), LONGER))
    with pytest.raises(MessageError):
        request.apply_update(read_message(encode(["step", [update], [], []])).updates[0])  # type: ignore[union-attr]


def test_update_is_applied_whole_or_not_at_all() -> None:
    request = ClientRequest(EngineRequest("a", [1, 2], SamplingParams(n=2, seed=1, max_tokens=5)))
    request.apply_update(RequestUpdate("a", [SampleUpdate(0, [3]), SampleUpdate(1, [4])]))
    with pytest.raises(MessageError, match="it continues at token 0 of sample 1"):
        request.apply_update(RequestUpdate("a", [SampleUpdate(0, [5], position=1), SampleUpdate(1, [4])]))
    assert [c.token_ids for c in request.output().outputs] == [[3], [4]]


# -- reading -----------------------------------------------------------------------------------------------------------


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Truncated, or with bytes changed, repeated or removed."""
    kind = chance.randrange(4)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed))
        changed[at : at + 1] = [bytes([chance.randrange(256)]), b"", changed[at : at + 1] * 2][kind - 1]
    return bytes(changed)


def test_readers_raise_message_errors_only() -> None:
    chance = random.Random(1)
    commands = [AddRequest("f1", P, {"n": 2, "stop_token_ids": [3]}, False, -5, 1, b"salt"), RpcCall(6, GetKVStats())]
    facts = RequestStats(RequestMetrics(0.5, 0.5, num_cached_tokens=1), "", [Hypothesis(-1.0, -2.0, [1], "stop", [])])
    update = RequestUpdate("v", [SampleUpdate(0, [3], "", None, None, 4)], False, facts)
    report = StepReport([update], [RequestError("unknown", "ValueError", "x")], [RpcReply(10**6, 1)])
    assert read_commands(encode(commands))[0] == commands[0] and isinstance(read_message(encode(report)), StepReport)
    for read, message in ((read_commands, commands), (read_message, report), (read_heartbeat, [1, 2.0, 3.0, ""])):
        num_read = 0
        for data in (*GARBAGE, *(mutated(encode(message), chance) for _ in range(3000))):
            with contextlib.suppress(MessageError):
                read(data)
                num_read += 1
        assert 100 < num_read < 2500
    for read, wrong in ((read_commands, [["launch"]]), (read_heartbeat, ["x"])):
        with pytest.raises(MessageError):
            read(encode(wrong))
    with pytest.raises(MessageError) as caught:
        read_commands(encode([["stop", "x\n" * 9000, "y" * 9000]]))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


# -- requests that kill engines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guilty", "params"), [(0, PARAMS), (5, BeamSearchParams(beam_width=2, max_tokens=9)), (7, PARAMS)]
)
async def test_request_that_kills_engines_is_found_by_bisection(model: str, guilty: int, params: Any) -> None:
    """At most eight engines die, and only the guilty request fails."""
    async with serving(oracle_client(model, poison=50, step_s=0.001)) as client:
        prompts = [[1, 2, 50, 3] if i == guilty else prompt(i) for i in range(8)]
        ends = await asyncio.gather(
            *(last_of(client, p, params if i == guilty else PARAMS) for i, p in enumerate(prompts)),
            return_exceptions=True,
        )
        error = ends.pop(guilty)
        assert isinstance(error, RequestFailedError) and "engines died while they ran it" in str(error)
        for i, end in zip([i for i in range(8) if i != guilty], ends, strict=True):
            assert not isinstance(end, BaseException) and tokens_of(end) == reference_outputs(prompts[i], PARAMS)
        assert client.health().num_restarts <= 8 and not client.transport.suspects


async def test_engine_killed_amid_broken_messages_is_replaced_once(model: str) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:

        def kill() -> None:
            process_of(client).channel.send_bytes(b"\xc1")
            process_of(client).receive(b"\xc1")
            kill_engine(client)

        await break_amid_requests(client, kill, "")
