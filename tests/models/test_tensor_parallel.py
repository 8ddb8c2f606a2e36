"""Ranks that share a model give its logits, have equal parts of its memory, and refuse what cannot be shared."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import ParameterError
from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.groups import GroupForm, Groups
from octavo.models.config import find_format, spec_from_config
from octavo.models.linear import TensorParallel
from octavo.models.linear_methods import PackedMethod, find_linear_method
from octavo.models.loading.gguf import read_gguf
from octavo.models.loading.loader import dummy_model, empty_model
from octavo.models.loading.quantised import read_quantised
from octavo.models.loading.safetensors import read_safetensors
from octavo.models.registry import find_family
from octavo.models.spec import ModelSpec
from octavo.models.spec.ranks import check_tensor_parallel
from tests.models.quantization.writers import VARIANTS, quantise
from tests.models.ranks import Ranks, ThreadSums
from tests.models.test_kept_weights import DEQUANTISED, KeepingOps
from tests.models.tiny import (
    PagedRun,
    SmallBatchPath,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    num_bytes,
    random_prompts,
    read_spec,
    transformers_logits,
    write_tiny_gguf,
)

PROMPTS = random_prompts(1, 9, 23, 17)

# On four ranks, two or one K/V heads are shared. A vocabulary of 97 is padded; the last rank has less.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 128}),
    "mistral": ("mistral", {"num_attention_heads": 4}),
    "qwen2": ("qwen2", {"num_attention_heads": 8, "hidden_size": 64}),
    "qwen3": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "gemma3": ("gemma3", {}),
    "gemma4": ("gemma4", {}),
    "gpt2": ("gpt2", {"n_head": 4, "n_inner": 40}),
    "gpt2 untied": ("gpt2", {"n_head": 4, "n_inner": 40, "tie_word_embeddings": False}),
    "opt": ("opt", {"num_attention_heads": 4, "ffn_dim": 40}),
    "opt projections": (
        "opt",
        {"num_attention_heads": 4, "ffn_dim": 40, "do_layer_norm_before": False, "word_embed_proj_dim": 22},
    ),
    "phi3": ("phi3", {"num_attention_heads": 4, "hidden_size": 64}),
    "olmo2": ("olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "olmo2 one K/V head": ("olmo2", {"num_attention_heads": 4, "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"attention_bias": True}),
    "starcoder2": ("starcoder2", {"num_attention_heads": 4}),
    "internlm2": ("internlm2", {"num_attention_heads": 8, "attention_bias": True, "hidden_size": 64}),
    "internlm3": ("internlm3", {"num_attention_heads": 4, "hidden_size": 48, "attention_bias": True, "mlp_bias": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {"num_attention_heads": 4}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_5": ("qwen3_5", {"linear_num_value_heads": 8, "attention_bias": True}),
    "qwen3_next": ("qwen3_next", {"linear_num_value_heads": 8}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Tensor]]]:
    """The directory and Transformers' logits of each case, created at first use."""

    class Models(dict[str, tuple[Path, list[Tensor]]]):
        def __missing__(self, case: str) -> tuple[Path, list[Tensor]]:
            kind, sizes = CASES[case]
            sizes = ({} if kind in ("gpt2", "opt") else {"intermediate_size": 40}) | sizes
            directory = make_tiny_checkpoint(kind, tmp_path_factory.mktemp("model"), **sizes)
            self[case] = directory, transformers_logits(directory, PROMPTS)
            return self[case]

    return Models()


def run_ranks(
    path: Path, size: int, chunk: int = 7, *, fuses_sums: bool = False, sends: bool = False, **options: Any
) -> list[list[Tensor]]:
    """The logits of each prompt, of each rank."""

    def run(tp: TensorParallel) -> list[Tensor]:
        return PagedRun(load_tiny(path, tp=tp, **options), PROMPTS, block_size=8, tp_size=size).run(chunk)

    ranks = Ranks(size, fuses_sums=fuses_sums, sends=sends)
    results = ranks.run(run)
    assert all((sums.num_sent > 0) == (sends and read_spec(path).has_norms_before_only) for sums in ranks.sums)
    return results


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_give_the_same_logits(models: Any, case: str, size: int) -> None:
    directory, expected = models[case]
    results = run_ranks(directory, size, ops=cpu if size == 2 else reference)
    for result in results:
        for actual, wanted, first in zip(result, expected, results[0], strict=True):
            assert_close(actual, wanted)
            assert torch.equal(actual, first)  # each rank samples by itself


@pytest.mark.parametrize("case", ["llama", "phi3", "gemma3"])
def test_small_batches_of_ranks_have_a_path_where_sums_are_added_to_the_residual(models: Any, case: str) -> None:
    directory, expected = models[case]
    ops = SmallBatchPath()
    assert load_tiny(directory, ops, tp=TensorParallel(0, 2)).max_small_batch_tokens == 0
    for result in run_ranks(directory, 2, fuses_sums=True, ops=ops):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_norms_sum_the_parts_of_ranks(models: Any, case: str, sends: bool) -> None:
    """Also those of halves of a batch, sent while the other half is computed."""
    directory, expected = models[case]
    for result in run_ranks(directory, 2, fuses_sums=True, sends=sends, ops=reference):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("rows", [[], [3], [8, 25]], ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "qwen3_next", "gemma4"])
def test_ranks_return_the_logits_of_some_rows(models: Any, case: str, rows: list[int], sends: bool) -> None:
    """Of a step with all tokens of the prompts; also of none, after a chunk that is not a prompt's last."""
    directory, expected = models[case]
    wanted = torch.cat(expected)[rows]

    def run(tp: TensorParallel) -> Tensor:
        model, found = load_tiny(directory, reference, tp=tp), []
        forward = model.forward

        def some_rows(token_ids: Tensor, batch: Any, kv: Tensor, _: Tensor) -> Tensor:
            found.append(forward(token_ids, batch, kv, torch.tensor(rows, dtype=torch.int64)))
            return torch.zeros(len(token_ids), 1)

        model.forward = some_rows
        PagedRun(model, PROMPTS, block_size=8, tp_size=2).step([len(prompt) for prompt in PROMPTS])
        return found[0]

    for result in Ranks(2, fuses_sums=True, sends=sends).run(run):
        assert result.shape == wanted.shape
        if rows:
            assert_close(result, wanted)


@pytest.mark.parametrize(
    ("case", "sums"), [("llama", True), ("qwen3_moe", True), ("qwen3_next", True), ("gemma3", False), ("olmo2", False)]
)
def test_layers_with_norms_before_their_parts_alone_leave_sums_to_norms(models: Any, case: str, sums: bool) -> None:
    tp = TensorParallel(0, 2, all_reduce=lambda x: x)
    assert not load_tiny(models[case][0], reference, tp=tp).tp.sums_in_norms
    tp = dataclasses.replace(tp, sums=ThreadSums(lambda x: x))
    assert load_tiny(models[case][0], reference, tp=tp).tp.sums_in_norms is sums


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_has_its_part_of_the_memory(models: Any, case: str, size: int) -> None:
    spec = read_spec(models[case][0])
    own = spec.of_rank(size)
    for dtype in (torch.float32, torch.bfloat16):
        model = empty_model(
            spec, ops=reference, dtype=dtype, device="meta", tp=TensorParallel(0, size), max_len=1
        )  # rank 0 has all biases
        assert own.weight_bytes(dtype.itemsize) == num_bytes(model)
    kv, whole = (KVCacheSpec.of(each, 8, "float32") for each in (own, spec))
    heads = {2: {1: 1, 2: 1, 4: 2}, 4: {1: 1, 2: 1, 4: 1}}[size][spec.num_kv_heads]
    assert kv.num_kv_heads == heads == TensorParallel(0, size).kv_heads(spec.num_kv_heads)
    if kv.full is None:
        assert kv.bytes_per_block * spec.num_kv_heads == whole.bytes_per_block * heads
    else:  # three layers with windows, and two without, whose only head all ranks have
        assert kv.bytes_per_block == 8 * 2 * 4 * (3 * heads * 24 + 2 * 32)


def test_recurrent_layers_are_split_by_heads(models: Any) -> None:
    """States: 3 inputs of the channels of Q, K and V, and a matrix [12, 10] for each head of V; 3 layers."""
    spec = read_spec(models["qwen3_5"][0])
    sizes = [3 * (3 * (2 * keys * 12 + values * 10) + values * 120) for keys, values in ((2, 8), (1, 4), (1, 2))]
    assert [spec.of_rank(size).state_size for size in (1, 2, 4)] == sizes


def llama(**sizes: int) -> ModelSpec:
    """Llama 3.1 8B, or with other sizes."""
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            **sizes,
        }
    )


def test_a_rank_of_a_large_model_has_one_part_of_its_bytes() -> None:
    spec = llama()
    norms = 65 * 4096
    for size in (2, 4, 8):
        assert spec.of_rank(size).num_params - norms == (spec.num_params - norms) // size
    shared = spec.of_rank(16).num_params - norms - (spec.num_params - norms) // 16
    assert shared == 32 * 2 * 64 * 4096  # half of each rank's K and V, in 32 layers


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({"num_attention_heads": 28, "num_key_value_heads": 4}, 8, "28 attention heads; choose a divisor: 1, 2, 4"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, 4, "6 K/V heads, and is no multiple of them"),
        ({"intermediate_size": 14335}, 2, "14335 columns of the MLP; choose a divisor: 1$"),
        ({"vocab_size": 20}, 4, "leaves a rank without any of the model's 20 tokens; choose a divisor: 1, 2$"),
    ],
)
def test_what_ranks_cannot_share_is_refused(sizes: dict[str, int], size: int, message: str) -> None:
    with pytest.raises(ParameterError, match=f"tensor_parallel_size {size} .*{message}") as error:
        check_tensor_parallel(llama(**sizes), size)
    assert error.value.param == "tensor_parallel_size"


def test_a_size_is_refused_before_weights_are_read(models: Any) -> None:
    with pytest.raises(ParameterError, match="tensor_parallel_size 3 does not divide the model's 4 attention heads"):
        load_tiny(models["llama"][0], tp=TensorParallel(0, 3))


def test_recurrent_heads_are_checked(models: Any) -> None:
    spec: Any = dataclasses.replace(read_spec(models["qwen3_5"][0]), num_heads=8, num_value_heads=6)  # type: ignore[call-arg]
    with pytest.raises(ParameterError, match="tensor_parallel_size 4 does not divide the model's 6 value heads"):
        check_tensor_parallel(spec, 4)


@pytest.mark.parametrize("case", ["llama", "opt", "gpt2 untied", "qwen3_5"])
def test_random_weights_are_equal_where_ranks_have_copies(models: Any, case: str) -> None:
    spec = read_spec(models[case][0])

    def make(tp: TensorParallel) -> Any:
        return dummy_model(spec, dtype=torch.float32, device="cpu", ops=reference, tp=tp)

    def run(tp: TensorParallel) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = make(tp)
        logits = PagedRun(model, PROMPTS, block_size=8, tp_size=2).run(7)
        return {w.name: w.target for w in model.weights() if w.target.shape == w.shape}, logits

    (first, logits), (second, other_logits) = Ranks(2).run(run)
    assert len(second) >= 7
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(logits, other_logits, strict=True))


# -- quantised weights -------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
NESTED = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
CUT = WIDE | {"intermediate_size": 192}  # columns of "down" that groups of 32 divide, also on two ranks
ROUNDED = ["int8", "int4"]
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


class CountingOps(KeepingOps):
    """Keeps the forms that a CPU keeps, or all, and counts what it was given."""

    def __init__(self, *, keeps_all: bool = False) -> None:
        super().__init__()
        self.keeps_all = keeps_all
        self.num_kept = self.kept_bytes = 0

    def keeps_groups(self, form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
        return self.keeps_all or form.is_kept_on("cpu")

    def pack_groups(self, groups: Groups) -> Any:
        self.num_kept += groups.values.numel()
        self.kept_bytes += groups.form.num_bytes(groups.values.numel()) + 4 * groups.form.ordered_in
        return super().pack_groups(groups)


def assert_ranks_keep(path: Path, size: int = 2) -> int:
    """Assert that ranks which keep all forms give the logits of one -> the weights that rank 0 keeps."""
    whole = CountingOps(keeps_all=True)
    expected = PagedRun(load_tiny(path, whole, linear_method=PackedMethod), PROMPTS, block_size=8).run(7)  # type: ignore[arg-type]
    counts = [CountingOps(keeps_all=True) for _ in range(size)]

    def run(tp: TensorParallel) -> list[Tensor]:
        model = load_tiny(path, counts[tp.rank], tp=tp, linear_method=PackedMethod)  # type: ignore[arg-type]
        return PagedRun(model, PROMPTS, block_size=8, tp_size=size).run(7)

    for result in Ranks(size).run(run):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted, 5e-5)
    return counts[0].num_kept


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_of_quantised_models(name: str, tmp_path: Path) -> None:
    """Their parts of the weights are the same numbers, dequantised or kept. No group's end is a rank's end."""
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS[name].sizes | {"intermediate_size": 96})
    quantise(directory, VARIANTS[name])
    expected = PagedRun(load_tiny(directory), PROMPTS, block_size=8).run(7)
    for result in run_ranks(directory, 2):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted)
    assert bool(assert_ranks_keep(directory)) == (name not in DEQUANTISED)


@pytest.mark.parametrize("quantisation", BLOCKS)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ranks_of_gguf_files(kind: str, quantisation: str, tmp_path: Path) -> None:
    """Head and table too. Where a rank's columns are no whole blocks of a K quant, they are dequantised: "out"."""
    sizes = NESTED if quantisation.endswith("K") else WIDE
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **sizes)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    spec = read_spec(path).of_rank(2)
    kept = [linear for role, linear in spec.linears.items() if role != "out" or sizes is WIDE]
    vocabularies = 2 * 56 * spec.hidden_size
    assert assert_ranks_keep(path) == spec.num_layers * sum(math.prod(each.shape) for each in kept) + vocabularies


@pytest.mark.parametrize(("size", "num_values"), [(2, 6), (4, 8), (4, 12)])
def test_ranks_of_heads_in_tiled_order(size: int, num_values: int, tmp_path: Path) -> None:
    """Neighbouring heads of V belong to different key heads, and a rank's first one to any."""
    sizes = {"intermediate_size": 40, "linear_num_value_heads": num_values}
    directory = make_tiny_checkpoint("qwen3_5", tmp_path / "model", **sizes)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    expected = transformers_logits(directory, PROMPTS)
    for result in run_ranks(path, size):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted)
    model = empty_model(
        read_spec(path), ops=reference, dtype=torch.float32, device="meta", tp=TensorParallel(0, size), max_len=1
    )
    assert read_spec(path).of_rank(size).weight_bytes(4) == num_bytes(model)


@pytest.mark.parametrize(
    ("form", "num_in", "group_size"),
    [
        (GroupForm(4, 128), 14336 // 4, 128),
        (GroupForm(4, 128), 18944 // 8, 64),
        (GroupForm(8, 14336, is_float=True), 14336 // 4, 14336 // 4),  # a row has one scale
        (GroupForm(8, 128, is_float=True), 18944 // 8, None),  # no product has smaller groups of floats
        (GroupForm(6, 16, is_nested=True), 11008 // 2, None),
        (GroupForm(6, 16, is_nested=True), 14336 // 2, 16),
    ],
)
def test_groups_are_cut_where_products_have_the_smaller_ones(
    form: GroupForm, num_in: int, group_size: int | None
) -> None:
    assert form.of_columns(num_in) == (None if group_size is None else dataclasses.replace(form, group_size=group_size))


@pytest.mark.parametrize("name", [*VARIANTS, *BLOCKS, "F32"])
def test_columns_are_read_alone(name: str, tmp_path: Path) -> None:
    """The same numbers as those of whole rows, wherever a rank's columns begin."""
    sizes = NESTED if name.endswith("K") else CUT
    path = make_tiny_checkpoint("llama", tmp_path / "model", **sizes)
    if name in VARIANTS:
        quantise(path, VARIANTS[name])
    else:
        path = write_tiny_gguf(path, tmp_path / "m.gguf", quantisation=name)
    spec, checkpoint = read_spec(path), open_checkpoint(path)
    stored = read_gguf(checkpoint, spec) if name not in VARIANTS else read_safetensors(checkpoint, spec)
    if (quantised := find_format(checkpoint.config)) is not None:
        assert not list(read_quantised(stored, quantised, find_family(spec.architecture)))
    down = stored["model.layers.1.mlp.down_proj.weight"]
    num_in = down.shape[1]
    for columns in (range(num_in // 2), range(num_in // 2, num_in), range(7, 43), range(num_in - 3, num_in)):
        for rows in (slice(3, 21), [9, 4, 5]):
            assert torch.equal(down.read(rows, columns), down.read(rows)[:, columns.start : columns.stop])
    if down.groups is not None:
        form = down.groups.form
        unit = 256 if name.endswith("K") else form.ordered_in or form.group_size
        part = down.groups.read(slice(3, 21), range(num_in - unit, num_in))
        assert part.shape == (18, unit)
        assert torch.equal(part.dequantised(), down.groups.read(slice(3, 21)).dequantised()[:, num_in - unit :])


@pytest.mark.parametrize(
    "quantisation",
    [*BLOCKS, "awq g32", "ct int4 group", "ct int8 row", "fp8 blocks", "gptq 4, order", "ct int4 order", *ROUNDED],
)
def test_bytes_of_a_ranks_quantised_weights(quantisation: str, tmp_path: Path) -> None:
    sizes = NESTED if quantisation.endswith("K") else CUT
    path = make_tiny_checkpoint("llama", tmp_path / "model", **sizes | {"vocab_size": 128})
    rounding = quantisation if quantisation in ROUNDED else None
    if quantisation in VARIANTS:
        quantise(path, VARIANTS[quantisation])
    elif rounding is None:
        path = write_tiny_gguf(path, tmp_path / "m.gguf", quantisation=quantisation)
    for size in (1, 2):
        ops = CountingOps()
        tp = TensorParallel(0, size)
        method = find_linear_method(rounding, "cpu")
        model = load_tiny(path, ops, torch.bfloat16, linear_method=method, tp=tp)  # type: ignore[arg-type]
        expected = num_bytes(model) - 2 * ops.num_kept + ops.kept_bytes
        assert read_spec(path).of_rank(size).weight_bytes(2, rounding) == expected
        assert bool(ops.num_kept) == (quantisation != "fp8 blocks")


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("quantisation", ["Q4_0", "Q6_K", "int8", "int4", None])
def test_ranks_on_the_cpus_products(quantisation: str | None, tmp_path: Path) -> None:
    """The CPU's operations in bfloat16, packed heads and tables too: no further from exact logits than one rank."""
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **NESTED)
    path = directory
    if quantisation is not None and quantisation.startswith("Q"):
        path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    method = find_linear_method(quantisation if path is directory else None, "cpu")
    options: dict[str, Any] = {"ops": cpu, "dtype": torch.bfloat16, "linear_method": method}
    models = load_tiny(path), load_tiny(path, **options)
    exact, alone = (torch.cat(PagedRun(model, PROMPTS, block_size=8).run(7)) for model in models)
    results = [torch.cat(result) for result in run_ranks(path, 2, **options)]
    assert torch.equal(*results)
    assert (results[0] - exact).norm() < 1.2 * (alone - exact).norm() < 0.5 * exact.norm()
