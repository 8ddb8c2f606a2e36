"""Parameters of requests, under the name of vLLM's module."""

from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.params.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
