"""Options of engines, under the name of vLLM's module."""

from octavo.config import EngineArgs

AsyncEngineArgs = EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
