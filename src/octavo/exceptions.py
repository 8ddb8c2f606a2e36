"""Errors of requests, under the name of vLLM's module."""

from octavo.errors import UsageError as VLLMValidationError

__all__ = ["VLLMValidationError"]
