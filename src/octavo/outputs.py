"""Outputs of requests, under the name of vLLM's module."""

from octavo.engine.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "RequestOutput"]
