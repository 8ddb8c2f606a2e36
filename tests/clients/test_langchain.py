"""LangChain's ChatOpenAI, unchanged, against the server."""

from __future__ import annotations

from typing import Any

import pytest

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed; `make clients` runs this"
)
pytestmark = pytest.mark.slow


def test_a_chat(server: str) -> None:
    model: Any = langchain_openai.ChatOpenAI(base_url=f"{server}/v1", api_key="key", model="tiny", temperature=0)
    model = model.bind(max_completion_tokens=8, extra_body={"ignore_eos": True})
    answer = model.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] == 8 and answer.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in model.stream("Hello")) == answer.content
