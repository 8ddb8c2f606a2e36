"""Log lines of a server and of its engine process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.serve.conftest import model

__all__ = ["model"]


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_engine_process_logs_in_the_format_of_the_server(model: str, as_json: bool) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", "0", "--max-model-len", "99999"]
    command += ["--log-format", "json"] if as_json else []
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "serving on http" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 0, lines
    if as_json:
        records = [(entry["level"], entry["logger"], entry["message"]) for entry in map(json.loads, lines)]
    else:
        records = [(words[0].lower(), words[3][1:-1], words[4]) for words in (line.split(maxsplit=4) for line in lines)]
    levels = {(level, name) for level, name, message in records if "exceeds the model's" in message}
    assert levels == {("warning", "octavo")}, lines
    assert ("info", "octavo") in {(level, name) for level, name, message in records if "ready in" in message}
