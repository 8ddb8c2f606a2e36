"""Hundreds of faults in an engine process and in a whole server:
`python -m tests.proof.reliability [--scale 1] [--engines 2]`.

Each trial prints a line: the number of requests it ran, and how many of them were

    lost     ended with an error that they did not cause
    hung     did not end in time
    wrong    had other tokens than those of an undisturbed engine
    leaked   left a process, a socket directory or a block of memory (counted once a trial)

and the longest times to notice a fault and to recover. Further measurements follow. The exit code is 0 if all four are
0 everywhere and every time is within its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs
from octavo.engine.process.heartbeat import NUM_WARM_UP_STEPS
from octavo.engine.process.supervisor import ENGINE_COMMAND, EngineTimeouts
from octavo.errors import OctavoError
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.process_transport import ProcessTransport, make_client
from octavo.frontend.replicas import replicas_client
from tests.engine.models import make_talking_checkpoint
from tests.engine.process.engines import OPTIONS, children_of, is_alive, oracle_command, reference_outputs, residue
from tests.proof import server_trials
from tests.proof.oracle_engine import HOOKS, PHASES
from tests.proof.tally import LONG_S, PROMPTS, Tally, World, oracle_prompt, params_of
from tests.serve.event_loop import run

NOTICED_S, BACK_S, SILENCE_S = 1.0, 10.0, 11.0
"""Bounds in seconds: to notice a killed engine, to serve again, and to notice a stopped one."""
ALONE_S = 5.0
"""Bound in seconds for an engine to exit after its parent; one that is starting exits at its first check."""


Client = EngineClient[Any]


def oracle_client(world: World, **faults: Any) -> Client:
    return client_of(EngineArgs(model=world.model, **OPTIONS), world.engines, oracle_command(**faults))


def client_of(
    args: EngineArgs, engines: int, command: Sequence[str] = ENGINE_COMMAND, timeouts: EngineTimeouts | None = None
) -> Client:
    """A client of one engine process, or of several behind a router."""
    if engines > 1:
        return replicas_client(args, engines, command=command, timeouts=timeouts)
    return make_client(args, ProcessTransport(args, command, timeouts))


async def stream_tokens(
    client: Client, prompt: Any, params: SamplingParams, pause_s: float | None = None
) -> list[list[int]]:
    """The tokens of each sample of a stream, which must only grow. Raises `TimeoutError` after a pause of `pause_s`."""
    so_far: dict[int, list[int]] = {}
    async with asyncio.timeout(pause_s) as limit:
        async for output in client.generate(prompt, params):
            if pause_s is not None:
                limit.reschedule(asyncio.get_running_loop().time() + pause_s)
            for completion in output.outputs:
                before = so_far.get(completion.index, [])
                if completion.token_ids[: len(before)] != before:
                    return [[-1]]
                so_far[completion.index] = completion.token_ids
    return [so_far[index] for index in sorted(so_far)]


@contextlib.asynccontextmanager
async def at_rest(tally: Tally, client: Client) -> AsyncIterator[Client]:
    """Context manager: afterwards nothing of the engine may be left."""
    before = residue()
    async with client:
        yield client
        stats = await client.kv_stats()
        tally.leaked += bool(stats.num_used or num_unfinished(client))
    if left := residue() - before:
        tally.leaked += 1
        tally.notes.append(f"left: {left}")


def num_unfinished(client: Client) -> int:
    return sum(len(engine.handles) for engine in client.transport.engines)


async def strike(tally: Tally, engine: ProcessTransport, number: int, noticed_s: float) -> None:
    """Sends a signal to an engine and measures the recovery."""
    if engine.pid is None:
        return
    begin = time.monotonic()
    os.kill(engine.pid, number)
    tally.noticed_s = max(tally.noticed_s, await tally.until(lambda: not engine.supervisor.is_up, noticed_s))
    await tally.until(lambda: engine.supervisor.is_up, BACK_S)
    back = time.monotonic() - begin - (tally.noticed_s if number == signal.SIGSTOP else 0)
    tally.back_s = max(tally.back_s, back)


@contextlib.asynccontextmanager
async def endless_streams(
    tally: Tally, client: Client, wanted: dict[str, list[list[int]]], pause_s: float | None = None
) -> AsyncIterator[Client]:
    """Context manager: meanwhile 16 streams begin again and again.

    pause_s  a stream counts as hung if no token comes for this long; None: if it does not end within `LONG_S`
    """
    over = asyncio.Event()

    async def streams_of(prompt: str) -> None:
        while not over.is_set():
            stream = stream_tokens(client, prompt, params_of(prompt), pause_s)
            await tally.check(stream, wanted[prompt], LONG_S if pause_s is None else None)

    async with at_rest(tally, client):
        streams = [asyncio.ensure_future(streams_of(prompt)) for prompt in PROMPTS]
        yield client
        over.set()
        await asyncio.gather(*streams)


async def streams_under_fire(tally: Tally, world: World, number: int, times: int, timeouts: EngineTimeouts) -> None:
    """16 endless streams, and repeated signals."""
    chance = random.Random(0)
    args = EngineArgs(model=world.model, dtype="float32", **OPTIONS)
    async with endless_streams(tally, client_of(args, world.engines, timeouts=timeouts), world.wanted) as client:
        for _ in range(times):
            before = num_streamed(client)
            await tally.until(lambda: num_streamed(client) > before, LONG_S)  # noqa: B023
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            noticed_s = SILENCE_S if number == signal.SIGSTOP else NOTICED_S
            await strike(tally, chance.choice(client.transport.engines), number, noticed_s)


def reference(llm: LLM) -> dict[str, list[list[int]]]:
    """The tokens of an undisturbed engine."""
    outputs = llm.generate(PROMPTS, [params_of(prompt) for prompt in PROMPTS], use_tqdm=False)
    return {prompt: [c.token_ids for c in output.outputs] for prompt, output in zip(PROMPTS, outputs, strict=True)}


def num_streamed(client: Client) -> int:
    """Number of tokens of running and finished requests."""
    return sum(
        engine.past_stats.num_generation_tokens
        + engine.last_stats.engine.num_generation_tokens
        + sum(len(sample.token_ids) for s in engine.handles.values() for sample in s.request.samples.values())
        for engine in client.transport.engines
    )


async def killed(tally: Tally, world: World) -> None:
    await streams_under_fire(tally, world, signal.SIGKILL, world.times(100), EngineTimeouts())


async def stopped(tally: Tally, world: World) -> None:
    await streams_under_fire(tally, world, signal.SIGSTOP, world.times(5), EngineTimeouts())


RANK_TIMEOUTS = EngineTimeouts(silence_s=2.5, step_s=2.5)
RANK_OPTIONS: dict[str, Any] = {**OPTIONS, "dtype": "float32", "device": "cpu", "tensor_parallel_size": 2}


async def ranks_under_fire(tally: Tally, world: World, number: int, times: int) -> None:
    """16 endless streams of engines with two tensor parallel ranks, one of which gets a signal, again and again.

    Nothing of a rank may be left: no process, file, socket directory or shared memory.
    """
    chance, found, ranks = random.Random(number), list[float](), set[int]()
    model = str(make_talking_checkpoint(world.folder / f"ranked-{number}", intermediate_size=48))  # a multiple of two
    with LLM(model, **RANK_OPTIONS) as llm:
        wanted = reference(llm)
    before = rank_files()
    args = EngineArgs(model=model, **RANK_OPTIONS)
    client = client_of(args, world.engines, timeouts=RANK_TIMEOUTS)
    # Two processes that import torch take most of the time between two faults: a stream outlives many.
    async with endless_streams(tally, client, wanted, pause_s=LONG_S):
        for _ in range(times):
            engine = chance.choice(client.transport.engines)
            num_before = num_streamed(client)
            await tally.until(lambda: num_streamed(client) > num_before, LONG_S)  # noqa: B023
            if number == signal.SIGSTOP:  # the first steps of an engine may take minutes
                await tally.until(lambda: num_steps(engine) > NUM_WARM_UP_STEPS, LONG_S)  # noqa: B023
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            if (process := engine.supervisor.process) is None:
                continue
            group = [process.pid, *ranks_of(process.pid)]
            ranks.update(group)
            begin = time.monotonic()
            os.kill(chance.choice(group), number)
            await tally.until(lambda: not engine.supervisor.is_up, LONG_S)  # noqa: B023
            found.append(time.monotonic() - begin)
            limit_s = NOTICED_S
            if number == signal.SIGSTOP:  # a step may take some times as long as earlier ones
                limit_s += process.step_limit_s
            if found[-1] > limit_s:
                tally.miss(f"noticed after {found[-1]:.1f} s, over the bound of {limit_s:.1f} s")
            tally.back_s = max(tally.back_s, await tally.until(lambda: engine.supervisor.is_up, BACK_S))  # noqa: B023
    tally.noticed_s = max(found)
    tally.figures = f"{len(found)} signals, noticed after {statistics.median(found):.3f} s (median)"
    await tally.until(lambda: not any(map(is_alive, ranks)), ALONE_S)
    if left := [*filter(is_alive, ranks), *(rank_files() - before)]:
        tally.leaked += 1
        tally.notes.append(f"left: {left}")


def ranks_of(pid: int) -> list[int]:
    """Processes of the ranks other than 0."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            if b"rank_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def num_steps(engine: ProcessTransport) -> int:
    return 0 if engine.supervisor.process is None else engine.supervisor.process.num_steps


def rank_files() -> set[str]:
    """Shared memory, and files in the temporary directory."""
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}


async def ranks_killed(tally: Tally, world: World) -> None:
    await ranks_under_fire(tally, world, signal.SIGKILL, world.times(50))


async def ranks_stopped(tally: Tally, world: World) -> None:
    await ranks_under_fire(tally, world, signal.SIGSTOP, world.times(50))


ORACLE_PARAMS = SamplingParams(max_tokens=40, seed=1)


async def hooks(tally: Tally, world: World) -> None:
    """Exceptions in each part of the loop, early and late."""
    for hook in HOOKS:
        for number in (0, 1, 7, 23)[: world.times(4)]:
            with tempfile.NamedTemporaryFile(delete=False) as once:
                pass
            client = oracle_client(world, step_s=0.001, raise_in=[hook, number], once=once.name)
            async with at_rest(tally, client):
                await asyncio.gather(
                    *[
                        tally.check(
                            stream_tokens(client, oracle_prompt(i), ORACLE_PARAMS),
                            reference_outputs(oracle_prompt(i), ORACLE_PARAMS),
                        )
                        for i in range(8)
                    ]
                )


async def leaving(tally: Tally, world: World) -> None:
    """Clients that disconnect while they wait, in the middle, and at the end."""
    chance = random.Random(1)
    room = asyncio.Semaphore(64)

    async def one(client: Client, number: int) -> None:
        async with room:
            prompt, wanted = oracle_prompt(number % 50), reference_outputs(oracle_prompt(number % 50), ORACLE_PARAMS)
            if number % 10 == 0:  # these stay and must not be affected
                await tally.check(stream_tokens(client, prompt, ORACLE_PARAMS), wanted)
                return
            tally.runs += 1
            stream = client.generate(prompt, ORACLE_PARAMS)
            for _ in range(chance.randrange(12)):
                with contextlib.suppress(StopAsyncIteration, asyncio.TimeoutError):
                    await asyncio.wait_for(anext(stream), chance.choice((0.0005, 0.01, 1)))
            await stream.aclose()

    async with at_rest(tally, oracle_client(world)) as client:
        await asyncio.gather(*[one(client, number) for number in range(world.times(10_000))])
        while num_unfinished(client):
            await asyncio.sleep(0.01)


async def starts(tally: Tally, world: World) -> None:
    """An engine that fails or dies in each phase of its first start: the cause is reported."""
    for phase in PHASES:
        for fault in ("fail_in", "die_in"):
            before = residue()
            tally.runs += 1
            faults: dict[str, Any] = {fault: phase}
            client = oracle_client(world, **faults)
            try:
                await client.start()
                tally.wrong += 1
            except OctavoError as error:
                tally.wrong += not ("the weights do not fit" in str(error) or phase in str(error))
            tally.leaked += bool(residue() - before)


async def orphans(tally: Tally, world: World) -> None:
    """The parent is killed at any time of the engine's life."""
    program = f"""
import asyncio
from pathlib import Path
from octavo import SamplingParams
from tests.engine.process.engines import last_of
from tests.proof.reliability import oracle_client
from tests.proof.tally import World
from tests.serve.event_loop import run

async def main():
    client = oracle_client(World({world.model!r}, {{}}, 1.0, Path(), {world.engines}), step_s=0.01)
    print("begun", flush=True)
    await client.start()
    while True:
        await last_of(client, [1, 2, 3], SamplingParams(max_tokens=100))

run(main(), limit_s=None)
"""
    chance = random.Random(2)
    for _ in range(world.times(30)):
        before = residue()
        tally.runs += 1
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            parent.stdout.readline()
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            orphaned = children_of(parent.pid)
            parent.kill()
        await tally.until(lambda: not any(map(is_alive, orphaned)), ALONE_S)  # noqa: B023
        tally.hung += sum(map(is_alive, orphaned))
        tally.leaked += bool(residue() - before)


TRIALS: dict[str, tuple[str, Callable[[Tally, World], Awaitable[None]]]] = {
    "killed": ("engine killed under 16 streams", killed),
    "stopped": ("engine stopped under 16 streams", stopped),
    "ranks-killed": ("one of two ranks killed under 16 streams", ranks_killed),
    "ranks-stopped": ("one of two ranks stopped under 16 streams", ranks_stopped),
    "hooks": ("exception in each part of the loop", hooks),
    "leaving": ("readers leave at any time", leaving),
    "starts": ("start fails in each phase", starts),
    "orphans": ("parent killed at any time", orphans),
    **server_trials.TRIALS,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="how much of everything to do")
    parser.add_argument("--engines", type=int, default=1, help="how many engines run behind each client and server")
    parser.add_argument("--only", choices=TRIALS, action="append", help="one of the trials; may be given again")
    args = parser.parse_args()
    logging.getLogger("octavo").setLevel(logging.CRITICAL)
    print(
        f"{'':<40} {'runs':>6} {'lost':>6} {'hung':>6} {'wrong':>6} {'leaked':>7} {'noticed':>10} {'back':>8}",
        flush=True,
    )
    good = True
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # ignore sockets of other processes
        model = str(make_talking_checkpoint(Path(folder) / "model"))
        with LLM(model, dtype="float32", block_size=4, num_gpu_blocks_override=200, max_num_seqs=16) as llm:
            wanted = reference(llm)
        world = World(model, wanted, args.scale, Path(folder), args.engines)
        for name, (title, trial) in TRIALS.items():
            if args.only is None or name in args.only:
                tally = Tally(title)
                run(trial(tally, world), limit_s=None)  # type: ignore[arg-type]
                print(tally.line(), flush=True)
                for note in tally.notes[:3]:
                    print(f"    {note}")
                good &= tally.passed
    print("reliable" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
