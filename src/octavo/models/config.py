"""Reads a checkpoint's config.json, or the metadata of its GGUF file, into a `ModelSpec`. Imports no torch.

A family in `families` reads what is special in its models.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from octavo.checkpoint.keys import KeyUse
from octavo.checkpoint.resolve import CUSTOM_CODE_KEYS, Checkpoint
from octavo.checkpoint.safetensors_header import find_tensors, has_equal_bytes
from octavo.errors import UnsupportedModelError, cut
from octavo.kernels.group_form import GGUF_FORMS, GroupForm
from octavo.models import registry
from octavo.models.config_keys import OUTER_KEYS, config_keys
from octavo.models.config_values import (
    Config,
    check_layer_types,
    read_dtype,
    read_eos_token_ids,
    read_flag,
    read_size,
    read_token_id,
    value_error,
)
from octavo.models.quantization.form import KEY, REMEDY, Format
from octavo.models.quantization.formats import read_format
from octavo.models.spec import ModelSpec
from octavo.models.spec.tensors import EXPERT_ROLES


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint. Raises the errors of `spec_from_config`."""
    if checkpoint.format == "gguf":
        from octavo.models.gguf_config import read_gguf_config, stored_kinds  # imports numpy

        spec = spec_from_config(read_gguf_config(checkpoint.gguf, checkpoint.path.name), checkpoint.generation_config)
        kinds, of_vocabulary = stored_kinds(checkpoint.gguf, spec.num_layers)
        forms, vocabulary_forms = (
            tuple((GGUF_FORMS[kind], count) for kind, count in part.items() if kind in GGUF_FORMS)
            for part in (kinds, of_vocabulary)
        )
        names = ", ".join(dict.fromkeys([*kinds, *of_vocabulary]))
        head = next((t.tensor_type.name for t in checkpoint.gguf.tensors if t.name == "output.weight"), "")
        return replace(
            spec,
            quant_method="gguf",
            stored_as=names,
            forms=forms,
            vocabulary_forms=vocabulary_forms,
            head_form=GGUF_FORMS.get(head),
            **registry.find_family(spec.architecture).gguf.traits,
        )
    spec = spec_from_config(checkpoint.config, checkpoint.generation_config)
    if spec.tie_word_embeddings and _has_other_head(checkpoint, spec):
        return replace(spec, tie_word_embeddings=False)
    return spec


def spec_from_config(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """Convert a parsed config.json to a spec; `generation_config` only adds end-of-sequence ids.

    Raises `UnsupportedModelError` for an unsupported architecture or feature, `CheckpointError` for a missing or
    invalid value.
    """
    architecture = _architecture(config)
    family = registry.find_family(architecture)
    outer, config = config, family.rename_keys(_text_part(config))
    form = find_format(outer)
    config_keys(family).check(config, "config.json", "use a checkpoint without it")
    eos_token_ids = read_eos_token_ids(generation_config or {}, outer, config)
    config = {**family.defaults, **config}
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": read_size(config, "vocab_size"),
        "tie_word_embeddings": read_flag(config, "tie_word_embeddings"),
        "eos_token_ids": eos_token_ids or read_eos_token_ids(config),
        "bos_token_id": read_token_id(config, "bos_token_id"),
        "dtype": read_dtype(config),
        "quant_method": None if form is None else _text_part(outer)[KEY]["quant_method"],
        "stored_as": "" if form is None else form.description,
        "kv_scheme": "" if form is None else form.kv_scheme,
    }
    spec = family.read(config, common)
    if form is not None and spec.names.is_conv1d:
        raise UnsupportedModelError(f"quantised weights of {architecture} are not supported; {REMEDY}", param=KEY)
    check_layer_types(config, spec)
    if form is None:
        return spec
    head = None if spec.tie_word_embeddings else form.form(spec.names.head, spec.vocabulary[1])
    head = None if head is None or head.ordered_in else head
    heads = () if head is None else ((head, math.prod(spec.vocabulary)),)
    return replace(spec, forms=tuple(_forms(spec, form)), vocabulary_forms=heads, head_form=head)


def _forms(spec: ModelSpec, form: Format) -> Iterator[tuple[GroupForm, int]]:
    """The forms of a model's linear layers, and the number of weights in each. Layers of a kind are alike."""
    for kind in spec.layer_kinds:
        for role, linear in kind.linears.items():
            for name, num_out in linear.parts:
                found = form.form(spec.names.layer.format(0) + name, linear.in_size)
                if found is not None and not (found.ordered_in and role in EXPERT_ROLES):
                    yield found, kind.num_layers * num_out * linear.in_size


def find_format(config: Config) -> Format | None:
    """How a checkpoint with this config.json is quantised. Raises the errors of `formats.read_format`."""
    return read_format(_text_part(config).get(KEY))


def config_key_uses(config: Config) -> tuple[KeyUse, ...]:
    """What becomes of the keys of a config.json whose spec could be read, for `octavo doctor`."""
    family, form = registry.find_family(_architecture(config)), find_format(config)
    use = config_keys(family).sort(family.rename_keys(_text_part(config)), "config.json")
    return (use,) if form is None else (use, form.keys)


def _has_other_head(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """True if the files hold a head other than the embedding. It is used even if config.json says that both are tied,
    as in some fine-tunes."""
    stored = find_tensors(checkpoint)
    places = {registry.find_family(spec.architecture).tensor_name(name): place for name, place in stored.items()}
    form = find_format(checkpoint.config)
    if form is not None and any(f"{spec.names.head}.{part}" in places for part in form.parts if part != "weight"):
        return f"{spec.names.embedding}.weight" in places  # a quantised head
    head, embedding = (places.get(f"{name}.weight") for name in (spec.names.head, spec.names.embedding))
    return head is not None and embedding is not None and not has_equal_bytes(head, embedding)


def _architecture(config: Config) -> str:
    """A supported name in `architectures`; without any, the one of `model_type`, by which Transformers chooses."""
    names, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(names, list):
        raise value_error("architectures", names, "a list of names")
    if model_type is not None and model_type not in (known := registry.model_types()):
        raise _unsupported(f"model_type {cut(repr(model_type))}", "model_type", str(model_type), known, config)
    known = registry.architectures(model_type)
    if not names and model_type is not None:
        return known[0]
    if (found := next((name for name in names if name in known), None)) is not None:
        return str(found)
    text = ", ".join(map(str, names))
    if any(name in registry.architectures() for name in names):
        raise UnsupportedModelError(
            f"architectures {text} and model_type {model_type!r} are different models; correct one of them",
            param="architectures",
        )
    what = f"architecture {cut(text)}" if text else "a config.json without architectures and model_type"
    raise _unsupported(what, "architectures", text, registry.architectures(), config)


def _unsupported(what: str, param: str, name: str, known: Sequence[str], config: Config) -> UnsupportedModelError:
    """The error for a model of another kind: `name` is none of the known names of `param`."""
    if code := next((key for key in CUSTOM_CODE_KEYS if config.get(key)), None):
        return UnsupportedModelError(
            f"custom code is not supported: config.json has {code!r}; Octavo runs no code of a model directory",
            param=code,
        )
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}? " if near else ""
    return UnsupportedModelError(f"{what} is not supported; {hint}supported: {', '.join(known)}", param=param)


def _text_part(config: Config) -> Config:
    """The keys of the language model. In a multimodal model they are in `text_config`, and only text is served."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    text = {key: value for key, value in text.items() if key != "tie_word_embeddings"}  # of a head that is not used
    ids = {key: config[key] for key in ("eos_token_id", "bos_token_id") if key in config}
    return ids | text | {key: config[key] for key in OUTER_KEYS if key in config}
