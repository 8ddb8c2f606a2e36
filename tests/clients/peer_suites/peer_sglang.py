"""A pytest plugin that runs SGLang's tests of its OpenAI server without SGLang: `popen_launch_server` is replaced."""

from __future__ import annotations

import itertools
import socket
import unittest
import urllib.parse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import octavo_server
import stand_ins

MAX_MODEL_LEN = 2048
RENAMED = {"--max-running-requests": "--max-num-seqs", "--context-length": "--max-model-len"}
KEPT = ("--api-key", "--served-model-name", "--tool-call-parser", "--reasoning-parser", "--chat-template", "--uds")
"""Options with a value that mean the same here. Others choose SGLang's backends and its memory, and are left out."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


URL = f"http://127.0.0.1:{free_port()}"


def popen_launch_server(
    model: str, base_url: str, *_: Any, api_key: str = "", other_args: Sequence[str] = (), **__: Any
) -> SimpleNamespace:
    options = ["--port", str(urllib.parse.urlsplit(base_url).port), "--served-model-name", str(model)]
    if api_key:
        options += ["--api-key", api_key]
    given = list(map(str, other_args))
    for name, value in itertools.pairwise(given):
        name = RENAMED.get(name, name)
        if name in KEPT or name in RENAMED.values():
            options += [name, value]
    if "--max-model-len" not in options:
        options += ["--max-model-len", str(MAX_MODEL_LEN)]
    octavo_server.serving(options, limit=1)
    return SimpleNamespace(pid=0)


OWN: dict[str, Any] = {
    "CustomTestCase": unittest.TestCase,
    "popen_launch_server": popen_launch_server,
    "kill_process_tree": lambda *_, **__: None,
    "get_tokenizer": stand_ins.get_tokenizer,
    "DEFAULT_URL_FOR_TEST": URL,
    "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 120,
    "is_in_ci": lambda: False,
    "is_in_amd_ci": lambda: False,
}


def counterpart(module: str, name: str) -> Any:
    """What stands for `name` of SGLang's `module`."""
    if name in OWN:
        return OWN[name]
    if name.startswith("register_"):
        return lambda *_, **__: None
    if name.startswith("DEFAULT_"):
        return name.lower()  # a model's name
    return stand_ins.placeholder(module, name)


stand_ins.install("sglang", counterpart)
