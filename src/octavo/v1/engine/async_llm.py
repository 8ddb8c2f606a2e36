"""The engine on a thread, under the name of vLLM's module."""

from octavo.frontend.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
