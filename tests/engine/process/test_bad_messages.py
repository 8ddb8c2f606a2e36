"""Garbage, truncated, duplicate, lost and invalid messages between the engine process and its client.

They go over the socket of a real process, on uvloop. At most the request that a message names fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from octavo import SamplingParams
from octavo.engine.beam_search import Hypothesis
from octavo.engine.engine_request import EngineRequest
from octavo.engine.process.ipc import (
    AbortRequest,
    AddRequest,
    Channel,
    EngineFailed,
    Hello,
    Ready,
    RequestError,
    RequestStats,
    RequestUpdate,
    RpcCall,
    RpcReply,
    SampleUpdate,
    StepReport,
    StopSample,
    endpoint_in,
    pack_tokens,
    read_commands,
    read_message,
)
from octavo.engine.process.supervisor import EngineProcess
from octavo.engine.query import DescribeRequest, GetKVStats
from octavo.errors import EngineError, ParameterError, PromptError, RequestFailedError
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.process_transport import MAX_LOSSES, ProcessClient
from octavo.params.beam_search_params import BeamSearchParams
from tests.engine.process.engines import (
    PARAMS,
    expected,
    last_of,
    many,
    oracle_client,
    prompt,
    real_client,
    reference_outputs,
    run,
    serving,
    tokens_of,
    until,
)

LONGER = SamplingParams(max_tokens=100, seed=1)
encode = msgspec.msgpack.encode


def process_of(client: ProcessClient) -> EngineProcess:
    process = client.transport._supervisor._process
    assert process is not None
    return process


def send_raw(client: ProcessClient, *parts: bytes) -> None:
    """Send raw message parts to the engine."""
    channel = process_of(client)._channel
    channel._socket.send_multipart(parts, zmq.NOBLOCK)
    asyncio.get_running_loop().call_soon(channel._drain)  # sending may consume the edge that signals an arrival


async def wait_for_rest(client: ProcessClient) -> None:
    while (await client.kv_stats()).num_used:
        await asyncio.sleep(0.01)


async def results_of(*tasks: Any) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


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
COMMANDS: list[Any] = [
    AddRequest("f0", P, {"max_tokens": 4}, False, 7),
    AddRequest("f1", P, {"max_tokens": 4, "n": 2, "logprobs": 1, "stop_token_ids": [3]}, False, -5, 1, b"salt"),
    AddRequest("f2", P, {"beam_width": 2, "max_tokens": 4}, True),
    AddRequest("f3", P, {"max_tokens": 9}, False, 0, 0, b"", {0: pack_tokens([1, 2])}),
    AbortRequest("f0"),
    StopSample("f1", 1),
    RpcCall(10**6, GetKVStats()),
    RpcCall(10**6, DescribeRequest("f0")),
]
WRONG: list[Any] = [
    ["add", "w0", P, {"max_tokens": 4}, False, 1 << 63],
    ["add", "w1", P, {"max_tokens": 4}, False, -(1 << 63), 1 << 60],
    ["add", "w2", b"abc", {}],
    ["add", "w3", b"", {}],
    ["add", "w4", pack_tokens([-1, 1 << 30]), {}],
    ["add", "w5", P, {"n": -1}],
    ["add", "w6", P, {"detokenize": True, "stop_strings": []}],
    ["add", "w7", P, {"logit_bias": [[[1]]], "seed": {}}],
    ["add", "w8", P, {"max_tokens": 4}, True],
    ["add", "w9", P, {"max_tokens": 4}, False, 0, 0, b"", {9: pack_tokens([1])}],
    ["add", "w10", P, {"max_tokens": 4}, False, 0, 0, b"", {0: b""}],
    ["add", "w11", P, {"max_tokens": 4}, False, 0, 0, b"", {0: pack_tokens([1] * 9)}],
    ["add", "w12", P, {"max_tokens": 4}, False, 0, 0, b"", {0: pack_tokens([9999])}],
    ["add", "w13", P, {"beam_width": 2, "max_tokens": 4}, True, 0, 0, b"", {0: pack_tokens([1])}],
    ["add", "w14", P, {"structured_outputs": {"regex": 5}}],
    ["add", "w15", "text", {}, 3],
    ["add", "w16", P, {"max_tokens": 4}, False, 0, 0, b"", None, True],
    ["add", "pin:w17", P, {"max_tokens": 4}, False, 0, 0, b"", None, True],
    ["add", "pin:w18", P, {"max_tokens": 1, "n": 2}, False, 0, 0, b"", {0: pack_tokens([1])}, True],
    ["add", 5, P, {}],
    ["add"],
    ["stop", "unknown", -1],
    ["stop", "unknown", 1 << 40],
    ["abort", None],
    ["abort", "unknown"],
    ["rpc", -1, "kv_stats"],
    ["rpc", 10**6, "no such question"],
    ["rpc", 10**6, "unpin", "nothing"],
    ["launch"],
    [],
    7,
]


@pytest.mark.parametrize("make", [oracle_client, real_client])
def test_bad_commands_fail_no_engine_and_no_other_request(model: str, make: Callable[[str], EngineClient]) -> None:
    chance = random.Random(1)

    async def main() -> None:
        async with serving(make(model)) as client:
            wanted = await many(client, 6, LONGER)
            pid = client.transport.pid
            good = asyncio.ensure_future(many(client, 6, LONGER))
            while not good.done():
                for data in GARBAGE:
                    send_raw(client, data)
                send_raw(client, encode([AbortRequest("unknown")]), b"\xc1", b"")
                send_raw(client, encode(WRONG))
                for _ in range(30):
                    send_raw(client, chance.randbytes(chance.randrange(60)))
                    send_raw(client, mutated(encode(chance.choices(COMMANDS, k=chance.randint(1, 3))), chance))
                await asyncio.sleep(0.02)
            assert await good == wanted
            await wait_for_rest(client)
            assert await many(client, 6, LONGER) == wanted
            assert client.transport.pid == pid and client.health().num_restarts == 0
            assert (await client.stats()).engine.num_bad_messages > 50
            await wait_for_rest(client)

    run(main())


def test_duplicate_add_does_not_affect_the_running_request(model: str) -> None:
    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.002)) as client:
            task = asyncio.ensure_future(last_of(client, prompt(0), PARAMS, request_id="mine"))
            await until(lambda: client.transport._handles and client.transport._handles["mine"].started)
            send_raw(
                client,
                encode([AddRequest("mine", P, {}), ["add", "mine", "no bytes", {}], AddRequest("mine", b"x", {})]),
            )
            assert tokens_of(await task) == reference_outputs(prompt(0), PARAMS)
            await until(lambda: client.transport._stats.engine.num_bad_messages == 3)

    run(main())


def test_requests_continue_under_a_flood_of_messages(model: str) -> None:
    async def main() -> None:
        async with serving(oracle_client(model)) as client:
            good = asyncio.ensure_future(many(client, 3))
            begin = time.monotonic()
            while not good.done() and time.monotonic() - begin < 20:
                send_raw(client, *[encode([["abort", None]] * 20)] * 4)
                await asyncio.sleep(0.001)
            assert good.done() and await good == expected(3)

    run(main())


def test_messages_after_a_failing_one_are_read() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        complaints: list[Any] = []
        loop.set_exception_handler(lambda loop, context: complaints.append(context["exception"]))
        with tempfile.TemporaryDirectory() as directory:
            here = Channel(bind=endpoint_in(directory))
            there = Channel(connect=endpoint_in(directory))
            read: list[Any] = []

            def take(data: bytes) -> None:
                read.append(msgspec.msgpack.decode(data))
                if read[-1] == 1:
                    raise RuntimeError("a bug")

            here.attach(loop, take)
            for number in range(5):
                there.send(number)
            await until(lambda: len(read) == 5)
            here.close()
            there.close()
        assert read == [0, 1, 2, 3, 4] and [str(e) for e in complaints] == ["a bug"]

    run(main())


def test_bad_command_fails_the_request_that_it_names(model: str) -> None:
    """With a clear error; later commands of the same message count."""

    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.002)) as client:
            good = asyncio.ensure_future(many(client))
            task = asyncio.ensure_future(last_of(client, prompt(0), LONGER, request_id="mine"))
            await until(lambda: "mine" in client.transport._handles and client.transport._handles["mine"].started)
            send_raw(client, encode([["stop", "mine", -1], RpcCall(10**6, GetKVStats())]))
            with pytest.raises(RequestFailedError, match="a command of request 'mine' is unusable") as caught:
                await task
            assert caught.value.code == "bad_message"
            assert await good == expected()

    run(main())


# -- the client's end --------------------------------------------------------------------------------------------------


def bad_updates(name: str) -> list[Any]:
    """Updates that no engine can send for a request with one sample."""
    return [
        [name, [[1, [3], "", None, None, 0]]],
        [name, [[127, [3], "stop", None, None, 0]], True],
        [name, [[1 << 40, [3]]]],
        [name, [[-1, [3]]]],
        [name, [[0, [1 << 31]]]],
        [name, [[0, [-4]]]],
        [name, [[0, [96 + 1], "", None, None, 1]]],
        [name, [[0, [3], "because"]]],
        [name, [[0, "text"]]],
        [name, [], True],
        [name, [[0, [], "", None, [[0.5, 1, [], []]] * 3, 1]]],
        [name, None],
        [name],
    ]


@pytest.mark.parametrize("number", range(len(bad_updates(""))))
def test_bad_update_fails_its_request_and_hangs_none(model: str, number: int) -> None:
    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.002)) as client:
            good = asyncio.ensure_future(many(client))
            task = asyncio.ensure_future(last_of(client, prompt(0), LONGER, request_id="bad"))
            await until(lambda: "bad" in client.transport._handles and client.transport._handles["bad"].started)
            process_of(client)._on_data(encode(["step", [bad_updates("bad")[number]], [], []]))
            with pytest.raises(RequestFailedError, match="'bad' is unusable and is dropped") as caught:
                await task
            assert caught.value.code == "bad_message"
            assert await good == expected()
            assert tokens_of(await last_of(client, prompt(0), PARAMS, request_id="bad")) == reference_outputs(
                prompt(0), PARAMS
            )
            assert (await client.stats()).engine.num_bad_messages == 1

    run(main())


def test_update_with_a_position_ahead_is_ignored(model: str) -> None:
    """Earlier tokens may be lost; the audit finds that they are not."""

    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.002)) as client:
            task = asyncio.ensure_future(last_of(client, prompt(0), LONGER, request_id="a"))
            await until(lambda: "a" in client.transport._handles and client.transport._handles["a"].started)
            process_of(client)._on_data(encode(["step", [["a", [[0, [3], "", None, None, 250]]]], [], []]))
            assert tokens_of(await task) == reference_outputs(prompt(0), LONGER)
            assert (await client.stats()).engine.num_bad_messages == 1

    run(main())


def test_bad_reports_fail_no_client_and_no_other_request(model: str) -> None:
    chance = random.Random(2)
    reports: list[Any] = [
        Hello(),
        EngineFailed("ModelError", "no"),
        Ready(97, 128, [2], 20, {}),
        StepReport([], [], []),
    ]
    victims = [f"v{i}" for i in range(6)]

    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.002)) as client:
            good = asyncio.ensure_future(many(client, 6, LONGER))
            bad = [
                asyncio.ensure_future(last_of(client, prompt(i), LONGER, request_id=v)) for i, v in enumerate(victims)
            ]
            await until(
                lambda: all(v in client.transport._handles and client.transport._handles[v].started for v in victims)
            )
            hear = process_of(client)._on_data
            while not good.done():
                for data in (*GARBAGE, *map(encode, WRONG)):
                    hear(data)
                for _ in range(20):
                    hear(chance.randbytes(chance.randrange(60)))
                    hear(mutated(encode(chance.choice(reports)), chance))
                    sample = SampleUpdate(
                        chance.randrange(3), [chance.randrange(97)], "", None, None, chance.randrange(40)
                    )
                    facts = RequestStats(1, 2, 0.5, "", [Hypothesis(-1.0, -2.0, [1], "stop", [])])
                    step = StepReport(
                        [RequestUpdate(chance.choice(victims), [sample], False, facts)],
                        [RequestError("unknown", "ValueError", "x")],
                        [RpcReply(10**6, 1)],
                    )
                    hear(mutated(encode(step), chance))
                await asyncio.sleep(0.01)
            assert await good == expected(6, LONGER)
            ends = await results_of(*bad)
            assert any(isinstance(end, RequestFailedError) for end in ends)
            for i, end in enumerate(ends):
                assert isinstance(end, RequestFailedError) or tokens_of(end) == reference_outputs(prompt(i), LONGER)
            assert client.health().num_restarts == 0
            assert await many(client) == expected()

    run(main())


@pytest.mark.parametrize("direction", ["to the engine", "from the engine"])
def test_content_of_lost_messages_is_recovered(model: str, direction: str) -> None:
    """Some messages arrive as garbage: tokens, finish reasons, replies, new requests and aborts are lost."""
    chance = random.Random(3)

    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.002)) as client:
            process = process_of(client)
            hear, send = process._on_data, process._channel.send
            num_lost = num_lost_in_turn = 0

            def lossy(data: bytes) -> bytes:
                nonlocal num_lost, num_lost_in_turn
                # One message adds all requests of a turn, so losing more of them would fail all requests.
                is_sent = direction == "to the engine"
                if chance.random() < (0.3 if is_sent else 0.04) and not (is_sent and num_lost_in_turn == MAX_LOSSES):
                    num_lost, num_lost_in_turn = num_lost + 1, num_lost_in_turn + 1
                    return data[: chance.randrange(len(data))]
                return data

            if direction == "from the engine":
                process._channel._on_data = lambda data: hear(lossy(data))
            else:
                process._channel.send = lambda message: send_raw(client, lossy(encode(message)))  # type: ignore[method-assign]
            losers = 0
            for turn in range(12):
                num_lost_in_turn = 0
                samples = SamplingParams(
                    n=3, max_tokens=40, seed=3, stop_token_ids=[4], logprobs=0 if turn % 2 else None
                )
                beams = BeamSearchParams(beam_width=2, max_tokens=6)
                ends = await results_of(
                    *(last_of(client, prompt(i), PARAMS) for i in range(8)),
                    last_of(client, prompt(9), samples),
                    last_of(client, prompt(9), beams),
                )
                wanted = [reference_outputs(prompt(i), PARAMS) for i in range(8)] + [
                    reference_outputs(prompt(9), samples)
                ]
                for end, want in zip(ends, wanted, strict=False):
                    if isinstance(end, RequestFailedError):
                        losers += 1  # its messages were lost too often
                    else:
                        assert tokens_of(end) == want
                assert not isinstance(ends[-1], Exception) or isinstance(ends[-1], RequestFailedError)
                await client.kv_stats()
            assert num_lost > 5 and losers <= 3
            process._channel._on_data = hear
            process._channel.send = send  # type: ignore[method-assign]
            await until(lambda: not client.transport._ended_here)
            await wait_for_rest(client)

    run(main())


def test_bad_heartbeat_is_dropped(model: str) -> None:
    async def main() -> None:
        async with serving(oracle_client(model)) as client:
            process = process_of(client)
            heartbeats = [b"\xc1", b"\x90\x90", encode([-1]), encode([1, -2.0]), encode(["x"])]
            receive = process._lifeline.receive
            process._lifeline.receive = lambda *, wait=True: heartbeats.pop() if heartbeats else receive(wait=wait)  # type: ignore[method-assign]
            await until(lambda: not heartbeats)
            assert await many(client, 2) == expected(2)
            assert client.health().num_restarts == 0
            assert (await client.stats()).engine.num_bad_messages == 5

    run(main())


# -- reading -----------------------------------------------------------------------------------------------------------


def test_readable_parts_of_a_message_count() -> None:
    commands, bad = read_commands(encode([AbortRequest("a"), ["stop", "b", -1], RpcCall(1, "x"), ["add", "c"], 5]))
    assert commands == [AbortRequest("a"), RpcCall(1, "x")]
    assert [(b.request_id, b.is_add) for b in bad] == [("b", False), ("c", True), (None, False)]
    report, bad = read_message(encode(["step", [["a", []], ["b", 5]], [["c", "ValueError"]], [[1, "x"], [-1]], None]))
    assert isinstance(report, StepReport)
    assert [u.request_id for u in report.updates] == ["a"] and [a.number for a in report.replies] == [1]
    assert [b.request_id for b in bad] == ["b", "c", None]


def test_bad_message_is_logged_in_one_short_line() -> None:
    _, (bad,) = read_commands(encode([["stop", "x\n" * 9000, "y" * 9000]]))
    assert "\n" not in str(bad) and len(str(bad)) < 400


def test_bad_update_is_not_applied() -> None:
    request = ClientRequest(EngineRequest("a", [1, 2], SamplingParams(n=2, seed=1, max_tokens=5)), vocab_size=10)
    request.apply_update(RequestUpdate("a", [SampleUpdate(0, [3]), SampleUpdate(1, [4])]))
    with pytest.raises(ValueError, match="it continues at token 0 of sample 1"):
        request.apply_update(RequestUpdate("a", [SampleUpdate(0, [5], position=1), SampleUpdate(1, [4])]))
    assert [c.token_ids for c in request.output().outputs] == [[3], [4]]


@pytest.mark.parametrize("guilty", [0, 5, 7])
def test_request_that_kills_engines_is_found_by_bisection(model: str, guilty: int) -> None:
    """Fewer than eight engines die, and only the guilty request fails."""

    async def main() -> None:
        async with serving(oracle_client(model, poison=50, step_s=0.001)) as client:
            prompts = [[1, 2, 50, 3] if i == guilty else prompt(i) for i in range(8)]
            ends = await results_of(*(last_of(client, p, PARAMS) for p in prompts))
            assert isinstance(ends[guilty], RequestFailedError) and "engines died while they ran it" in str(
                ends[guilty]
            )
            for i, end in enumerate(ends):
                assert i == guilty or tokens_of(end) == reference_outputs(prompts[i], PARAMS)
            assert client.health().num_restarts <= 8
            assert not client.transport._suspects

    run(main())


def test_requests_to_a_failed_engine_get_an_engine_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cause: a later request is not at fault."""

    async def main() -> None:
        async with serving(oracle_client(model)) as client:
            client.transport._on_failed(ParameterError("the model directory has gone", param="model"))
            for error in (PromptError("x"), EngineError("y")):
                client.transport._on_failed(error)  # the first error counts
            with pytest.raises(EngineError, match="the model directory has gone") as caught:
                await last_of(client, prompt(0), PARAMS)
            assert type(caught.value) is EngineError

    run(main())


def test_engine_killed_amid_bad_messages_is_replaced(model: str) -> None:
    async def main() -> None:
        async with serving(oracle_client(model, step_s=0.004)) as client:
            task = asyncio.ensure_future(many(client))
            await until(lambda: any(s.started for s in client.transport._handles.values()))
            process_of(client)._on_data(b"\xc1")
            send_raw(client, b"\xc1")
            os.kill(client.transport.pid or 0, signal.SIGKILL)
            assert await task == expected()

    run(main())
