"""The supervised engine process: crashes, hangs, restarts, and clean shutdown.

The engine runs on the oracle, which starts at once and checks at every step that resumed requests are right.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine.process.ipc import Lifeline
from octavo.engine.process.supervisor import EngineTimeouts
from octavo.errors import (
    CapacityError,
    EngineError,
    MemoryBudgetError,
    ParameterError,
    PromptError,
    RequestFailedError,
    UsageError,
)
from octavo.frontend.process_transport import process_client
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind
from octavo.view.live.queries import GetBlock
from tests.engine.process.engines import (
    PARAMS,
    SHORT_TIMEOUTS,
    children_of,
    expected,
    is_alive,
    kill_engine,
    last_of,
    many,
    nothing_left,
    oracle_client,
    prompt,
    real_client,
    reference_outputs,
    residue,
    serving,
    tokens_of,
    until,
)

SLOW = EngineTimeouts(step_s=1.5)


# -- dying and hanging -------------------------------------------------------------------------------------------------


async def test_streams_continue_when_the_engine_is_killed(model: str) -> None:
    """Repeatedly, also during a start: no token is lost, repeated or wrong, and a death is noticed at once."""
    chance = random.Random(0)
    async with serving(oracle_client(model, step_s=0.004)) as client:
        streams = asyncio.ensure_future(many(client, 12))
        for killed in range(1, 5):
            await asyncio.sleep(chance.uniform(0.01, 0.06))
            kill_engine(client)
            assert await until(lambda: client.health().state == "restarting") < 1
            assert await until(lambda: client.health().state == "running") < 10
            assert client.health().num_restarts == killed
            assert "SIGKILL" in client.health().reason
        assert await streams == expected(12)


@pytest.mark.parametrize("how", ["abort", "close", "killed"])
async def test_reused_id_gets_no_output_of_the_earlier_request(model: str, how: str) -> None:
    """Although the engine still sends updates of the earlier one."""
    longer = SamplingParams(max_tokens=200, seed=1)
    async with serving(oracle_client(model, step_s=0.002)) as client:
        for i in range(2 if how == "killed" else 10):
            stream = client.generate(prompt(100 + i), longer, "x")
            await anext(stream)
            if how == "abort":
                assert await client.abort("x")
            else:
                await stream.aclose()
            again = asyncio.ensure_future(last_of(client, prompt(i), PARAMS, request_id="x"))
            if how == "killed":
                await asyncio.sleep(0)
                kill_engine(client)
            assert tokens_of(await again) == reference_outputs(prompt(i), PARAMS)
            await stream.aclose()


async def test_id_can_be_reused_after_a_stop_string(model: str) -> None:
    """The engine continues the sample until it receives the stop."""
    async with serving(real_client(model)) as client:
        plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        text = (await last_of(client, "Hello", plain)).outputs[0].text
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[text[4]])
        wanted = tokens_of(await last_of(client, "What?", plain))
        for _ in range(20):
            first = await last_of(client, "Hello", params, request_id="x")
            assert first.outputs[0].finish_reason == "stop"
            assert tokens_of(await last_of(client, "What?", plain, request_id="x")) == wanted


async def test_each_sample_resumes_where_it_was(model: str) -> None:
    """Also if some have finished; deltas repeat nothing."""
    params = SamplingParams(n=4, max_tokens=40, seed=3, stop_token_ids=[4], output_kind=RequestOutputKind.DELTA)
    wanted = reference_outputs(prompt(1), params)
    assert sorted(map(len, wanted)) == [9, 11, 13, 19]
    async with serving(oracle_client(model, step_s=0.01)) as client:
        received: list[list[int]] = [[], [], [], []]
        killed = False
        async for output in client.generate(prompt(1), params):
            for completion in output.outputs:
                received[completion.index] += completion.token_ids
            if not killed and max(map(len, received)) >= 10:
                killed = True
                kill_engine(client)
        assert killed and client.health().num_restarts == 1
        assert received == wanted


async def test_known_tokens_are_not_generated_again(model: str) -> None:
    """The next engine prefills them with the prompt, in one step."""
    async with serving(oracle_client(model, step_s=0.01)) as client:
        killed = False
        async for output in client.generate(prompt(0), PARAMS):
            if not killed and len(output.outputs[0].token_ids) >= 25:
                killed = True
                kill_engine(client)
        assert tokens_of(output) == reference_outputs(prompt(0), PARAMS)
        await until(lambda: client.transport.last_stats.engine.num_finished)
        assert client.transport.last_stats.engine.num_steps <= 40 - 25 + 1


@pytest.mark.parametrize(
    ("fault", "where", "reason"),
    [
        ("stop_at", 9, "no heartbeat"),
        ("raise_in", ["scheduler.update", 9], "RuntimeError: a bug in scheduler.update"),
        ("raise_in", ["server._report", 9], "RuntimeError: a bug in server._report"),
    ],
)
async def test_failing_or_hanging_step_restarts_the_engine(
    model: str, tmp_path: Path, fault: str, where: Any, reason: str
) -> None:
    """A hang is noticed by missing heartbeats."""
    once = tmp_path / "once"
    once.touch()
    faults = {"once": str(once), "step_s": 0.002, fault: where}
    timeouts = SHORT_TIMEOUTS if fault == "stop_at" else None
    async with serving(oracle_client(model, timeouts=timeouts, **faults)) as client:
        assert await many(client) == expected()
        assert client.health().num_restarts == 1
        assert reason in client.health().reason


async def test_hang_of_an_idle_engine_is_noticed(model: str) -> None:
    async with serving(oracle_client(model, timeouts=SHORT_TIMEOUTS)) as client:
        assert client.health().last_step_age_s is None
        assert client.transport.pid is not None
        os.kill(client.transport.pid, signal.SIGSTOP)
        assert await until(lambda: client.health().state == "restarting") < 60
        await until(lambda: client.health().state == "running")
        assert await many(client, 2) == expected(2)


async def test_slow_step_is_not_interrupted(model: str) -> None:
    """Its process sends heartbeats. (It is one of the first steps, which have no time limit.)"""
    async with serving(oracle_client(model, timeouts=SLOW, slow_at=[2, 2.0])) as client:
        streams = asyncio.ensure_future(many(client, 2))
        await until(lambda: (client.health().last_step_age_s or 0) > 1.7)
        assert client.health().state == "running"
        assert await streams == expected(2)
        assert client.health().num_restarts == 0


async def test_busy_process_without_heartbeats_is_not_killed(model: str) -> None:
    """As while a kernel compiles: silent for longer than an idle engine may be."""
    async with serving(oracle_client(model, timeouts=EngineTimeouts(silence_s=1.5), busy_at=[2, 2.6])) as client:
        streams = asyncio.ensure_future(many(client, 2))
        longest = 0.0
        while not streams.done():
            process = client.transport.supervisor.process
            assert process is not None
            longest = max(longest, time.monotonic() - process.heartbeat_at)
            await asyncio.sleep(0.01)
        assert longest > 1.8
        assert await streams == expected(2)
        assert client.health().num_restarts == 0


async def test_step_far_slower_than_earlier_ones_is_interrupted(model: str, tmp_path: Path) -> None:
    """Earlier steps took milliseconds; its process sends heartbeats all the time."""
    once = tmp_path / "once"
    once.touch()
    async with serving(oracle_client(model, timeouts=SLOW, once=str(once), slow_at=[20, 60])) as client:
        assert await many(client, 2) == expected(2)
        assert client.health().num_restarts == 1
        assert "a step took" in client.health().reason


@pytest.mark.parametrize(("num_kills", "step_s"), [(3, 0.1), (4, 60)])
async def test_request_fails_after_four_killed_engines(model: str, num_kills: int, step_s: float) -> None:
    """And not before, even if it has no token yet."""
    async with serving(oracle_client(model, slow_at=[0, step_s])) as client:
        stream = asyncio.ensure_future(last_of(client, prompt(0), PARAMS))
        for killed in range(1, num_kills + 1):
            await until(lambda: any(s.sent for s in client.transport.handles.values()))
            kill_engine(client)
            await until(lambda: client.health().num_restarts == killed and client.transport.supervisor.is_up)  # noqa: B023
        if num_kills < 4:
            assert tokens_of(await stream) == reference_outputs(prompt(0), PARAMS)
            return
        with pytest.raises(RequestFailedError, match="4 engines died while they ran it"):
            await stream


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["loading the model", "warming up"])
async def test_failed_start_reports_its_cause_and_leaves_nothing(model: str, phase: str) -> None:
    with nothing_left():
        client = oracle_client(model, fail_in=phase)
        with pytest.raises(MemoryBudgetError, match="the weights do not fit; use a smaller model"):
            await client.start()
        assert client.health().state == "failed" and not client.is_running
        client = oracle_client(model, die_in=phase)
        with pytest.raises(EngineError, match=f"ended while {phase}: it was killed by SIGKILL"):
            await client.start()
        with pytest.raises(EngineError, match=phase):
            await many(client, 1)
        client.shutdown()


async def test_command_that_is_no_engine_fails(model: str) -> None:
    with nothing_left():
        client = process_client(model, command=(sys.executable, "-c", "raise SystemExit(7)"))
        with pytest.raises(EngineError, match="ended while starting: it exited with code 7"):
            await client.start()


async def test_three_failed_restarts_fail_the_engine(model: str, tmp_path: Path) -> None:
    """All waiting callers get the error."""
    script = tmp_path / "engine.py"
    oracle = Path(__file__).parents[2] / "proof" / "oracle_engine.py"
    script.write_text(
        f"import sys, runpy; sys.path.insert(0, {str(oracle.parents[2])!r})\n"
        f"import pathlib; mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "n = len(mark.read_text()) if mark.exists() else 0\n"
        "mark.write_text('x' * (n + 1))\n"
        "if n: raise SystemExit(9)\n"
        f"runpy.run_path({str(oracle)!r}, run_name='__main__')\n"
    )
    with nothing_left():
        client = process_client(
            model,
            command=(sys.executable, str(script), '{"step_s": 0.01}'),
            block_size=4,
            num_gpu_blocks_override=200,
            max_num_seqs=16,
            timeouts=SHORT_TIMEOUTS,
        )
        await client.start()
        stream = asyncio.ensure_future(last_of(client, prompt(0), PARAMS))
        await asyncio.sleep(0.05)
        kill_engine(client)
        with pytest.raises(EngineError, match="exited with code 9"):
            await stream
        assert client.health().state == "failed" and not client.is_running
        assert len((tmp_path / "mark").read_text()) == 4
        client.shutdown()


async def test_restarts_without_file_descriptors_fail_the_engine(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = oracle_client(model)
    await client.start()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    kill_engine(client)
    await until(lambda: client.health().state == "failed")
    with pytest.raises(EngineError, match=r"the engine process cannot be started: .*gone.*limits on files"):
        await last_of(client, prompt(0), PARAMS)
    client.shutdown()


def test_engine_dies_with_its_parent(model: str) -> None:
    """Although the parent cannot send anything, and the engine is in the middle of a step."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.engine.process.engines import last_of, oracle_client
from tests.serve.event_loop import run
from octavo import SamplingParams

async def main():
    client = oracle_client({model!r}, slow_at=[3, 60])
    await client.start()
    print(client.transport.pid, flush=True)
    await last_of(client, [1, 2, 3], SamplingParams(max_tokens=100))

run(main(), limit_s=None)
"""
    before = residue()
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert child in children_of(parent.pid)
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert residue() <= before


def test_engine_without_launch_options_exits_quietly() -> None:
    """Its parent died just after it had started the process."""
    here, there = Lifeline.pair()
    command = [sys.executable, "-m", "octavo.frontend.engine_main", str(there.fileno())]
    process = subprocess.Popen(command, pass_fds=[there.fileno()], stderr=subprocess.PIPE)
    there.close()
    here.close()
    assert process.communicate(timeout=60) == (None, b"") and process.returncode == 1


async def test_engine_exits_when_its_lifeline_breaks(model: str) -> None:
    """Also without a signal for its parent's death, and in the middle of a step."""
    with nothing_left():
        client = oracle_client(model, slow_at=[1, 60])
        await client.start()
        stream = asyncio.ensure_future(last_of(client, prompt(0), PARAMS))
        await until(lambda: client.health().last_step_age_s is not None)
        process, pid = client.transport.supervisor.process, client.transport.pid or 0
        assert process is not None and is_alive(pid)
        asyncio.get_running_loop().remove_reader(process.lifeline.fileno())
        process.lifeline._socket.shutdown(socket.SHUT_RDWR)
        assert await until(lambda: not is_alive(pid)) < 2
        client.shutdown()
        await asyncio.gather(stream, return_exceptions=True)


# -- the rest of the interface -----------------------------------------------------------------------------------------


async def test_request_errors_are_raised_with_their_class(model: str) -> None:
    async with serving(oracle_client(model)) as client:
        for bad, params, kind in [
            ([1] * 300, PARAMS, UsageError),
            ([1, 97], PARAMS, PromptError),
            ([], PARAMS, PromptError),
            ([1], SamplingParams(n=17), CapacityError),
            ([1], SamplingParams(stop_token_ids=[97]), ParameterError),
        ]:
            with pytest.raises(kind) as caught:
                await last_of(client, bad, params)
            assert type(caught.value) is kind or kind is UsageError
        assert caught.value.param == "stop_token_ids"
        assert await many(client, 1) == expected(1)


async def test_requests_that_cannot_be_encoded_fail_alone(model: str) -> None:
    """Whether the engine runs already or starts later; other commands of the same message are sent."""
    wrong: list[dict[str, Any]] = [{"priority": 1 << 80}, {"priority": 0.5}, {"salt": "text"}, {"request_id": "\ud800"}]
    async with serving(oracle_client(model)) as client:
        for held in (False, True):
            if held:
                kill_engine(client)
                await until(lambda: client.health().state == "restarting")
            good = asyncio.ensure_future(many(client, 3))
            await asyncio.sleep(0)
            errors = await asyncio.gather(
                *(last_of(client, prompt(0), PARAMS, **one) for one in wrong), return_exceptions=True
            )
            assert [type(error) for error in errors] == [ParameterError] * 4
            assert await good == expected(3)
        with pytest.raises(ParameterError, match="cannot be sent to the engine"):
            await client.debug_request("\ud800")
        assert client.health().num_restarts == 1 and not client.transport.rpc_futures


async def test_aborted_search_that_has_not_started_returns_its_prompt(model: str) -> None:
    """As a search does that is aborted in the engine."""
    async with serving(oracle_client(model)) as client:
        kill_engine(client)
        await until(lambda: client.health().state == "restarting")
        task = asyncio.ensure_future(
            last_of(client, prompt(0), BeamSearchParams(beam_width=2, max_tokens=9), request_id="a")
        )
        client.transport.up.set()  # it does not wait for the engine
        await until(lambda: client.transport.handles)
        client.transport.up.clear()
        assert await client.abort("a")
        output = await task
        assert [(c.finish_reason, c.token_ids) for c in output.outputs] == [("abort", [])]
        await until(lambda: client.health().state == "running")


async def test_abort_and_closed_iterators_free_everything(model: str) -> None:
    """An abort yields a last output; closing an iterator frees its blocks; an id is taken while its request runs."""
    async with serving(oracle_client(model, step_s=0.002)) as client:
        seen = 0
        async for output in client.generate(prompt(0), PARAMS, "mine"):
            seen = len(output.outputs[0].token_ids)
            if seen >= 3 and not output.finished:
                with pytest.raises(ParameterError, match="running already"):
                    await last_of(client, prompt(0), PARAMS, request_id="mine")
                assert await client.abort("mine")
        assert output.outputs[0].finish_reason == "abort"
        assert 3 <= seen < 40 and output.outputs[0].token_ids == reference_outputs(prompt(0), PARAMS)[0][:seen]
        assert not await client.abort("mine")
        run_ = client.generate(prompt(1), PARAMS)
        await anext(run_)
        await run_.aclose()
        task = asyncio.ensure_future(last_of(client, prompt(2), PARAMS))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_salts_separate_resumed_requests(model: str) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:
        cached = []
        rounds = zip([b"a", b"bb", b"a", b"a", b"a", b"bb"], [0, 0, 0, 1, 0, 0], strict=True)
        for salt, kill in rounds:
            stream = client.generate(prompt(0), PARAMS, salt=salt)
            await anext(stream)
            if kill:
                kill_engine(client)
            async for output in stream:
                last = output
            cached.append(last.num_cached_tokens)
        assert cached == [0, 0, 8, 8, 8, 0]


async def test_stop_string_stops_the_sample_in_the_engine(model: str) -> None:
    """The engine stops the sample, and continues the others."""
    async with serving(oracle_client(model, step_s=0.005)) as client:
        params = SamplingParams(n=3, stop=["!"], max_tokens=200, seed=2)
        async for output in client.generate(prompt(3), params, "mine"):
            ended = [c for c in output.outputs if c.finished()]
            if ended and not output.finished:
                description = await client.debug_request("mine")
                assert description is not None and len(description["sequences"]) <= 3 - len(ended)
        assert [c.stop_reason for c in output.outputs] == ["!"] * 3
        assert [len(c.token_ids) for c in output.outputs] == [29, 15, 8]
        assert (await client.kv_stats()).num_used == 0


async def test_rpc_calls(model: str) -> None:
    async with serving(oracle_client(model, step_s=0.002)) as client:
        stream = asyncio.ensure_future(last_of(client, prompt(0), PARAMS, request_id="a"))
        await asyncio.sleep(0.03)
        description: dict[str, Any] | None = await client.debug_request("a")
        assert description is not None and description["status"] == "running"
        assert [entry["event"] for entry in description["timeline"]] == ["arrived", "admitted"]
        assert description["sequences"][0]["block_ids"]
        assert (await client.debug_kv())["requests"]["a"]["num_blocks"] >= 3
        assert (await client.kv_stats()).num_used >= 3
        await stream
        description = await client.debug_request("a")
        assert description is not None and description["status"] == "finished"
        assert await client.debug_request("b") is None
        assert await client.reset_prefix_cache() > 0
        stats = await client.stats()
        assert stats.engine.num_finished == 1 and stats.num_running == 0
        pid = client.transport.pid
        with pytest.raises(EngineError, match="IndexError"):
            await client.query(GetBlock(-(10**6)))
        assert (await client.kv_stats()).num_used == 0 and client.transport.pid == pid  # the engine survives
        kill_engine(client)
        assert (await client.kv_stats()).num_used == 0  # the next engine replies
        assert await many(client, 1) == expected(1)
        await until(lambda: client.transport.last_stats.engine.num_finished)
        assert (await client.stats()).engine.num_finished == 2


async def test_shutdown_raises_in_all_readers(model: str) -> None:
    client = oracle_client(model, step_s=0.01)
    with nothing_left():
        await client.start()
        stream = asyncio.ensure_future(last_of(client, prompt(0), PARAMS))
        await asyncio.sleep(0.05)
        client.shutdown()
        client.shutdown()
        with pytest.raises(EngineError, match="closed"):
            await stream
        with pytest.raises(EngineError, match="closed"):
            await client.kv_stats()
