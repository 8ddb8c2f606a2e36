"""Engine clients for tests, and checks that a closed one leaves nothing running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import RequestOutput, SamplingParams
from octavo.core.request import Request
from octavo.engine.process.supervisor import ENGINE_COMMAND, EngineTimeouts
from octavo.frontend.process_transport import ProcessClient, process_client
from tests.proof import oracle
from tests.serve.event_loop import run as run  # re-exported for tests of clients

OPTIONS: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 16}
PARAMS = SamplingParams(max_tokens=40, seed=1)
SHORT_TIMEOUTS = EngineTimeouts(silence_s=2.5, step_s=2.5, retry_s=0.05)
"""For tests in which an engine hangs. On a busy machine, a healthy engine may exceed them and be restarted."""


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary directory for sockets, so that leftovers of other processes do not count."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def oracle_command(**faults: Any) -> tuple[str, ...]:
    return sys.executable, str(Path(__file__).parents[2] / "proof" / "oracle_engine.py"), json.dumps(faults)


def oracle_client(
    model: str, *, timeouts: EngineTimeouts | None = None, options: dict[str, Any] | None = None, **faults: Any
) -> ProcessClient:
    return process_client(model, command=oracle_command(**faults), timeouts=timeouts, **(OPTIONS | (options or {})))


def real_client(model: str, *, timeouts: EngineTimeouts | None = None, **options: Any) -> ProcessClient:
    return process_client(
        model, command=ENGINE_COMMAND, timeouts=timeouts, **(OPTIONS | {"dtype": "float32"} | options)
    )


@contextlib.asynccontextmanager
async def serving(client: ProcessClient) -> AsyncIterator[ProcessClient]:
    """Start a client. On exit its engine must hold no blocks, and no engine process or socket may be left."""
    with nothing_left():
        async with client:
            yield client
            if client.is_running:
                assert not client.transport.handles
                stats = await client.kv_stats()
                assert stats.num_used == 0 and stats.num_host_used == 0


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    before = residue()
    yield
    assert residue() <= before


def residue() -> set[str]:
    """Socket directories and child processes."""
    directories = {str(path) for path in Path(tempfile.gettempdir()).glob("octavo-*")}
    children = {f"child {pid}" for pid in children_of(os.getpid())}
    return directories | children


def children_of(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def is_alive(pid: int) -> bool:
    """False also for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def kill_engine(client: ProcessClient) -> None:
    assert client.transport.pid is not None
    os.kill(client.transport.pid, signal.SIGKILL)


async def until(ready: Callable[[], Any], limit_s: float = 90) -> float:
    """Wait for a condition; returns the seconds that it took."""
    begin = time.monotonic()
    while not ready():
        assert time.monotonic() - begin < limit_s, f"not true after {limit_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - begin


async def last_of(client: ProcessClient, prompt: Any, params: Any, **options: Any) -> RequestOutput:
    outputs = [output async for output in client.generate(prompt, params, **options)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def reference_outputs(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The outputs of the oracle's model for a prompt, by sample."""
    request = Request("", prompt, params)
    return [tokens[len(prompt) :] for _, tokens in oracle.reference(request)]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def prompt(number: int, length: int = 11) -> list[int]:
    return random.Random(number).choices(range(5), k=length)


async def many(client: ProcessClient, num: int = 8, params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    outputs = await asyncio.gather(*[last_of(client, prompt(i), params) for i in range(num)])
    return [tokens_of(output) for output in outputs]


def expected(num: int = 8, params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    return [reference_outputs(prompt(i), params) for i in range(num)]
