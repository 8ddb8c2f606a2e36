"""`octavo serve` for the peers' suites: one process per set of options, shared by all tests of a session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODEL = "smollm2"
BASE_MODELS = dict.fromkeys(("facebook/opt-125m", "distilbert/distilgpt2"), os.environ["PEER_BASE_MODEL"])
"""Models without a chat template -> a tiny model that does not end its text where SmolLM2 does."""
START_S = 120.0

_running: dict[tuple[object, ...], OctavoServer] = {}


class OctavoServer:
    """A server process. `url` has no path."""

    def __init__(self, model: str, options: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", BASE_MODELS.get(model, MODEL), *options]
        with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                command, stderr=log, stdout=log, cwd=ROOT, env={**os.environ, **environment, "OMP_NUM_THREADS": "1"}
            )
        self.url = self._wait()

    def _wait(self) -> str:
        end = time.monotonic() + START_S
        while (found := re.search(r"serving on (\S+)", self.log.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"octavo serve did not start: {self.log.read_text()[-600:]}")
            time.sleep(0.05)
        return found[1]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def serving(
    options: Sequence[str], environment: Mapping[str, str] | None = None, limit: int = 2, model: str = MODEL
) -> OctavoServer:
    """The running server of what stands for `model`, with these options; at most `limit` run."""
    environment = dict(environment or {})
    key = (model, *options, *sorted(environment.items()))
    server = _running.get(key)
    if server is None or server.process.poll() is not None:
        while len(_running) >= limit:
            _running.pop(next(iter(_running))).stop()
        server = _running[key] = OctavoServer(model, options, environment)
    return server


def stop_all() -> None:
    while _running:
        _running.popitem()[1].stop()
