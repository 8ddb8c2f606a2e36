"""The fixture that writes GGUF files with a tokenizer in them."""

from __future__ import annotations

from tests.text.conftest import write_gguf

__all__ = ["write_gguf"]
