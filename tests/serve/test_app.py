"""Traps of an OpenAI-compatible server that need special models: multi-token characters, and a generation config with
sampling parameters and stop tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve.in_process_server import serving
from tests.serve.scripted_model import make_byte_checkpoint

C, H = "/v1/completions", "/v1/chat/completions"
TEXT = "日本語 😀é!"


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are bytes."""
    return str(make_byte_checkpoint(tmp_path_factory.mktemp("bytes")))


async def test_multi_token_characters_are_streamed_whole(byte_model: str) -> None:
    async with serving(byte_model) as server:
        payload: dict[str, Any] = {"max_tokens": 60, "structured_outputs": {"choice": [TEXT]}}
        chunks = await server.events(C, prompt="Hi", return_token_ids=True, **payload)
        shown = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(shown) == TEXT and "\ufffd" not in "".join(shown)
        num_tokens = sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks)
        assert num_tokens == len(TEXT.encode()) + 1  # and the stop token
        whole = await server.complete("Hi", ignore_eos=False, **payload)
        assert whole["choices"][0]["text"] == TEXT
        chat = await server.events(H, messages=[{"role": "user", "content": "Hi"}], logprobs=True, **payload)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chat) == TEXT
        raw = [e["bytes"] for c in chat for e in ((c["choices"][0]["logprobs"] or {}).get("content") or ())]
        assert bytes(b for part in raw for b in part).startswith(TEXT.encode())
        cut = await server.complete("Hi", **(payload | {"max_tokens": 2}))
        assert cut["choices"][0]["text"] == "\ufffd"  # an incomplete character, once it cannot be completed


async def test_generation_config_of_the_model_is_applied(model: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    ids = list(range(5, 97))  # every second token is a stop token
    words = {"temperature": 0.0, "eos_token_id": [2, *ids[::2]]}
    (directory / "generation_config.json").write_text(json.dumps(words))
    async with serving(str(directory)) as server:
        texts = set()
        for _ in range(4):
            response = await server.post(C, prompt="Hello", max_tokens=60)
            texts.add(response.json()["choices"][0]["text"])
        assert len(texts) == 1  # greedy, from the file
        reason = response.json()["choices"][0]["finish_reason"]
        assert reason == "stop" and response.json()["usage"]["completion_tokens"] < 60
        await server.complete("Hello", max_tokens=60)  # ignore_eos ignores all stop tokens
    async with serving(str(directory), engine_options={"generation_config": "vllm"}) as server:
        drawn = set()
        for seed in range(4):
            body = await server.complete("Hello", temperature=None, seed=seed, max_tokens=20)
            drawn.add(body["choices"][0]["text"])
        assert len(drawn) == 4


async def test_context_length_error_starts_like_openais(model: str) -> None:
    async with serving(model) as server:
        response = await server.post(C, prompt="Hello", max_tokens=200)
        message = response.json()["error"]["message"]
        assert message.startswith("This model's maximum context length is 128 tokens. However, you requested ")
        response = await server.post(C, prompt="a" * 50_000)
        assert response.json()["error"]["message"].startswith("This model's maximum context length is 128 tokens. ")
        response = await server.post(C, prompt=[5] * 5_000)
        assert response.json()["error"]["message"].startswith(message[: message.index("requested ")])
        mixed = [5] * 5_000 + ["a"]
        response = await server.post(C, prompt=mixed)
        assert response.json()["error"]["code"] == "context_length_exceeded"  # before its items are walked
        response = await server.post(C, prompt=mixed, truncate_prompt_tokens=4)
        assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_type", "prompt")
