"""`octavo cluster` before and around Ray: each error is one line."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from octavo.cli.main import run as command
from octavo.cluster import launcher, pool
from octavo.cluster.messages import Fingerprint, Report
from octavo.cluster.pool import ReplicaPool
from octavo.engine.stats import EngineStats, Health, StatsSnapshot
from octavo.errors import EngineError, OctavoError
from tests.engine.models import make_talking_checkpoint

HERE = Fingerprint("1.0", "smollm2", "abc", "auto", "", "auto")
FILE = """
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - import_path: octavo.cluster.app:build
    args: {{model: {model}, engine: {{device: cpu}}}}
"""


class OneReplica:
    """Calls to one replica, which has another fingerprint."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint

    def names(self) -> list[str]:
        return ["r0"]

    async def generate(self, replica: str, command: bytes) -> AsyncGenerator[bytes, None]:
        yield b""

    async def stop(self, replica: str, request_id: str, index: int) -> None: ...

    async def query(self, replica: str, query: bytes) -> bytes:
        return b""

    async def report(self, replica: str, since: int) -> bytes:
        report = Report(self._fingerprint, Health("running", 0.0), StatsSnapshot(EngineStats(), None))
        return msgspec.msgpack.encode(report)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"version": "0.9"}, "version '0.9' instead of '1.0'"),
        ({"model": "llama", "digest": "def"}, "model 'llama' instead of 'smollm2', digest 'def' instead of 'abc'"),
    ],
    ids=["version", "model"],
)
async def test_front_names_what_differs_on_another_node(
    other: dict[str, str], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MISMATCH_S", 0.1)
    replicas = ReplicaPool(OneReplica(msgspec.structs.replace(HERE, **other)), HERE)
    with pytest.raises(EngineError) as error:
        await asyncio.wait_for(replicas.start(), 10)
    replicas.close()
    remedy = "give all nodes the same model files and Octavo version"
    assert str(error.value) == f"replica r0 has {difference}; {remedy}"


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    assert command(["cluster", "x.yaml"]) == 1
    error = last_error(capsys)
    assert error.startswith("error: octavo cluster needs Ray Serve (")
    assert error.endswith("; install it: pip install 'octavo[cluster]'")


def test_cluster_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Ray of this machine alone would not be what RAY_ADDRESS asks for."""
    pytest.importorskip("ray.serve")
    file = tmp_path / "x.yaml"
    file.write_text(FILE.format(model=make_talking_checkpoint(tmp_path / "model"), port=8000), encoding="utf-8")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert command(["cluster", str(file)]) == 1
    assert last_error(capsys).startswith(
        f"error: no Ray cluster at RAY_ADDRESS={address}: Connection refused; start it"
    )


def test_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OctavoError) as error:
            launcher.check_port("127.0.0.1", port)
    assert str(error.value) == f"address in use: 127.0.0.1:{port}; choose another --port"


def test_replicas_that_do_not_fit_name_the_remedy() -> None:
    lines = "Traceback:\n  File x\noctavo.errors.MemoryBudgetError: No available memory: 2 GiB\nand more\n"
    failed = SimpleNamespace(message="", deployments={"Engine": SimpleNamespace(message=lines)})
    assert launcher._cause(failed) == "No available memory: 2 GiB; or lower num_replicas or max_replicas"
    other = SimpleNamespace(message="it: failed", deployments={})
    assert launcher._cause(other) == "it: failed"
