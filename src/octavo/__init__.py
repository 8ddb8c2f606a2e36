"""Octavo serves large language models from paged key/value memory.

The public names are loaded when they are first used: importing octavo loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.frontend.async_llm import AsyncEngine
    from octavo.frontend.llm import LLM
    from octavo.params.beam_search_params import BeamSearchParams
    from octavo.params.sampling_params import RequestOutputKind, SamplingParams
    from octavo.params.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOME = {
    "LLM": "octavo.frontend.llm",
    "AsyncEngine": "octavo.frontend.async_llm",
    "BeamSearchParams": "octavo.params.beam_search_params",
    "SamplingParams": "octavo.params.sampling_params",
    "StructuredOutputsParams": "octavo.params.structured_outputs",
    "RequestOutput": "octavo.engine.outputs",
    "RequestOutputKind": "octavo.params.sampling_params",
    "CompletionOutput": "octavo.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
