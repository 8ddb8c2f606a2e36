"""The fixtures of tests/text, for checkpoints with a tokenizer in them."""

from __future__ import annotations

from tests.text.conftest import byte_level_json, model_dir, write_gguf

__all__ = ["byte_level_json", "model_dir", "write_gguf"]
