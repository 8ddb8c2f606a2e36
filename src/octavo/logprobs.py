"""Log-probabilities of tokens, under the name of vLLM's module."""

from octavo.engine.outputs import Logprob

__all__ = ["Logprob"]
