"""Descriptions of models, complete apart from the weights: sizes, options, names and shapes of tensors. No torch here.

`config.spec_from_config` reads a `DecoderSpec` from a config.json of the Llama family, a `GPTSpec` for others.
A spec declares each layer's tensors once (`layer_kinds`): models create them from it, and memory plans, the doctor
and the simulator count them.
"""

from octavo.models.spec.decoder import DecoderSpec
from octavo.models.spec.experts import ExpertsSpec
from octavo.models.spec.gemma4 import Gemma4Spec
from octavo.models.spec.gpt import GPTSpec
from octavo.models.spec.groups import LayerGroups, group_layers
from octavo.models.spec.hybrid import HybridSpec
from octavo.models.spec.model import ModelSpec
from octavo.models.spec.tensors import LLAMA_NAMES, LayerKind, LinearShape, NormShape, TensorNames

__all__ = [
    "LLAMA_NAMES",
    "DecoderSpec",
    "ExpertsSpec",
    "GPTSpec",
    "Gemma4Spec",
    "HybridSpec",
    "LayerGroups",
    "LayerKind",
    "LinearShape",
    "ModelSpec",
    "NormShape",
    "TensorNames",
    "group_layers",
]
