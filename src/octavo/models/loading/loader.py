"""Loads a checkpoint's tensors into a model. Each number is read once and copied once.

The model lists its weights, a file format (safetensors or GGUF) its tensors. The two lists are compared before any data
is read. Then a few threads copy chunks of rows from the mapped file into the model's tensors. A linear method allocates
its weight just before it is filled, and is finished as soon as it is: loading needs the model's memory and a few
layers'.
"""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, cast

import torch
from torch import Tensor

from octavo.checkpoint.resolve import Checkpoint
from octavo.errors import cut
from octavo.integers import cdiv
from octavo.kernels.groups import SUPER_SIZE, GroupForm, Groups
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.models.config import find_format
from octavo.models.family import MergedExperts
from octavo.models.linear import SINGLE_RANK, LayerFactory, Slot, TensorParallel, VocabEmbedding, Weight
from octavo.models.linear_methods import LinearMethod, PlainMethod
from octavo.models.loading.experts import split_experts
from octavo.models.loading.gguf import read_gguf
from octavo.models.loading.kv_scales import take_kv_scales
from octavo.models.loading.quantised import read_quantised
from octavo.models.loading.random_weights import SIGMA, fill_randomly
from octavo.models.loading.safetensors import read_safetensors
from octavo.models.loading.stored_tensor import FLOAT_DTYPES, NOT_SERVED, Rows, StoredTensor, raise_problems
from octavo.models.quantization.form import WHOLE, TensorError
from octavo.models.registry import find_family, load
from octavo.models.spec import ModelSpec

CHUNK_ELEMENTS = 1 << 20  # 4 MB of float32: small enough for the caches, large enough to hide the calls
MAX_THREADS = 4  # copying saturates memory long before it runs out of cores


class Model(Protocol):
    """A causal language model over the paged KV cache: `decoder.Decoder`, `gpt.GPT`, or what another spec names.

    stored_kv_scales  those of the checkpoint, as for `set_kv_scales`; None: it has none
    """

    spec: ModelSpec
    vocabulary: VocabEmbedding
    stored_kv_scales: Tensor | None

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        """See `decoder.Decoder.forward`."""
        ...

    def set_kv_scales(self, scales: Tensor) -> None:
        """See `decoder.Decoder.set_kv_scales`."""
        ...

    def weights(self) -> Iterator[Weight]:
        """All tensors of a checkpoint of this model; several weights may be parts of one tensor."""
        ...


def empty_model(
    spec: ModelSpec,
    *,
    ops: ModelOps,
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel = SINGLE_RANK,
    linear_method: Callable[..., LinearMethod] = PlainMethod,
    max_len: int | None = None,
) -> Model:
    """One rank's part of the model of `spec`. Its linear layers have no memory yet; other weights are uninitialised.

    Raises `ParameterError` if so many ranks cannot share the model.
    """
    return cast("Model", load(spec.model)(spec, LayerFactory(ops, dtype, device, tp, linear_method), max_len=max_len))


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: ModelOps,
    tp: TensorParallel = SINGLE_RANK,
    linear_method: Callable[..., LinearMethod] = PlainMethod,
    max_len: int | None = None,
) -> Model:
    """The model of `spec` with the checkpoint's weights, converted to `dtype`; of `tp`'s rank, its part of them.

    linear_method  of all linear layers; a layer's method is finished as soon as its weight is filled, one by one
    max_len        positions of the rotary table

    Raises `CheckpointError`, one line with up to ten problems: tensors that are missing, unexpected, damaged, of the
    wrong shape or dtype, or that contain NaN or infinity.
    """
    stored = read_gguf(checkpoint, spec) if checkpoint.format == "gguf" else read_safetensors(checkpoint, spec)
    family = find_family(spec.architecture)
    stored, problems = split_experts(stored, MergedExperts() if checkpoint.format == "gguf" else family.experts)
    raise_problems(checkpoint, problems)
    if (form := find_format(checkpoint.config)) is not None:
        raise_problems(checkpoint, read_quantised(stored, form, family))
    kv_scales, problems = take_kv_scales(stored, spec)
    raise_problems(checkpoint, problems)
    head, embedding = f"{spec.names.head}.weight", f"{spec.names.embedding}.weight"
    if spec.tie_word_embeddings and embedding not in stored and head in stored:
        stored[embedding] = stored.pop(head)  # one name of the tied tensor is as good as the other
    # The comparison uses a model on "meta": a mismatch must not cost the memory of tables.
    shapes = empty_model(spec, ops=ops, dtype=dtype, device="meta", linear_method=linear_method, max_len=1)
    raise_problems(checkpoint, dict.fromkeys(_mismatches(shapes, stored)))  # each problem once
    model = empty_model(spec, ops=ops, dtype=dtype, device=device, tp=tp, linear_method=linear_method, max_len=max_len)
    raise_problems(checkpoint, _fill(model, stored))
    if kv_scales is not None:
        num_heads = tp.kv_heads(spec.num_kv_heads)
        first = tp.start(spec.num_kv_heads, num_heads)
        model.stored_kv_scales = kv_scales[:, :, first : first + num_heads].contiguous().to(device)
    return model


def dummy_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: ModelOps,
    tp: TensorParallel = SINGLE_RANK,
    linear_method: Callable[..., LinearMethod] = PlainMethod,
    max_len: int | None = None,
    find_form: Callable[[str, int], GroupForm | None] = lambda module, num_in: None,
) -> Model:
    """The model of `spec` with random weights, for benchmarks. Ranks have equal copies of what is not split.

    find_form  that of a checkpoint: see `find_forms`
    """
    model = empty_model(spec, ops=ops, dtype=dtype, device=device, tp=tp, linear_method=linear_method, max_len=max_len)
    generator = torch.Generator(device)
    for method, weights in _weights_by_method(model):
        if method is not None:
            modules = [(weight, weight.name.removesuffix(".weight")) for weight in weights]
            method.allocate([_form_of(weight, find_form(name, weight.shape[1])) for weight, name in modules])
        for weight in weights:
            target = weight.target
            part = 0 if target.shape == weight.shape else 1 + tp.rank
            generator.manual_seed(zlib.crc32(f"{weight.name} {part}".encode()))
            if isinstance(target, Groups):
                fill_randomly(target, generator)
            elif len(weight.shape) == 1 and not weight.name.endswith("bias"):
                target.fill_(1.0)  # a norm
            else:
                target.normal_(0.0, SIGMA, generator=generator)
        if method is not None:
            method.finish()
            _return_freed_memory()
    return model


def find_forms(checkpoint: Checkpoint, spec: ModelSpec) -> Callable[[str, int], GroupForm | None]:
    """(module, its inputs) -> the form of its weight in the files, of which only config.json need be there.

    A function of None: not quantised, or in no form.
    """
    if checkpoint.format == "gguf":
        groups = {name: tensor.groups for name, tensor in read_gguf(checkpoint, spec).items()}
        forms = {name.removesuffix(".weight"): None if one is None else one.form for name, one in groups.items()}
        return lambda module, num_in: forms.get(module)
    form = find_format(checkpoint.config)
    if form is None:
        return lambda module, num_in: None
    return lambda module, num_in: None if module == spec.names.embedding else form.form(module, num_in)


def _return_freed_memory() -> None:
    """glibc keeps what a thread freed for that thread: half as much as the model after loading."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _mismatches(model: Model, stored: dict[str, StoredTensor]) -> Iterator[str]:
    """Problems of a checkpoint: weights that its files lack, and tensors that the model lacks.

    An unexpected tensor is a problem, too: without a bias that config.json does not mention, for example, all outputs
    would be wrong.
    """
    weights = list(model.weights())
    for weight in weights:
        found = stored.get(weight.name)
        if found is None:
            yield f"{weight.name} is missing"
        elif found.shape != weight.shape:
            yield f"{weight.name} has shape {cut(list(found.shape))}, expected {list(weight.shape)}"
        elif not found.is_supported:
            yield f"{weight.name} has dtype {found.dtype}, expected {', '.join(FLOAT_DTYPES)} or a GGUF type"
    known = {weight.name for weight in weights}
    for name in sorted(stored.keys() - known):
        if not _is_redundant(name, model.spec) and not _is_zero_bias(name, stored[name]):
            yield f"{cut(name)} is unexpected: no weight of this configuration has that name"


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """True for a tied embedding's second copy, tables and masks that follow from the config, and vision weights.

    Only text is served. A model that is not tied lists its lm_head, which is then not redundant.
    """
    return (
        name in (f"{spec.names.head}.weight", "rope_freqs.weight")
        or name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
        or name.startswith(NOT_SERVED)
    )


def _is_zero_bias(name: str, stored: StoredTensor) -> bool:
    """True for a bias that changes nothing: AutoGPTQ wrote one for each linear layer."""
    return name.endswith(".bias") and stored.is_supported and not stored.read(WHOLE).any()


def _fill(model: Model, stored: dict[str, StoredTensor]) -> Iterator[str]:
    """Copy all weights in chunks, with several threads; yields a problem for each weight with NaN or infinity."""
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    problems: dict[str, None] = {}  # one for each weight
    pending: deque[tuple[LinearMethod | None, list[Future[str | None]]]] = deque()

    def finish_oldest() -> None:
        method, chunks = pending.popleft()
        problems.update(dict.fromkeys(problem for chunk in chunks if (problem := chunk.result())))
        if method is not None:
            chunks.clear()
            method.finish()
            _return_freed_memory()

    with ThreadPoolExecutor(num_threads) as threads:
        for method, weights in _weights_by_method(model):
            if method is not None:
                groups = [stored[weight.name].groups for weight in weights]
                forms = [None if one is None else one.form for one in groups]
                method.allocate([_form_of(weight, form) for weight, form in zip(weights, forms, strict=True)])
            jobs = [job for weight in weights for job in _copy_jobs(weight, stored[weight.name])]
            pending.append((method, [threads.submit(_copy_rows, *job) for job in jobs]))
            if len(pending) > num_threads:
                finish_oldest()
        while pending:
            finish_oldest()
    yield from problems


def _form_of(weight: Weight, stored: GroupForm | None) -> tuple[int, GroupForm | None]:
    """Rows of a linear layer's weight, and the form in which they are kept. stored: that of the files"""
    slot = cast("Slot", weight.place)
    form = None if slot.is_transposed or stored is None else stored.of_columns(slot.method.weight.shape[1])
    return slot.last - slot.first, form if form is not None and slot.method.keeps(form) else None


def _weights_by_method(model: Model) -> Iterator[tuple[LinearMethod | None, list[Weight]]]:
    """Group the model's weights by the linear method that they fill; None: weights outside of linear layers."""
    groups: dict[LinearMethod | None, list[Weight]] = {None: []}
    for weight in model.weights():
        groups.setdefault(weight.method, []).append(weight)
    yield from groups.items()


def _copy_jobs(weight: Weight, stored: StoredTensor) -> Iterator[tuple[Weight, StoredTensor, int, int]]:
    num_rows = weight.target.shape[0]
    chunk = max(1, CHUNK_ELEMENTS // math.prod(weight.shape[1:]))
    for first in range(0, num_rows, chunk):
        yield weight, stored, first, min(first + chunk, num_rows)


def _copy_rows(weight: Weight, stored: StoredTensor, first: int, last: int) -> str | None:
    """Copy rows [first, last) of the weight's target.

    Returns a problem if they contain NaN or infinity, or if a quantised weight cannot be computed.
    """
    target = weight.target
    chosen = slice(weight.start[0] + first, weight.start[0] + last)
    part: Rows = chosen if weight.order is None else list(weight.order[chosen])
    columns = range(weight.start[1], weight.start[1] + target.shape[1]) if len(weight.shape) > 1 else None
    try:
        if isinstance(target, Groups):
            assert stored.groups is not None and columns is not None
            form, kept = stored.groups.form, target.rows(first, last)
            unit = SUPER_SIZE if form.is_nested else form.group_size
            whole = range(columns.start // unit * unit, cdiv(columns.stop, unit) * unit)  # groups
            groups = stored.groups.read(part, whole).in_groups(target.form.group_size)
            kept.copy_(groups.columns(columns.start - whole.start, columns.stop - whole.start))
            return None if kept.is_finite() else f"{weight.name} contains NaN or infinity"
        rows = stored.read(part, columns)
    except TensorError as problem:
        return str(problem)
    target = target[first:last]
    target.copy_(rows)
    # The sum is not finite if any element is not: one cheap pass. It may also overflow, so then check each element.
    if not target.sum(dtype=torch.float32).isfinite() and not target.isfinite().all():
        return f"{weight.name} contains NaN or infinity (as {str(target.dtype).removeprefix('torch.')})"
    return None
