"""Octavo serves large language models from a paged KV cache.

Public names are imported on first use: `import octavo` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineArgs
    from octavo.engine.arg_utils import AsyncEngineArgs
    from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.errors import (
        ContextLengthError,
        EngineError,
        MemoryBudgetError,
        ModelError,
        ModelNotFoundError,
        OctavoError,
        ParameterError,
        PromptError,
        RequestFailedError,
        UsageError,
    )
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.async_llm import AsyncLLM as AsyncLLMEngine
    from octavo.frontend.llm import LLM
    from octavo.inputs import PromptType, TextPrompt, TokensPrompt
    from octavo.params.beam_search_params import BeamSearchParams
    from octavo.params.sampling_params import RequestOutputKind, SamplingParams
    from octavo.params.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ContextLengthError",
    "EngineArgs",
    "EngineError",
    "Logprob",
    "MemoryBudgetError",
    "ModelError",
    "ModelNotFoundError",
    "OctavoError",
    "ParameterError",
    "PromptError",
    "PromptType",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UsageError",
    "__version__",
]

_MODULES = {
    "LLM": "octavo.frontend.llm",
    "AsyncLLM": "octavo.frontend.async_llm",
    "BeamSearchParams": "octavo.params.beam_search_params",
    "SamplingParams": "octavo.params.sampling_params",
    "StructuredOutputsParams": "octavo.params.structured_outputs",
    "RequestOutput": "octavo.engine.outputs",
    "RequestOutputKind": "octavo.params.sampling_params",
    "CompletionOutput": "octavo.engine.outputs",
    "Logprob": "octavo.engine.outputs",
    "EngineArgs": "octavo.config",
    "AsyncEngineArgs": "octavo.engine.arg_utils",
    "PromptType": "octavo.inputs",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
}
_RENAMED = {"AsyncLLMEngine": "AsyncLLM"}


def __getattr__(name: str) -> Any:
    name = _RENAMED.get(name, name)
    module = _MODULES.get(name, "octavo.errors" if name in __all__ else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
