"""Every file of examples/ runs as its user would run it, on a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.models import make_talking_checkpoint

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
FINDS = {
    "beam_search.py": r"greedy\n( +-\d+\.\d\d  .+\n){4}$",
    "json_schema.py": r"(name: .{1,20}, age: \d+, pet: (cat|dog|none)\n(At 71.*\n  )?){2}$",
    "many_chats.py": r"\[(1\d\d|2\d\d) of 2\d\d prompt tokens came from the cache\]\n\nprefix cache: \d{3} of \d{4} ",
    "notebook_pool.py": r"^[1-9]\d of 96 blocks are cached\n$",
    "offline_batch.py": r"new; (stop|length)\]\n\n\d+ tokens, up to 3 requests in a step\n$",
    "paged_attention.py": r"\n3 of 3 as the model's own generation; \d blocks in use\n$",
    "rag_pinned_prefix.py": r"\n1\d\d\d of 1\d\d\d prompt tokens were not computed again\n2\d blocks unpinned\n$",
    "simulate_trace.py": r"( +\d+ requests/s: first token .* 20 finished, 0 preemptions\n){3}$",
    "streaming_client.py": r".+\n\n\[\d+ prompt tokens, 100 new\]\n$",
    "tools.py": r"the model calls temperature\(\{'city': '(Oslo|Rome)'\}\), which returns '\d+ degrees'\nit answers: .",
}
"""File -> what its output holds."""
OPTIONS = {"simulate_trace.py": ["--requests", "20"]}
every_example = pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its chat template has tools."""
    folder = make_talking_checkpoint(tmp_path_factory.mktemp("talking"), max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text((EXAMPLES / "tools.jinja").read_text())
    return str(folder)


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `octavo serve`, with that model."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env=ENVIRONMENT)
    try:
        while (found := re.search(r"serving on (http://[^\s/]+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield f"{found[1]}/v1"
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()


@every_example
def test_example_runs(name: str, model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, options = EXAMPLES / name, ["--model", model, *OPTIONS.get(name, [])]
    if "--url" in path.read_text():
        options += ["--url", request.getfixturevalue("url")]
    command = [sys.executable, "-W", "error", str(path), *options]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(FINDS[name], done.stdout), done.stdout
    assert "Traceback" not in done.stderr


@every_example
def test_example_says_how_to_start_it(name: str) -> None:
    """In its docstring, and the list names it."""
    docstring = (EXAMPLES / name).read_text().split('"""')[1]
    assert f"python examples/{name}" in docstring
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text()
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60


def test_a_wrong_model_name_ends_a_client_with_the_servers_message(url: str) -> None:
    for name in ("streaming_client.py", "tools.py"):
        command = [sys.executable, str(EXAMPLES / name), "--model", "other", "--url", url]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "`other` does not exist" in done.stderr
