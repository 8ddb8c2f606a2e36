"""Prompts, under the name of vLLM's module."""

from __future__ import annotations

from typing import TypedDict

from octavo.frontend.input_processor import Prompt as PromptType


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
