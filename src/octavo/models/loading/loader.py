"""From a checkpoint's files into a model's tensors, each number read once and copied once.

A model lists the weights that it wants, a source (safetensors or GGUF) the tensors that the files hold; the two
lists are compared before a byte of either is touched. Then the rows are copied in pieces, by a few threads, from the
mapped file straight to where they are computed with: a model needs its own memory, plus a piece a thread. A matrix that
is computed with in another layout is packed as soon as it is filled, so that there are never two of them but one.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.checkpoint.resolve import Checkpoint, join_problems
from octavo.checkpoint.safetensors_header import check_headers
from octavo.errors import CheckpointError, cut
from octavo.models.config import DecoderSpec, GPTSpec, ModelSpec
from octavo.models.decoder import Decoder
from octavo.models.gpt import GPT
from octavo.models.linear import SINGLE_RANK, PackableWeight, TensorParallel, Weight

PIECE_ELEMENTS = 1 << 20  # 4 MB of float32: small enough for the caches, large enough to hide the calls
MAX_THREADS = 4  # copying saturates memory long before it runs out of cores


Model = Decoder | GPT
Finish = Callable[[PackableWeight], None]


def empty_model(
    spec: ModelSpec,
    *,
    ops: ModuleType,
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel = SINGLE_RANK,
    max_len: int | None = None,
) -> Model:
    """The model that `spec` describes, its weights yet to be filled; on "meta", what it would take."""
    if isinstance(spec, GPTSpec):
        return GPT(spec, ops=ops, dtype=dtype, device=device, tp=tp, max_len=max_len)
    assert isinstance(spec, DecoderSpec)
    return Decoder(spec, ops=ops, dtype=dtype, device=device, tp=tp, max_len=max_len)


def load_decoder(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: ModuleType,
    tp: TensorParallel = SINGLE_RANK,
    max_len: int | None = None,
    finish: Finish | None = None,
) -> Model:
    """The decoder that `spec` describes, filled with the checkpoint's weights converted to `dtype`.

    max_len limits the rotary table to the positions that will be used; `finish` gets every matrix as soon as it is
    filled, one by one, so that what it makes of them never stands beside all of them. Raises `CheckpointError`, whose
    one line lists up to ten problems: tensors missing, unexpected, of the wrong shape or dtype, damaged, or holding NaN
    or infinity.
    """
    stored = _read_gguf(checkpoint, spec) if checkpoint.format == "gguf" else _read_safetensors(checkpoint, spec)
    # First the whole model on the meta device: what does not match must not cost the memory of one.
    plan = empty_model(spec, ops=ops, dtype=dtype, device="meta", max_len=1)
    _report(checkpoint, dict.fromkeys(_mismatches(list(plan.weights()), stored)))  # a name's problem is said once
    decoder = empty_model(spec, ops=ops, dtype=dtype, device=device, tp=tp, max_len=max_len)
    _report(checkpoint, _fill(decoder, stored, finish))
    return decoder


def dummy_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: ModuleType,
    max_len: int | None = None,
    finish: Finish | None = None,
) -> Model:
    """The model that `spec` describes with random weights: as fast as with any other ones."""
    model = empty_model(spec, ops=ops, dtype=dtype, device=device, max_len=max_len)
    generator = torch.Generator(device).manual_seed(0)
    for matrix, weights in _by_matrix(model):
        for weight in weights:
            if len(weight.shape) == 1 and not weight.name.endswith("bias"):
                weight.tensor.fill_(1.0)  # of a norm
            else:
                weight.tensor.normal_(0.0, 0.02, generator=generator)
        weights.clear()
        if matrix is not None and finish is not None:
            finish(matrix)
    return model


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, under the name that Transformers gives it.

    dtype       as the format names it
    is_decoded  whether `read` knows that dtype
    read        (first, last) -> rows [first, last) in any float dtype; may be a view into the mapped file
    """

    shape: tuple[int, ...]
    dtype: str
    is_decoded: bool
    read: Callable[[int, int], Tensor]
    file: str


# -- safetensors ------------------------------------------------------------------------------------------------------

FLOAT_DTYPES = ("F32", "F16", "BF16")


# Names that older checkpoints, or those of models that also see, give to what is called otherwise today.
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "Gemma3ForConditionalGeneration": (
        (r"language_model\.(model|lm_head)\.", r"\1."),
        (r"model\.language_model\.", "model."),
    ),
    "GPT2LMHeadModel": ((r"(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    "OPTForCausalLM": ((r"decoder\.", "model.decoder."),),
}


def _read_safetensors(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Stored]:
    renamed = RENAMED.get(spec.architecture, ())
    unit_offset = isinstance(spec, DecoderSpec) and spec.unit_offset_norms
    stored: dict[str, Stored] = {}
    problems = []
    check_headers(checkpoint)
    for path in checkpoint.shards:
        try:
            shard: Any = safe_open(path, framework="pt", device="cpu")  # maps the file; checks header and length
        except (SafetensorError, OSError) as e:
            problems.append(f"{cut(path.name)} is cut short or damaged ({cut(e) or type(e).__name__})")
            continue
        for key in list(shard.keys()):
            name = next((re.sub(old, new, key) for old, new in renamed if re.match(old, key)), key)
            piece = shard.get_slice(key)
            if name in stored:
                problems.append(_two_of(name))  # under an old name and a new one
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            read = _rows_of(shard, key, unit_offset and name.endswith("norm.weight"))
            stored[name] = Stored(shape, dtype, dtype in FLOAT_DTYPES, read, path.name)
    _report(checkpoint, problems)
    return stored


def _two_of(name: str) -> str:
    return f"the files hold two tensors that are {cut(name)}"


def _rows_of(shard: Any, key: str, plus_one: bool) -> Callable[[int, int], Tensor]:
    def read(first: int, last: int) -> Tensor:
        rows: Tensor = shard.get_tensor(key)[first:last]  # get_tensor gives a view of the mapping
        return rows.float() + 1 if plus_one else rows

    return read


# -- GGUF -------------------------------------------------------------------------------------------------------------

# llama.cpp's names and Transformers', of whole tensors and of the parts of layer N ("blk.N.", "model.layers.N.").
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_POST_NORM_NAMES = GGUF_LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _canonical_name(name: str, layer_names: dict[str, str]) -> str:
    """A GGUF tensor's name in Transformers' words; unknown names as they are."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{layer_names.get(part, part)}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{GGUF_NAMES[stem]}.{kind}" if stem in GGUF_NAMES else name


def _read_gguf(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Stored]:
    reader = checkpoint.gguf
    layer_names = GGUF_POST_NORM_NAMES if isinstance(spec, DecoderSpec) and spec.post_norms else GGUF_LAYER_NAMES
    permuted = {}  # which tensors' rows are, and how many heads they are of
    if reader.value("general.architecture") == "llama":
        permuted = {".attn_q.": spec.num_heads, ".attn_k.": spec.num_kv_heads}
    stored: dict[str, Stored] = {}
    problems = []
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF names the fastest dimension first
        heads = next((count for part, count in permuted.items() if part in tensor.name), None)
        order = None if heads is None else _half_rotation_rows(shape[0], heads)
        read = _dequantised_rows(tensor, shape, order)
        kind = tensor.tensor_type
        name = _canonical_name(tensor.name, layer_names)
        if name in stored:
            problems.append(_two_of(name))
        stored[name] = Stored(shape, kind.name, _is_decoded(kind), read, checkpoint.path.name)
    _report(checkpoint, problems)
    return stored


@cache
def _is_decoded(kind: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _half_rotation_rows(num_rows: int, num_heads: int) -> np.ndarray | None:
    """Where each row of a Q or K projection lies in a GGUF file of architecture "llama".

    llama.cpp turns neighbouring pairs of a head, Transformers pairs half a head apart; for the former's sake the rows
    are stored interleaved:      in the file   0 3 1 4 2 5      we want   0 1 2 3 4 5     (head_dim 6)
    """
    if num_rows % (2 * num_heads):
        return None  # not these heads' rows: the shape is going to be refused
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _dequantised_rows(
    tensor: gguf.ReaderTensor, shape: tuple[int, ...], order: np.ndarray | None
) -> Callable[[int, int], Tensor]:
    def read(first: int, last: int) -> Tensor:
        # Rows are whole numbers of quantisation blocks, so they can be taken apart and reordered before decoding.
        rows = np.asarray(tensor.data[first:last] if order is None else tensor.data[order[first:last]])
        # As one long row: gguf decodes sixteen rows at a time, and its Python costs more than its arithmetic.
        values = gguf.quants.dequantize(rows.reshape(1, -1), tensor.tensor_type)
        return torch.from_numpy(np.require(values, requirements="W").reshape(last - first, *shape[1:]))

    return read


# -- comparing and filling --------------------------------------------------------------------------------------------


def _mismatches(weights: list[Weight], stored: dict[str, Stored]) -> Iterator[str]:
    """What the model wants and the files do not hold, and the other way round.

    A tensor without a place is a problem, too: a bias that config.json does not mention would be dropped in silence,
    and every answer be wrong.
    """
    for weight in weights:
        found = stored.get(weight.name)
        if found is None:
            yield f"{weight.name} is missing"
        elif found.shape != weight.shape:
            yield f"{weight.name} has shape {cut(list(found.shape))}, expected {list(weight.shape)}"
        elif not found.is_decoded:
            yield f"{weight.name} has dtype {found.dtype}, expected {', '.join(FLOAT_DTYPES)} or a type of GGUF's"
    known = {weight.name for weight in weights}
    for name in sorted(stored.keys() - known):
        if not _is_redundant(name):
            yield f"{cut(name)} is unexpected: the configuration has no place for it"


def _is_redundant(name: str) -> bool:
    """The second copy of a tied embedding (an untied model wants its head), tables and masks that follow from the
    config, and what a model sees with: only text is served."""
    return (
        name in ("lm_head.weight", "rope_freqs.weight")
        or name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
        or name.startswith(("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_"))
    )


def _fill(model: Model, stored: dict[str, Stored], finish: Finish | None) -> Iterator[str]:
    """Copy every weight, in pieces, by several threads; gives a problem for each weight that cannot be used."""
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    problems: dict[str, None] = {}  # one line a weight, not one a piece
    ahead: deque[tuple[PackableWeight | None, list[Future[str | None]]]] = deque()

    def settle() -> None:
        matrix, pieces = ahead.popleft()
        problems.update(dict.fromkeys(problem for piece in pieces if (problem := piece.result())))
        if matrix is not None and finish is not None:
            pieces.clear()
            finish(matrix)

    with ThreadPoolExecutor(num_threads) as threads:
        for matrix, weights in _by_matrix(model):
            jobs = [job for weight in weights for job in _jobs(weight, stored[weight.name])]
            ahead.append((matrix, [threads.submit(_copy_rows, *job) for job in jobs]))
            jobs.clear()
            weights.clear()
            if len(ahead) > num_threads:
                settle()
        while ahead:
            settle()
    yield from problems


def _by_matrix(model: Model) -> Iterator[tuple[PackableWeight | None, list[Weight]]]:
    """The model's weights in groups, each of those that lie in one matrix; None for all that are in none.

    A matrix's weights are views into it, so its memory is free only when they are forgotten: the list is the caller's.
    """
    matrix_at = {matrix.weight.untyped_storage().data_ptr(): matrix for matrix in model.matrices()}
    groups: dict[PackableWeight | None, list[Weight]] = {None: []}
    for weight in model.weights():
        groups.setdefault(matrix_at.get(weight.tensor.untyped_storage().data_ptr()), []).append(weight)
    for matrix in list(groups):
        yield matrix, groups.pop(matrix)


def _jobs(weight: Weight, stored: Stored) -> Iterator[tuple[Weight, Stored, int, int]]:
    num_rows = weight.tensor.shape[0]
    piece = max(1, PIECE_ELEMENTS // math.prod(weight.shape[1:]))
    for first in range(0, num_rows, piece):
        yield weight, stored, first, min(first + piece, num_rows)


def _copy_rows(weight: Weight, stored: Stored, first: int, last: int) -> str | None:
    """Rows [first, last) of the weight's tensor."""
    target = weight.tensor[first:last]
    rows = stored.read(weight.start[0] + first, weight.start[0] + last)
    for dim in range(1, rows.ndim):
        rows = rows.narrow(dim, weight.start[dim], target.shape[dim])
    target.copy_(rows)
    # A sum is one cheap pass, and not finite if any element is not; only then is it worth looking at each.
    if not target.sum(dtype=torch.float32).isfinite() and not target.isfinite().all():
        return f"{weight.name} holds NaN or infinity (as {str(weight.tensor.dtype).removeprefix('torch.')})"
    return None


def _report(checkpoint: Checkpoint, problems: Iterable[str]) -> None:
    """Raise one `CheckpointError` for all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {join_problems(problems)}; fetch the model again")
