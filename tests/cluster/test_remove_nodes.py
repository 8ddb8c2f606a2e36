"""Nodes of a Ray cluster go away, its replicas change: no request is lost, hangs or changes."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_talking_checkpoint

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'octavo[cluster]'")

ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 5


def processes_of(model: str) -> list[int]:
    """The processes of a test: its engines and workers have the environment of the program that started Ray."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue
        if f"OCTAVO_TEST_CLUSTER={model}".encode() in environment:
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a program of this folder in a cluster of its own; at the end nothing of it is left."""
    model = str(make_talking_checkpoint(tmp_path / "model", max_position_embeddings=1024))
    (tmp_path / "token").write_text(secrets.token_hex(32), encoding="utf-8")
    environment = {
        **os.environ,
        "OCTAVO_TEST_CLUSTER": model,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),  # Ray would keep one in the home directory
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TMPDIR": str(tmp_path),
        "RAY_TMPDIR": "/tmp",
    }

    def run_program(name: str, *before: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", f"tests.cluster.{name}", *before, model, str(port), *after]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    yield run_program
    deadline = time.monotonic() + 10
    while processes_of(model) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(model)
    assert not list(tmp_path.glob("octavo-*"))


@pytest.mark.slow
def test_removed_nodes_lose_no_request(run: Callable[..., dict[str, Any]]) -> None:
    result = run("remove_nodes", after=(str(NUM_ROUNDS),))
    assert result["complete"] == 8
    assert len(result["rounds"]) == NUM_ROUNDS
    for row in result["rounds"]:
        assert (row["lost"], row["hung"], row["wrong"], row["done_before"]) == (0, 0, 0, 0)
        assert row["num_paused"] < 8, row  # the other node's streams go on
    assert any(row["num_paused"] for row in result["rounds"]), "no round met a stream"


@pytest.mark.slow
def test_hung_node_loses_no_request(run: Callable[..., dict[str, Any]]) -> None:
    result = run("remove_nodes", after=("1", "hang"))
    (row,) = result["rounds"]
    assert result["num_reached"] == 1
    assert (row["lost"], row["hung"], row["wrong"], row["done_before"]) == (0, 0, 0, 0)
    assert 0 < row["num_paused"] < 8, row
    assert 9 < row["longest_pause_s"] < 13, row  # found after 10 s of silence


@pytest.mark.slow
def test_engines_follow_the_load(run: Callable[..., dict[str, Any]]) -> None:
    result = run("changes", "scale")
    assert (result["lost"], result["wrong"]) == (0, 0)
    assert result["right"] > 8
    assert result["used_s"] < 60 and result["down_s"] < 60, result


@pytest.mark.slow
def test_rolling_update_loses_no_request(run: Callable[..., dict[str, Any]]) -> None:
    result = run("changes", "update")
    assert (result["lost"], result["wrong"], result["engines"]) == (0, 0, 2)
    assert result["right"] > 8 and result["longest_pause_s"] < 5, result


@pytest.mark.slow
def test_dead_front_ends_only_its_own_streams(run: Callable[..., dict[str, Any]]) -> None:
    result = run("changes", "fronts")
    assert (result["done_before"], result["wrong"]) == (0, 0), result
    assert 0 < result["ended"] < 8, result  # both fronts had streams
    assert result["right_after"] == 8
