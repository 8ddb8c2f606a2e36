"""curl, with the commands of the guides."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def curl(*args: str, code: int = 0) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout


KEY = ("--oauth2-bearer", "key")


def test_completion_and_stream(server: str) -> None:
    url = f"{server}/v1/completions"
    text = json.loads(curl(*KEY, url, "--json", json.dumps(BODY)))["choices"][0]["text"]
    assert len(text) == 8
    lines = curl(*KEY, "--no-buffer", url, "--json", json.dumps(BODY | {"stream": True})).splitlines()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_body_from_a_file(server: str, tmp_path: Path) -> None:
    """A large body: curl sends Expect: 100-continue first, or sends chunks."""
    (file := tmp_path / "body.json").write_text(json.dumps(BODY) + " " * 70_000)
    want = json.loads(curl(*KEY, f"{server}/v1/completions", "--json", json.dumps(BODY)))["choices"]
    chunked = ("--header", "Transfer-Encoding: chunked")
    for more in ((), ("--header", "Expect: 100-continue"), chunked, ("--http1.0",)):
        answer = curl(*KEY, *more, f"{server}/v1/completions", "--json", f"@{file}")
        assert json.loads(answer)["choices"] == want
    status = ("--output", str(tmp_path / "answer"), "--write-out", "%{http_code}")
    file.write_text(" " * 9_000_000)
    assert curl(*KEY, *status, f"{server}/v1/completions", "--json", f"@{file}") == "413"
    assert json.loads((tmp_path / "answer").read_text())["error"]["code"] == "body_too_large"


def test_missing_key_and_missing_body(server: str) -> None:
    status = ("--write-out", "\n%{http_code} %{content_type}")
    for args, want in (
        ((f"{server}/health",), "200"),
        ((f"{server}/v1/models",), "401"),
        ((*KEY, f"{server}/v1/models"), "200"),
        ((*KEY, f"{server}/v1/completions"), "405"),
        ((*KEY, "--data", "prompt=Hello", f"{server}/v1/completions"), "415"),
        ((*KEY, "--path-as-is", f"{server}/v1/../health"), "404"),
        ((*KEY, "--head", f"{server}/health"), "200"),
    ):
        assert curl(*status, *args).splitlines()[-1].startswith(want), args
    body, _, _ = curl(*status, *KEY, "--data", "prompt=Hello", f"{server}/v1/completions").rpartition("\n")
    assert json.loads(body)["error"]["code"] == "unsupported_media_type"
    assert "vllm:prompt_tokens_total" in curl(*KEY, f"{server}/metrics")
