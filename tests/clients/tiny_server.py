"""`octavo serve` with a tiny model."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engine.models import make_talking_checkpoint

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
)


@contextlib.contextmanager
def serving(directory: Path, *more: str, interpreter: Sequence[str] = ()) -> Iterator[str]:
    """Yields the server's address. Its API key is "key". `interpreter`: options of Python."""
    model = make_talking_checkpoint(directory / "model", max_position_embeddings=512)
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    options = [
        "--port",
        "0",
        "--api-key",
        "key",
        "--served-model-name",
        "tiny",
        "--chat-template",
        str(template),
        *more,
    ]
    command = [sys.executable, *interpreter, "-m", "octavo.cli.main", "serve", str(model), *options]
    log = directory / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while (found := re.search(r"serving on (http\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()
