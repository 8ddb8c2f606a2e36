"""A node of a Ray cluster is removed while streams run: no request is lost, hangs or changes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

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


@pytest.mark.slow
def test_removed_nodes_lose_no_request(tmp_path: Path) -> None:
    model = str(make_talking_checkpoint(tmp_path / "model", max_position_embeddings=1024))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OCTAVO_TEST_CLUSTER": model,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TMPDIR": str(tmp_path),
        "RAY_TMPDIR": "/tmp",
    }
    command = [sys.executable, "-m", "tests.cluster.remove_nodes", model, str(port), str(NUM_ROUNDS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["complete"] == 8
    assert len(result["rounds"]) == NUM_ROUNDS
    for row in result["rounds"]:
        assert (row["lost"], row["hung"], row["wrong"], row["done_before"]) == (0, 0, 0, 0)
        assert row["num_paused"] < 8, row  # the other node's streams go on
    assert any(row["num_paused"] for row in result["rounds"]), "no round met a stream"
    deadline = time.monotonic() + 10
    while processes_of(model) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(model)
    assert not list(tmp_path.glob("octavo-*"))
