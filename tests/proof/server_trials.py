"""Trials of a whole server over its sockets: graceful shutdown, thousands of streams, overload, and a run without
asserts. Parts of `python -m tests.proof.reliability`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from octavo import SamplingParams
from tests.engine.process.engines import children_of, is_alive, reference_outputs, residue
from tests.proof.hostile_clients import hostile, hostile_addresses
from tests.proof.tally import LONG_S, PROMPTS, Tally, World, oracle_prompt, params_of
from tests.serve.raw_client import KEY, RawClient, RawResponse, request_once

Found = TypeVar("Found")

ROOT = Path(__file__).parents[2]
LEFT_S = 2.0
"""Bound in seconds for a server to exit after its shutdown timeout, or after the second signal."""
START_S = 60.0
SHARE, SLO_S, RECOVERED_S = 0.9, 4.0, 5.0
"""Minimal share of the best goodput under any load (a good response has its first token in time), and the time after
the load for which requests may be refused."""
MEMORY_BYTES = 2 << 30


class Server:
    """A server process and its children."""

    def __init__(self, command: Sequence[str], num_engines: int = 1, **environment: str) -> None:
        self._num_engines = num_engines
        self.log = Path(tempfile.mkstemp(prefix="log-")[1])
        with self.log.open("w") as file:
            env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=env, cwd=ROOT)
        self.port = 0

    async def ready(self) -> None:
        begin = time.monotonic()
        while "serving on http" not in (text := self.log.read_text()):
            if self.process.poll() is not None or time.monotonic() - begin > START_S:
                raise RuntimeError(f"the server does not start: {text}")
            await asyncio.sleep(0.02)
        self.port = int(text.partition("serving on http://127.0.0.1:")[2].split()[0])

    @property
    def pids(self) -> set[int]:
        return {self.process.pid} | children_of(self.process.pid)

    @property
    def engine_pids(self) -> list[int]:
        """The engines' process ids; other children parse bodies and tokenise."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(self.process.pid)}
        return sorted(pid for pid, line in commands.items() if b"engine_main" in line or b"_engine.py" in line)

    @property
    def peak_bytes(self) -> int:
        """The sum of the peak memory of its processes; shared memory is counted twice."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
                total += int(line.split()[1]) * 1024
        return total

    @property
    def resident_bytes(self) -> int:
        """The sum of the memory of its processes; shared memory is counted twice."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
        return total

    @property
    def num_files(self) -> int:
        """Number of open files of the process with the sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def load(self) -> int:
        """Number of requests in progress; -1 if unknown."""
        answer = await request_once(self.port, path="/load")
        return int(json.loads(answer.body)["server_load"]) if answer.status == 200 else -1

    async def at_rest(self) -> bool:
        """Whether no request is left, after a short wait."""
        begin = time.monotonic()
        while time.monotonic() - begin < LONG_S:
            if not await self.num_used() and not await self.load():
                return True
            await asyncio.sleep(0.05)
        return False

    async def num_used(self) -> int:
        """Blocks that requests hold, of all engines."""
        paths = [f"/debug/kv?replica={i}" for i in range(self._num_engines)]
        return sum([json.loads((await request_once(self.port, path=path)).body)["num_used"] for path in paths])

    async def left(self, limit_s: float) -> float | None:
        """Seconds until it exited; None after a timeout."""
        begin = time.monotonic()
        while self.process.poll() is None:
            if time.monotonic() - begin > limit_s:
                return None
            await asyncio.sleep(0.01)
        return time.monotonic() - begin


@contextlib.asynccontextmanager
async def serving(
    tally: Tally,
    world: World,
    *options: str,
    faults: dict[str, Any] | None = None,
    interpreter: Sequence[str] = (),
    keys: bool = True,
) -> AsyncIterator[Server]:
    """A server, on the oracle if there are `faults`, else with the tiny model. Counts leaks at its end."""
    before = residue()
    program = ["-m", "octavo.cli.main"]
    if faults is not None:
        program = [str(Path(__file__).with_name("oracle_server.py")), json.dumps(faults)]
    arguments = ["--port", "0", "--block-size", "4", *(["--api-key", KEY] if keys else [])]
    quiet = [part for path in QUIET for part in ("--disable-access-log-for-endpoints", path)]
    engines = ["--data-parallel-size", str(world.engines)]
    command = [sys.executable, *interpreter, *program, "serve", world.model, *arguments, *quiet, *engines, *options]
    server = Server(command, world.engines)
    try:
        await server.ready()
        yield server
        if server.process.poll() is None:
            tally.leaked += not await server.at_rest()
            await check_shares(tally, server, world.engines)
            pids = server.pids
            server.process.send_signal(signal.SIGTERM)
            if await server.left(LONG_S) is None:
                tally.hung += 1
            tally.leaked += any(map(is_alive, pids - {server.process.pid}))
            if server.process.poll() != 0:
                tally.wrong += 1
                tally.notes.append(f"exit code {server.process.poll()}: {server.log.read_text()[-300:]}")
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        text = server.log.read_text()
        if "Traceback" in text:
            tally.wrong += 1
            tally.notes.append(text[text.index("Traceback") :][:600])
        server.log.unlink()
    tally.leaked += bool(residue() - before)


async def check_shares(tally: Tally, server: Server, num_engines: int) -> None:
    """Each of several engines must have had requests: else the trial was one of fewer."""
    if num_engines > 1:
        metrics = (await request_once(server.port, path="/metrics")).body.decode()
        served = set(re.findall(r'^octavo:router_requests_total\{engine="(\d+)"', metrics, re.MULTILINE))
        if len(served) < num_engines:
            tally.miss(f"only {len(served)} of {num_engines} engines had requests")


QUIET = ("/v1/completions", "/load", "/debug/kv", "/health", "/ready")


@cache
def right(number: int, max_tokens: int) -> list[int]:
    """The output of the oracle's model for a prompt."""
    return reference_outputs(oracle_prompt(number), SamplingParams(max_tokens=max_tokens, temperature=0))[0]


def asked(number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": oracle_prompt(number),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def check(tally: Tally, answer: RawResponse, wanted: list[list[int]], *, refusal: str | None = None) -> None:
    """Checks a stream: complete with the `wanted` tokens, or refused or ended with the code `refusal`."""
    if answer.status == 200 and answer.is_whole:
        tally.wrong += answer.token_ids != wanted
        return
    tally.lost += answer.code != refusal or refusal is None
    if answer.code != refusal:
        tally.notes.append(f"{answer.status} {answer.code}: {answer.body[-200:]!r}")
    if answer.status == 200:  # the received tokens are correct
        tally.wrong += answer.token_ids != [w[: len(got)] for w, got in zip(wanted, answer.token_ids, strict=False)]
    else:
        tally.wrong += "retry-after" not in answer.headers


async def landed(tally: Tally, tasks: Sequence[asyncio.Future[Found]], seconds: float) -> list[Found | None]:
    """The results in order; None, and counted, for tasks that still run or have failed."""
    _, pending = await asyncio.wait(tasks, timeout=seconds)
    found: list[Found | None] = []
    for task in tasks:
        if task in pending:
            tally.hung += 1
            task.cancel()
        elif (error := task.exception()) is not None:
            tally.lost += 1
            tally.notes.append(str(error))
        found.append(None if task in pending or task.exception() is not None else task.result())
    return found


# -- draining ----------------------------------------------------------------------------------------------------------

STREAMS = 64
DRAINS = ((30.0, False), (30.0, False), (3.0, False), (0.0, False), (30.0, True))
"""Shutdown timeouts in seconds, and whether a second signal is sent."""


async def drains(tally: Tally, world: World) -> None:
    """SIGTERM during 64 streams, 16 of which wait: they finish or get an error; new requests are refused."""
    chance, worst_s = random.Random(3), 0.0
    for number in range(world.times(20)):
        timeout_s, twice = DRAINS[number % len(DRAINS)]
        step_s = 0.01 if timeout_s == 30 and not twice else 0.03  # the others are ended
        options = [
            "--max-num-seqs",
            world.share(48),
            "--num-gpu-blocks-override",
            "4000",
            "--shutdown-timeout",
            str(timeout_s),
        ]
        async with serving(tally, world, *options, faults={"step_s": step_s}) as server:
            sizes = [(i % 50, 150 + i % 60) for i in range(STREAMS)]
            begun: list[float] = []

            async def stream(number: int, max_tokens: int, begun: list[float], port: int) -> RawResponse:
                client = RawClient(port)
                try:
                    return await client.ask(asked(number, max_tokens), on_head=lambda: begun.append(time.monotonic()))
                finally:
                    client.close()

            streams = [asyncio.ensure_future(stream(*size, begun, server.port)) for size in sizes]
            while await server.load() < STREAMS or not begun:
                await asyncio.sleep(0.02)
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            pids, begin = server.pids, time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            if timeout_s and not twice:
                await turned_away(tally, server)
            if twice:
                await asyncio.sleep(chance.uniform(0.1, 0.5))
                begin = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
            over_s = begin + (0.0 if twice else timeout_s)
            tally.runs += STREAMS
            cut = None if timeout_s == 30 and not twice else "shutting_down"
            for (prompt, max_tokens), answer in zip(sizes, await landed(tally, streams, LONG_S), strict=True):
                if answer is not None:
                    check(tally, answer, [right(prompt, max_tokens)], refusal=cut)
            if await server.left(LONG_S) is None:
                tally.hung += 1
            worst_s = max(worst_s, late_s := time.monotonic() - over_s)
            if late_s > LEFT_S:
                tally.miss(f"it left {late_s:.1f} s after its time ({timeout_s:g} s, {twice=})")
            if server.process.poll() != 0:
                tally.wrong += 1
                tally.notes.append(f"exit code {server.process.poll()}: {server.log.read_text()[-300:]}")
            tally.leaked += any(map(is_alive, pids))
    tally.figures = f"the last had left {worst_s:.2f} s after its time at most"


async def turned_away(tally: Tally, server: Server) -> None:
    """Requests during the shutdown."""
    begin = time.monotonic()
    while (await request_once(server.port, path="/ready")).status != 503 and time.monotonic() - begin < LONG_S:
        await asyncio.sleep(0.01)
    tally.runs += 1
    answer = await request_once(server.port, asked(0, 5))
    tally.wrong += (answer.status, answer.code) != (503, "shutting_down") or "retry-after" not in answer.headers
    tally.wrong += (await request_once(server.port, path="/health")).status != 200


# -- hanging up --------------------------------------------------------------------------------------------------------


async def hang_ups(tally: Tally, world: World) -> None:
    """Clients that disconnect at any byte, in every way, and others that stay and must not be affected. The pool
    is too small for all, so that some disconnect while they wait or are preempted."""
    chance, room = random.Random(5), asyncio.Semaphore(64)
    ends: list[str] = []
    options = ["--max-num-seqs", "16", "--num-gpu-blocks-override", "100"]
    async with serving(tally, world, *options, faults={"step_s": 0.001}) as server:

        async def one(number: int, port: int) -> None:
            async with room:
                tally.runs += 1
                try:
                    if number % 50 == 1:
                        ends.append(await asyncio.wait_for(end_of(number, port), LONG_S))
                    elif number % 10:
                        await asyncio.wait_for(hang_up(chance, number, port), LONG_S)
                    else:
                        answer = await asyncio.wait_for(request_once(port, asked(number % 50, 40)), LONG_S)
                        check(tally, answer, [right(number % 50, 40)])
                except TimeoutError:
                    tally.hung += 1
                except OSError as error:
                    tally.lost += 1
                    tally.notes.append(str(error))

        await asyncio.gather(*(one(number, server.port) for number in range(world.times(10_000))))
        metrics = (await request_once(server.port, path="/metrics")).body.decode()
    if (num_late := sum(end != "abort" for end in ends)) > len(ends) // 10:
        tally.miss(f"{num_late} of {len(ends)} requests went on though their clients had gone")
    counts = {
        line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("vllm:num_p")
    }
    tally.figures = f"{counts['vllm:num_preemptions_total']:,.0f} preemptions meanwhile"


async def end_of(number: int, port: int) -> str:
    """How a long request ended in the engine after its client disconnected at the first token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(asked(number % 50, 220)).encode()
    writer.write(head_of(body) + body)
    name = ""
    while not name:
        if (line := await reader.readline()).startswith(b"data: "):
            name = json.loads(line.removeprefix(b"data: "))["id"]
        if not line:
            raise ConnectionError("the server hung up before the first token")
    writer.transport.abort()
    while (state := json.loads((await request_once(port, path=f"/debug/requests/{name}")).body)).get("status") in LIVE:
        await asyncio.sleep(0.02)
    return str(state["timeline"][-1]["reason"]) if "timeline" in state else "forgotten"


def head_of(body: bytes) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


LIVE = ("waiting", "running", "swapped")


async def hang_up(chance: random.Random, number: int, port: int) -> None:
    body = asked(number % 50, chance.randrange(1, 60)) | {"n": chance.choice((1, 1, 3)), "stream": number % 3 > 0}
    if number % 11 == 0:
        body = {"prompt": body["prompt"], "max_tokens": 20, "use_beam_search": True, "n": 2}
    content = json.dumps(body).encode()
    request = head_of(content) + content
    if number % 5 == 0:
        request = request[: chance.randrange(len(request))]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if len(request) % 2:
            await asyncio.sleep(chance.choice((0.0, 0.002, 0.02, 0.1)))
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(chance.randrange(1, 3000)), chance.choice((0.001, 0.1, 1)))
        if number % 4 == 0:
            writer.transport.abort()
        elif number % 4 == 1:
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        pass  # the server may close a half-closed connection
    finally:
        writer.close()


# -- a crowd -----------------------------------------------------------------------------------------------------------

CROWD, QUEUE, SEATS = 10_000, 4096, 64


async def crowd(tally: Tally, world: World) -> None:
    """Ten thousand streams at once: all are admitted. Then, with the default queue, the rest gets 429. They arrive
    during one step, so that none has finished before the last arrives."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    number = min(world.times(CROWD), limit - 200)
    most, took = 0, []
    for queue in (number, world.times(QUEUE)):
        with tempfile.NamedTemporaryFile(delete=False) as hold:
            pass
        options = ["--max-num-seqs", world.share(SEATS), "--num-gpu-blocks-override", "2000"]
        options += ["--max-num-queued-reqs", str(queue)]
        async with serving(tally, world, *options, faults={"hold": hold.name}) as server:
            refused = [0]
            expected = min(number, queue + SEATS)

            async def one(i: int, port: int, refused: list[int]) -> tuple[int, RawResponse]:
                client = RawClient(port)
                try:
                    answer = await client.ask(asked(i % 50, 8))
                    refused[0] += answer.status != 200
                    return i, answer
                finally:
                    client.close()

            begin = time.monotonic()
            tasks = [asyncio.ensure_future(one(i, server.port, refused)) for i in range(number)]
            tally.runs += number
            while (here := await server.load()) + sum(task.done() for task in tasks) < number:
                if time.monotonic() - begin > LONG_S:
                    break
                await asyncio.sleep(0.1)
            arrived_s, begin = time.monotonic() - begin, time.monotonic()
            health = await request_once(server.port, path="/health")
            health_ms = 1000 * (time.monotonic() - begin)
            if health.status != 200 or here != expected:
                tally.miss(f"{here} of {number} are here and {refused[0]} are refused, where {expected} should be here")
            os.unlink(hold.name)
            begin = time.monotonic()
            for found in await landed(tally, tasks, 2 * LONG_S):
                if found is not None:
                    i, answer = found
                    check(tally, answer, [right(i % 50, 8)], refusal="queue_full")
            took.append(
                f"{number:,} within {arrived_s:.0f} s, {refused[0]:,} refused, /health in {health_ms:.0f} ms, the "
                f"others answered in {time.monotonic() - begin:.0f} s"
            )
            most = max(most, server.peak_bytes)
    if most > MEMORY_BYTES:
        tally.miss(f"{most / 2**20:.0f} MiB of memory, where {MEMORY_BYTES / 2**20:.0f} MiB are the bound")
    fewer = f"; no more than {limit:,} open files are allowed here" if number < world.times(CROWD) else ""
    tally.figures = f"{'; '.join(took)}; at most {most / 2**20:.0f} MiB{fewer}"


# -- overload ----------------------------------------------------------------------------------------------------------

ROWS, WAITING, LENGTH, STEP_S = 16, 32, 32, 0.02
WARM_UP_S = 2.0


class Crush:
    """Measures a server's throughput and goodput at any request rate."""

    def __init__(self, tally: Tally, port: int, wanted: Sequence[tuple[dict[str, Any], Any]] | None = None) -> None:
        """`wanted`: bodies, which are sent in turns, with the token ids of their answers."""
        self._tally = tally
        self._port = port
        self._wanted = wanted or [(asked(i, LENGTH), [right(i, LENGTH)]) for i in range(50)]
        self._idle: list[RawClient] = []
        self._number = 0
        self.good_at: list[float] = []
        self.first_s: list[float] = []
        self.num_refused = 0
        self.last_token_at = 0.0

    async def one(self) -> None:
        tally, (body, wanted) = self._tally, self._wanted[self._number % len(self._wanted)]
        self._number += 1
        tally.runs += 1
        client = self._idle.pop() if self._idle else RawClient(self._port)
        if time.monotonic() - client.idle_since > 3:  # the server closes idle connections
            client.close()
        begin = time.monotonic()
        try:
            answer = await asyncio.wait_for(client.ask(body, on_data=self._on_data), LONG_S)
        except TimeoutError:
            tally.hung += 1
            return
        except OSError as error:
            tally.lost += 1
            tally.notes.append(str(error))
            return
        self._idle.append(client)
        check(tally, answer, wanted, refusal="queue_full")
        if answer.status == 200:
            first_s = answer.head_at - begin
            self.first_s.append(first_s)
            if first_s <= SLO_S:
                self.good_at.append(time.monotonic())
        else:
            self.num_refused += 1

    def _on_data(self, data: bytes) -> None:
        if b'"token_ids"' in data:  # else it may keep the connection alive
            self.last_token_at = time.monotonic()

    def rate(self, since: float, to: float) -> float:
        """Good responses per second."""
        return sum(since < at <= to for at in self.good_at) / (to - since)

    def close(self) -> None:
        for client in self._idle:
            client.close()


async def overload(tally: Tally, world: World) -> None:
    """Goodput stays at its best under overload; the rest gets 429 at once."""
    seconds = max(5.0, 60.0 * world.scale)
    options = ["--max-num-seqs", world.share(ROWS), "--num-gpu-blocks-override", "2000"]
    options += ["--max-num-queued-reqs", str(WAITING)]
    async with serving(tally, world, *options, faults={"step_s": STEP_S}) as server:
        peak = await closed_loop(Crush(tally, server.port), max(5.0, 20.0 * world.scale))
        figures = [f"{peak:.1f} good responses/s at best"]
        for times in (2, 5, 10):
            crush = Crush(tally, server.port)
            got, offered = await open_loop(crush, times * peak, seconds)
            p99_s = statistics.quantiles(crush.first_s, n=100)[98] if len(crush.first_s) > 1 else 0.0
            begin = time.monotonic()
            while (await request_once(server.port, asked(0, 1))).status != 200:
                if time.monotonic() - begin > LONG_S:
                    break
                await asyncio.sleep(0.1)
            if (recovered_s := time.monotonic() - begin) > RECOVERED_S:
                tally.miss(f"{recovered_s:.1f} s after the load a request was still refused")
            if not crush.num_refused:
                tally.miss(f"no request was refused at {offered:.0f}/s")
            if got < SHARE * peak:
                tally.miss(f"{got:.1f} good answers/s, where {peak:.1f}/s are possible, when asked for {offered:.0f}/s")
            figures.append(
                f"{got:.1f} when asked for {offered:.0f}/s ({crush.num_refused:,} refused, first token within "
                f"{p99_s:.1f} s for 99 %)"
            )
            crush.close()
    tally.figures = "; ".join(figures)


async def closed_loop(crush: Crush, seconds: float) -> float:
    """As many clients as fit, each with one request after another. Returns good responses per second."""
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await crush.one()

    await asyncio.gather(*(caller() for _ in range(ROWS + WAITING)))
    crush.close()
    return crush.rate(end - seconds + WARM_UP_S, end)


async def open_loop(crush: Crush, rate: float, seconds: float) -> tuple[float, float]:
    """Poisson arrivals, independent of the server. Returns good responses and requests per second."""
    chance, begin, tasks = random.Random(4), time.monotonic(), set()
    due = begin
    num_sent = 0
    while (due := due + chance.expovariate(rate)) < begin + seconds:
        if (wait_s := due - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.ensure_future(crush.one())
        num_sent += 1
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    end = time.monotonic()
    await asyncio.gather(*tasks)
    return crush.rate(begin + WARM_UP_S, end), num_sent / (end - begin)


# -- a long run --------------------------------------------------------------------------------------------------------

SOAK_S, FIRST_S, BACK_S, NOTICED_S = 600.0, 60.0, 5.0, 11.0
"""Duration, the part of it after which memory is measured first, and bounds for an engine to be back and for a stopped
one to be noticed."""
MEMORY_SHARE = 1.1


async def soak(tally: Tally, world: World) -> None:
    """A real model at twice its capacity, whose engine is killed three times and stopped once."""
    seconds = max(60.0, SOAK_S * world.scale)
    options = ["--dtype", "float32", "--max-num-seqs", world.share(ROWS), "--num-gpu-blocks-override", "300"]
    options += ["--max-num-queued-reqs", str(WAITING)]
    wanted = [(body_of(prompt), world.wanted[prompt]) for prompt in PROMPTS]
    async with serving(tally, world, *options, faults={"pace_s": STEP_S}) as server:
        peak = await closed_loop(Crush(tally, server.port, wanted), 10.0)
        crush = Crush(tally, server.port, wanted)
        load = asyncio.ensure_future(open_loop(crush, 2 * peak, seconds))
        await asyncio.sleep(seconds * FIRST_S / SOAK_S)
        first_bytes, back_s = server.resident_bytes, []
        for i, number in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)):
            bound_s = BACK_S + (NOTICED_S if number == signal.SIGSTOP else 0)
            begin = time.monotonic()
            os.kill(server.engine_pids[i % world.engines], number)
            await asyncio.sleep(0.5)  # tokens on their way arrive
            struck_at = time.monotonic()
            await tally.until(lambda: crush.last_token_at > struck_at, bound_s)  # noqa: B023
            back_s.append(time.monotonic() - begin)
            await asyncio.sleep(seconds / 5 - back_s[-1])
        got, offered = await load
        share = server.resident_bytes / first_bytes
        crush.close()
    if share > MEMORY_SHARE:
        tally.miss(f"the memory grew to {share:.2f} of what it was after a minute")
    tally.back_s = max(back_s[:3])
    tally.figures = (
        f"{got:.1f} good responses/s when asked for {offered:.1f}/s, {crush.num_refused:,} refused; "
        f"back after {', '.join(f'{s:.1f}' for s in back_s)} s (the last was stopped); memory {share:.2f}"
    )


# -- without asserts ---------------------------------------------------------------------------------------------------

BAD: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b'{"prompt": NaN}'),
    ("/v1/completions", b"\xff"),
    ("/v1/completions", b"[" * 100),
    ("/v1/completions", b'"' + b"a" * 300_000 + b'"'),
    ("/v1/completions", [1]),
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[1], "a"]}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": [97]}),
    ("/v1/completions", {"prompt": "a" * 1000}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    ("/v1/completions", {"prompt": "a", "n": True}),
    ("/v1/completions", {"prompt": "a", "n": 17}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/completions", {"prompt": "a", "temprature": 1}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**6]}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": []}}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "beam_width": 0}),
    ("/v1/completions", {"prompt": "a", "allowed_token_ids": [-1]}),
    ("/v1/completions", {"prompt": "a", "model": "other"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "a"}]}),
    ("/v1/responses", {"input": 3}),
    ("/tokenize", {"prompt": 3}),
    ("/detokenize", {"tokens": [10**6]}),
)
"""Bodies that must be refused."""


async def no_asserts(tally: Tally, world: World) -> None:
    """`python -O`: responses equal those of the engine in this process, refusals those of a server with asserts, a
    killed engine restarts, and the tests of the official client pass."""
    options = ["--dtype", "float32", "--num-gpu-blocks-override", "200", "--max-num-seqs", "16"]
    refusals: list[list[tuple[int, str | None]]] = []
    for interpreter in (["-O"], []):
        async with serving(tally, world, *options, interpreter=interpreter) as server:
            refused = []
            for path, body in BAD:
                tally.runs += 1
                raw = body if isinstance(body, bytes) else None
                answer = await request_once(server.port, body, path, raw=raw)
                refused.append((answer.status, answer.code))
            refusals.append(refused)
            if interpreter:
                await check_all(tally, world, server)
                os.kill(server.engine_pids[0], signal.SIGKILL)
                await check_all(tally, world, server)
    for (path, body), without, with_asserts in zip(BAD, *refusals, strict=True):
        if without != with_asserts or not 400 <= without[0] < 500:
            tally.wrong += 1
            tally.notes.append(f"{path} {str(body)[:100]}: {without}, with asserts {with_asserts}")
    await official_client(tally, world)


def body_of(prompt: str) -> dict[str, Any]:
    p = params_of(prompt)
    body = {"prompt": prompt, "return_token_ids": True, "stream": True, "n": p.n, "max_tokens": p.max_tokens}
    body |= {"temperature": p.temperature, "seed": p.seed, "stop": p.stop, "ignore_eos": p.ignore_eos}
    return body | {"repetition_penalty": p.repetition_penalty}


async def check_all(tally: Tally, world: World, server: Server) -> None:
    async def stream_tokens(prompt: str) -> list[list[int]]:
        answer = await request_once(server.port, body_of(prompt))
        return answer.token_ids if answer.is_whole else [[-1]]

    await asyncio.gather(*(tally.check(stream_tokens(prompt), world.wanted[prompt]) for prompt in PROMPTS))


async def official_client(tally: Tally, world: World) -> None:
    """Creates the client's environment if it is missing. If that fails, the trial is skipped with a note."""
    from scripts.clients import python_of

    from tests.clients.tiny_server import serving as tiny

    try:
        python = await asyncio.to_thread(python_of, "openai")
    except subprocess.CalledProcessError:
        tally.figures = "the openai package cannot be installed here: its tests are left out"
        return
    with tempfile.TemporaryDirectory() as directory, tiny(Path(directory), interpreter=["-O"]) as url:
        command = [str(python), "-m", "pytest", "-o", "addopts=", "-q", "tests/clients/test_openai.py"]
        environment = {**os.environ, "OCTAVO_TEST_SERVER": url}
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    tally.figures = f"the openai package's tests: {last}"
    tally.wrong += done.returncode != 0


TRIALS: dict[str, tuple[str, Callable[[Tally, World], Awaitable[None]]]] = {
    "drains": ("graceful shutdown during 64 streams", drains),
    "hang-ups": ("clients hang up at any time", hang_ups),
    "crowd": ("10,000 connections", crowd),
    "overload": ("asked for 2, 5, 10 times too much", overload),
    "hostile": ("one hostile client during 64 streams", hostile),
    "addresses": ("the same without keys, by address", hostile_addresses),
    "soak": ("ten minutes at twice the capacity", soak),
    "no-asserts": ("under python -O", no_asserts),
}
