"""Valid and invalid bodies generated from our OpenAPI document: no 5xx, and other requests are not affected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed; `make clients` runs this")
pytestmark = pytest.mark.slow

CHECKS = (
    "not_a_server_error,negative_data_rejection,status_code_conformance,response_schema_conformance,"
    "content_type_conformance"
)
EXAMPLES = os.environ.get("OCTAVO_FUZZ_EXAMPLES", "60")
"""Random examples per route, besides those at the edges of its schema."""
CONFIG = Path(__file__).with_name("schemathesis.toml")


def test_generated_requests_are_answered_without_5xx(server: str) -> None:
    body = json.dumps({"prompt": "Hello,world", "max_tokens": 60, "temperature": 0, "ignore_eos": True}).encode()
    headers = {"authorization": "Bearer key", "content-type": "application/json"}

    def victim() -> str:
        request = urllib.request.Request(f"{server}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["text"])

    wanted, texts, over = victim(), set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            texts.add(victim())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        program = Path(sys.executable).with_name("schemathesis")
        command = [str(program), "--config-file", str(CONFIG), "run", f"{server}/openapi.json"]
        options = [
            "--header",
            "Authorization: Bearer key",
            "--checks",
            CHECKS,
            "--request-timeout",
            "60",
            "-n",
            EXAMPLES,
            "--phases",
            "coverage,fuzzing",
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
    finally:
        over.set()
        watcher.join()
    assert done.returncode == 0, done.stdout[-4000:]
    assert texts == {wanted}
