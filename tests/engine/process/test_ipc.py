"""Messages between the two processes: all parameters arrive, and invalid messages are rejected."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo import SamplingParams
from octavo.core import events as ev
from octavo.core.plan import TokenLogprobs
from octavo.engine.beam_search import Hypothesis
from octavo.engine.engine_request import EngineRequest
from octavo.engine.outputs import RequestMetrics, request_failed_error
from octavo.engine.process.heartbeat import NUM_WARM_UP_STEPS, TOLERANCE, WARM_UP_S, HeartbeatSender, StepTimes
from octavo.engine.process.ipc import (
    CLIENT_ONLY,
    AbortRequest,
    AddRequest,
    Channel,
    CloseEngine,
    Command,
    EngineFailed,
    EngineMessage,
    Heartbeat,
    Hello,
    Lifeline,
    Ready,
    RpcCall,
    RpcReply,
    StepReport,
    StopSample,
    endpoint_in,
    pack_tokens,
    params_from_wire,
    params_to_wire,
    unpack_tokens,
)
from octavo.engine.process.server import EngineServer
from octavo.engine.process.supervisor import rebuild_error
from octavo.engine.request_update import RequestStats, RequestUpdate, SampleUpdate
from octavo.errors import CapacityError, EngineError, ParameterError, RequestFailedError, UnknownOptionError
from octavo.frontend.client_request import ClientRequest
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind
from octavo.serve.openai import errors
from tests.engine.process.engines import run

OTHER: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {3: 1.5, 4: -2.0},
    "allowed_token_ids": [3, 4, 5],
    "bad_words_token_ids": [[1, 2], [3]],
    "structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True},
    "min_tokens": 3,
    "seed": -5,
    "max_tokens": 33,
    "stop_token_ids": [7, 8],
    "ignore_eos": True,
    "logprobs": 4,
    "prompt_logprobs": 2,
    "echo": True,
    "include_stop_str_in_output": True,
    "skip_reading_prefix_cache": True,
    "spec": False,
}
"""A non-default value of each parameter."""


def over_the_wire(params: SamplingParams | BeamSearchParams) -> Any:
    changed = msgspec.msgpack.decode(msgspec.msgpack.encode(params_to_wire(params)))
    return params_from_wire(changed, isinstance(params, BeamSearchParams))


@pytest.mark.parametrize("name", sorted(OTHER))
def test_each_parameter_is_sent(name: str) -> None:
    options = {name: OTHER[name]} | ({"best_of": 4} if name == "best_of" else {})
    params = SamplingParams(**options)
    assert getattr(over_the_wire(params), name) == getattr(params, name) != getattr(SamplingParams(), name)


def test_all_parameters_are_covered() -> None:
    """Parameters that are not sent concern text and output in the client."""
    assert {f.name for f in fields(SamplingParams) if f.init} == OTHER.keys() | CLIENT_ONLY | {"stop"}
    assert params_to_wire(SamplingParams()) == {}
    text = SamplingParams(stop=["x"], bad_words=["y"], skip_special_tokens=False, output_kind=RequestOutputKind.DELTA)
    assert params_to_wire(text) == {}


def test_beam_search_params_are_sent() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=9, n=2, early_stopping="never", stop=["x", "y"], logprobs=1)
    assert over_the_wire(params) == params


@pytest.mark.parametrize(
    ("changed", "error"),
    [({"n": 0}, ParameterError), ({"temprature": 1}, UnknownOptionError), ({"n": "2"}, ParameterError)],
)
def test_received_parameters_are_validated(changed: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        params_from_wire(changed, False)


def test_messages_survive_encoding() -> None:
    commands: list[Command] = [
        AddRequest(
            "a", pack_tokens([1, 2]), {"n": 2}, False, -5, 1, b"salt", {0: pack_tokens([3]), 2: pack_tokens([4, 5])}
        ),
        AbortRequest("a"),
        StopSample("a", 1),
        RpcCall(1, ["GetKVStats"]),
        CloseEngine(),
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(commands), type=list[Command]) == commands
    entry = TokenLogprobs(-0.1, 1, [5, 6], [-0.1, float("-inf")])
    metrics = RequestMetrics(1.0, 2.5, num_preemptions=1, num_cached_tokens=4)
    facts = RequestStats(metrics, "", [Hypothesis(-1.0, -2.0, [1, 2], "stop", [entry])])
    reports: list[EngineMessage] = [
        Hello(),
        Ready(97, 128, [2], 20, {"device": "cpu"}),
        StepReport(
            [RequestUpdate("a", [SampleUpdate(0, [1], "stop", 1, [entry])], True, facts, 3, [entry])],
            [],
            [RpcReply(1, {"x": 1})],
        ),
        EngineFailed("ModelError", "no"),
    ]
    for report in reports:
        got = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=EngineMessage)
        assert got == report and type(got) is type(report)
    step = msgspec.msgpack.decode(msgspec.msgpack.encode(reports[2]), type=EngineMessage)
    assert step.updates[0].samples[0].logprobs[0].top == [-0.1, float("-inf")]
    assert step.updates[0].stats.hypotheses[0].logprobs[0].rank == 1


def test_token_ids_are_packed_as_int32() -> None:
    ids = [0, 1, 2**31 - 1]
    assert unpack_tokens(pack_tokens(ids)).tolist() == ids and len(pack_tokens(ids)) == 12
    with pytest.raises(OverflowError):
        pack_tokens([2**31])


def test_errors_of_another_process_are_rebuilt() -> None:
    error = rebuild_error("CapacityError", "too much", "n", "exceeds_kv_capacity")
    assert type(error) is CapacityError and (str(error), error.param) == ("too much", "n")
    for name in ("ValueError", "Iterable", "difflib", "__builtins__", ""):
        assert type(rebuild_error(name, "x")) is EngineError


def test_failed_grammar_compilation_rejects_its_request() -> None:
    server = EngineServer.__new__(EngineServer)
    failed: Future[Any] = Future()
    failed.set_exception(RequestFailedError("no process", code="grammar_unavailable"))
    server._compiling = {"a": (AddRequest("a", b"", {}), SamplingParams(), failed)}
    server._errors, withdrawn = [], list[Any]()
    server._text = SimpleNamespace(withdraw_grammar=withdrawn.append)
    server._add_compiled()
    assert withdrawn == [failed]
    (rejected,) = server._errors
    error = rebuild_error(rejected.error, rejected.message, rejected.param, rejected.code)
    problem = errors.to_api_error(error, rejected.request_id)
    assert (problem.status, problem.code, str(problem)) == (503, "grammar_unavailable", "no process")


def test_channel_keeps_order(tmp_path: Path) -> None:
    """Many messages in both directions; one side runs on an event loop, the other blocks in a thread."""
    num = 3000
    endpoint = endpoint_in(str(tmp_path))

    def echo() -> None:
        other = Channel(connect=endpoint)
        other.send(-1)
        for _ in range(num):
            other.send(msgspec.msgpack.decode(other.receive(5) or b""))
        assert other.receive(0.01) is None
        other.close(linger_s=1)

    async def main() -> list[int]:
        one = Channel(bind=endpoint)
        got: list[int] = []
        one.send(-2)  # without a peer: lost
        one.attach(asyncio.get_running_loop(), lambda data: got.append(msgspec.msgpack.decode(data)))
        thread = threading.Thread(target=echo)
        thread.start()
        while not got:
            await asyncio.sleep(0.001)
        for i in range(num):
            one.send(i)
            if i % 100 == 0:
                await asyncio.sleep(0)
        while len(got) < num + 1:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(thread.join)
        one.close()
        one.close()
        return got

    assert run(main()) == list(range(-1, num))


def test_lifeline_breaks_with_either_side() -> None:
    one, other = Lifeline.pair()
    one.send(Heartbeat(3))
    assert msgspec.msgpack.decode(other.receive() or b"", type=Heartbeat).num_steps == 3
    assert other.receive(wait=False) is None
    for _ in range(10_000):  # without a reader: excess messages are dropped, and `send` does not block
        one.send(Heartbeat())
    one.close()
    while other.receive(wait=False):
        pass
    assert other.receive(wait=False) == b""
    with pytest.raises(OSError):
        other.send(Heartbeat())
    other.close()


def test_time_limit_follows_step_times() -> None:
    times = StepTimes()
    for _ in range(NUM_WARM_UP_STEPS):
        assert times.allowed_s(1) == times.allowed_s(4096) == WARM_UP_S
        times.record(1, 30.0)
    times.record(8, 0.01)
    assert times.allowed_s(8) == times.allowed_s(1) == pytest.approx(TOLERANCE * 0.01)
    assert times.allowed_s(64) == pytest.approx(TOLERANCE * 0.08)  # in proportion
    times.record(64, 2.0)
    assert times.allowed_s(64) == times.allowed_s(32) == pytest.approx(TOLERANCE * 2.0)
    assert times.allowed_s(8) == pytest.approx(TOLERANCE * 0.01)
    for _ in range(400):
        times.record(64, 0.02)
    assert times.allowed_s(64) == pytest.approx(TOLERANCE * 0.02)  # one slow step is forgotten
    times.record(8, 0.5)
    assert times.allowed_s(64) == pytest.approx(TOLERANCE * 0.5)


@pytest.mark.parametrize("reads", [True, False])
def test_step_times_are_read_and_recorded_concurrently(reads: bool) -> None:
    """One call interrupts the other between any two bytecodes, as another thread may."""
    outer, inner = (StepTimes.record, StepTimes.allowed_s) if reads else (StepTimes.allowed_s, StepTimes.record)
    source_files = {code.co_filename for code in (StepTimes.record.__code__,)}
    num_between = 0

    def between(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_between
        if frame.f_code.co_filename not in source_files or frame.f_code is inner.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not busy:
            busy.append(True)
            num_between += 1
            allowed.append(times.allowed_s(5)) if reads else times.record(1 << num_between % 40, 0.01)
            busy.pop()
        return between

    busy: list[bool] = []
    allowed: list[float] = []
    for num_before in range(NUM_WARM_UP_STEPS + 3):
        times = StepTimes()
        for _ in range(num_before):
            times.record(4, 0.01)
        sys.settrace(between)
        try:
            outer(times, 3, 0.01) if reads else outer(times, 3)
        finally:
            sys.settrace(None)
    assert num_between > 50
    assert set(allowed) <= {WARM_UP_S, *(TOLERANCE * 0.01 * n for n in (1, 2))}


def test_failed_beam_search_is_an_error_in_the_client() -> None:
    """Both if the engine reports it with its hypotheses, and if the client finishes it."""
    params = BeamSearchParams(beam_width=2, n=1, max_tokens=9)
    stats = RequestStats(RequestMetrics(0.0), "no_allowed_token: it", [Hypothesis(-0.1, -0.2, [5], "stop", [])])
    for end in (
        lambda r: r.apply_update(RequestUpdate("a", [], True, stats)),
        lambda r: r.finish("error", "no_allowed_token: it"),
    ):
        request = ClientRequest(EngineRequest("a", [1, 2], params, seed=0))
        end(request)
        output = request.output()
        assert output.finished and [c.finish_reason for c in output.outputs] == ["error"]
        assert request_failed_error(output).code == "no_allowed_token"


def test_heartbeat_reports_progress_and_waiting() -> None:
    one, other = Lifeline.pair()
    ended = threading.Event()
    heartbeats = HeartbeatSender(other, ended.set)
    assert heartbeats.heartbeat().waited_s is None
    heartbeats.begin_work()
    for step, tokens in enumerate([5, 6]):
        heartbeats(ev.Step(step, 1, tokens, *[0] * 13))
    time.sleep(0.02)
    before = heartbeats.heartbeat().waited_s
    assert before is not None and before >= 0.02
    heartbeats.advance(1)
    after = heartbeats.heartbeat()
    assert after.num_steps == 1 and after.waited_s is not None and after.waited_s < before
    heartbeats.rest()
    assert heartbeats.heartbeat().waited_s is None
    beats = list(itertools.islice(iter(one.receive, b""), 2))
    assert len(beats) == 2
    assert not ended.is_set()
    one.close()
    assert ended.wait(5)
    other.close()


def test_importing_the_client_loads_no_torch() -> None:
    program = (
        "import sys, octavo.frontend.engine_client; raise SystemExit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
