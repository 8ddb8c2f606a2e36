"""LangChain's ChatOpenAI, unchanged, against the server."""

from __future__ import annotations

from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed; `make clients` runs this"
)
pytestmark = pytest.mark.slow


def test_chat_completion(server: str) -> None:
    model: Any = langchain_openai.ChatOpenAI(base_url=f"{server}/v1", api_key="key", model="tiny", temperature=0)
    model = model.bind(max_completion_tokens=8, extra_body={"ignore_eos": True})
    answer = model.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] == 8 and answer.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in model.stream("Hello")) == answer.content


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("strict", [None, True, False])
def test_structured_output(server: str, method: str, strict: bool | None) -> None:
    """LangChain removes "additionalProperties" from tools; the model must still generate no further properties."""
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", sure=(bool, ...))
    person = pydantic.create_model("Person", kind=(Literal["a", "b"], ...), inner=(inner, ...))
    model: Any = langchain_openai.ChatOpenAI(base_url=f"{server}/v1", api_key="key", model="tiny", max_tokens=300)
    found = model.with_structured_output(person, method=method, strict=strict).invoke("Who is it?")
    assert isinstance(found, person) and found.kind in "ab" and isinstance(found.inner.sure, bool)
