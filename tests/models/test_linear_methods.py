"""A linear method is one class: it stores weights in its own way, and runs on both paths of a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models import quantization
from octavo.models.decoder import Decoder
from octavo.models.linear import Slot, TensorParallel
from octavo.models.linear_methods import LinearMethod, PackedMethod, PlainMethod
from tests.models.tiny import PagedRun, assert_close, load_tiny, make_tiny_checkpoint, random_prompts, read_spec

PROMPTS = random_prompts(5, 19, 2)
KINDS = ["llama", "qwen2", "qwen3", "gpt2"]


class BFloat16Pairs(LinearMethod):
    """A float32 weight as the sum of two bfloat16: its rounded value, and what the rounding lost."""

    calls: list[str] = []  # noqa: RUF012 - cleared by each test

    pairs: Tensor  # [2, num_out, num_in]

    def finish(self) -> None:
        high = self.weight.bfloat16()
        self.pairs = torch.stack([high, (self.weight.float() - high.float()).bfloat16()])

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self.calls.append("apply")
        return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        high, low = self.pairs.float()
        return F.linear(x, high, bias) + F.linear(x, low)

    def gather_rows(self, indices: Tensor) -> Tensor:
        return self.pairs[:, indices].float().sum(0)

    def logits(self, x: Tensor) -> Tensor:
        return self._product(x, None)

    @property
    def max_small_batch_tokens(self) -> int:
        return 6


class FusedBFloat16Pairs(BFloat16Pairs):
    """With a fused product of its own: the norm's scale is applied to the finished sums."""

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        self.calls.append("norm_linear")
        y = self._product(residual.weighted, None) * residual.scale(eps)
        y = y if bias is None else y + bias
        return y if not gate else self.ops.silu_mul(y)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_tiny_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def greedy(directory: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(directory), skip_tokenizer_init=True, max_model_len=64, dtype="float32") as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("method", [BFloat16Pairs, FusedBFloat16Pairs])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_a_method_from_one_class_generates_the_same_tokens(
    directories: dict[str, Path], kind: str, method: type[BFloat16Pairs], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(directories[kind])
    entry = quantization.MethodEntry(f"{__name__}:{method.__name__}")
    monkeypatch.setattr(quantization, "METHODS", {None: entry})
    monkeypatch.setattr("octavo.models.linear_methods.METHODS", {None: entry})
    method.calls.clear()
    assert greedy(directories[kind]) == expected
    assert "apply" in method.calls
    # Decode steps of three sequences take the small-batch path, in the models that have one.
    assert ("norm_linear" in method.calls) == (method is FusedBFloat16Pairs and kind != "gpt2")


@pytest.mark.parametrize("method", [BFloat16Pairs, FusedBFloat16Pairs])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_both_paths_give_the_logits_of_plain_weights(
    directories: dict[str, Path], kind: str, ops: Any, method: type[BFloat16Pairs]
) -> None:
    directory = directories[kind]
    expected = PagedRun(load_tiny(directory), PROMPTS, block_size=8).run(999)
    decoder = load_tiny(directory, ops, linear_method=method)
    for chunk in (2, 7):  # at most 6 tokens in a pass, and more
        run = PagedRun(decoder, PROMPTS, block_size=8)
        run.kv = run.kv.float()
        for actual, wanted in zip(run.run(chunk), expected, strict=True):
            assert_close(actual, wanted, 1e-4)


EVEN: dict[str, dict[str, int]] = {"llama": {"intermediate_size": 38}, "gpt2": {"n_head": 2, "n_inner": 38}}


@pytest.mark.parametrize("kind", EVEN)
def test_ranks_load_their_parts_of_an_encoded_weight(kind: str, tmp_path: Path) -> None:
    """Also of GPT-2's transposed, merged tensors. The ranks' parts are those of the plain weight, encoded."""
    directory = make_tiny_checkpoint(kind, tmp_path / kind, **EVEN[kind])
    for rank in range(2):
        tp = TensorParallel(rank, 2, lambda part: part)
        plain = load_tiny(directory, tp=tp)
        pairs = load_tiny(directory, tp=tp, linear_method=BFloat16Pairs)
        num_encoded = 0
        for expected, actual in zip(plain.weights(), pairs.weights(), strict=True):
            assert (actual.name, actual.shape, actual.start) == (expected.name, expected.shape, expected.start)
            if isinstance(actual.place, Slot):
                assert isinstance(actual.place.method, BFloat16Pairs)
                pairs_of = actual.place.method.pairs[:, actual.place.first : actual.place.last].float().sum(0)
                error = ((pairs_of.mT if actual.place.is_transposed else pairs_of) - expected.target).abs().max()
                assert error <= expected.target.abs().max() * 2**-16
                num_encoded += 1
        assert num_encoded > 3 * 4


def test_a_rank_of_several_has_no_fused_sums(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "llama", **EVEN["llama"])
    alone = load_tiny(directory, linear_method=BFloat16Pairs)
    rank = load_tiny(directory, linear_method=BFloat16Pairs, tp=TensorParallel(0, 2, lambda part: part))
    assert isinstance(alone, Decoder) and isinstance(rank, Decoder)
    assert (alone.max_small_batch_tokens, rank.max_small_batch_tokens) == (6, 0)


class SmallBatches:
    """The reference's operations, with the small-batch path for up to 6 tokens."""

    def __getattr__(self, name: str) -> Any:
        return (lambda weight: 6) if name == "max_small_batch_tokens" else getattr(reference, name)


@pytest.mark.parametrize(
    ("kind", "dtype", "method", "expected"),
    [
        ("llama", torch.float32, PlainMethod, 6),
        ("llama", torch.bfloat16, PlainMethod, 6),
        ("llama", torch.float16, PlainMethod, 0),  # the residual stream may overflow
        ("llama", torch.float32, PackedMethod, 6),  # nothing is packed in float32
        ("llama", torch.bfloat16, PackedMethod, 0),
        ("gemma3", torch.float32, PlainMethod, 0),  # norms after attention and MLP
    ],
)
def test_which_models_have_a_small_batch_path(
    kind: str, dtype: torch.dtype, method: type[LinearMethod], expected: int, tmp_path: Path
) -> None:
    directory = make_tiny_checkpoint(kind, tmp_path / kind)
    decoder = load_tiny(directory, SmallBatches(), dtype, linear_method=method)
    assert isinstance(decoder, Decoder) and decoder.max_small_batch_tokens == expected


def test_weight_bytes_follow_the_method(directories: dict[str, Path]) -> None:
    spec = read_spec(directories["llama"])
    matrices = list(spec.linears.values()) * spec.num_layers
    parts = sum(shape.num_out * shape.in_size for shape in matrices), spec.vocab_size * spec.hidden_size
    assert spec.weight_bytes(2) - spec.weight_bytes(2, "int8") == sum(part - 2 * (part // 32) for part in parts)
    assert spec.weight_bytes(4) == 2 * spec.weight_bytes(2) == 4 * spec.num_params


def test_a_packed_weight_with_fused_products_projects_q_k_and_v_itself() -> None:
    method: Any = PackedMethod(8, 8, ops=cpu, dtype=torch.bfloat16, device="cpu")
    method.packed = method.fused = SimpleNamespace(project_qkv=lambda *args, **options: (args, options))
    inputs, norms = tuple(range(6)), {"norm_eps": 1e-6, "q_norm": 7, "k_norm": 8, "kv_scales": None}
    assert method.project_qkv(*inputs, **norms) == (inputs, norms)
