"""A pytest plugin that runs llama.cpp's server tests: its `ServerProcess` starts `octavo serve`."""

from __future__ import annotations

import importlib
import os
import sys
import urllib.parse
from types import ModuleType
from typing import Any

import octavo_server
import pytest
from requests.structures import CaseInsensitiveDict

sys.modules["wget"] = ModuleType("wget")  # the suite's utils.py imports it to fetch models
sys.path.insert(0, os.environ["PEER_ROOT"])


def start(self: Any, timeout_seconds: int = 0) -> None:
    options = ["--port", "0", "--seed", str(self.seed), "--allowed-origins", "*"]
    options += ["--max-model-len", str(self.n_ctx or 2048), "--max-num-seqs", str(self.n_slots or 2)]
    if self.model_alias:
        for name in (self.model_alias, "gpt-3.5-turbo-instruct", "gpt-3.5-turbo"):  # llama.cpp ignores the name
            options += ["--served-model-name", name]
    if self.api_key:
        options += ["--api-key", self.api_key]
    if self.chat_template:
        pytest.skip("names one of llama.cpp's built-in chat templates")
    self.server_port = urllib.parse.urlsplit(octavo_server.serving(options).url).port


def pytest_collection(session: pytest.Session) -> None:
    process = importlib.import_module("utils").ServerProcess
    process.start, process.stop = start, lambda self: None
    for name in ("make_request", "make_stream_request"):
        setattr(process, name, at_v1(getattr(process, name)))


def at_v1(request: Any) -> Any:
    """The same request; OpenAI's routes are at /v1 only."""

    def changed(self: Any, method: str, path: str, *more: Any, **options: Any) -> Any:
        is_openai = path.split("?")[0] in ("/chat/completions", "/completions", "/models", "/embeddings")
        answer = request(self, method, "/v1" + path if is_openai else path, *more, **options)
        if hasattr(answer, "headers"):
            answer.headers = CaseInsensitiveDict(answer.headers)
        return answer

    return changed
