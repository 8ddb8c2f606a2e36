"""guidellm with synthetic data, unchanged, against the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm", reason="guidellm is not installed; `make clients` runs this")
pytestmark = pytest.mark.slow

REQUESTS, PROMPT, OUTPUT = 12, 40, 12


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_benchmark(server: str, tokenizer: Path, tmp_path: Path, route: str) -> None:
    """Every request succeeds with the requested number of tokens, by the server's count and by the client's."""
    out = tmp_path / "out.json"
    program = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    options = {
        "backend": f"kind=openai_http,target={server},model=tiny,api_key=key,request_format={route}",
        "profile": "kind=concurrent,streams=3",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={tokenizer}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "output": f"kind=json,path={out}",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*program, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    for request in benchmark["requests"]["successful"]:
        template = 0 if route == "/v1/completions" else len("user:;a:")  # a token is a character
        assert request["input_metrics"]["text_tokens"] == PROMPT + template
        assert request["output_metrics"]["text_tokens"] == OUTPUT
        timings = request["info"]["timings"]
        assert timings["first_token_iteration"] <= timings["last_token_iteration"]
        assert timings["token_iterations"] >= 1
