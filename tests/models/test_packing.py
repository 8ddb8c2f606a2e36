"""Models whose matrices are packed while they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import ops as cpu
from octavo.models.linear import VocabEmbedding
from octavo.models.linear_methods import LinearMethod, PackedMethod, PlainMethod, find_linear_method
from octavo.models.loading.loader import MAX_THREADS, Model, dummy_model
from tests.kernels.cpu.backends import use_backend
from tests.models.tiny import (
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    num_bytes,
    random_prompts,
    read_spec,
)

PROMPTS = random_prompts(11, 3, 30)
SIZES: dict[str, dict[str, int]] = {
    "qwen2": {"hidden_size": 96, "num_attention_heads": 4},
    "gpt2": {"n_embd": 96, "n_head": 4},
}
"""Groups of 32 inputs can be rounded."""


@pytest.fixture(scope="module", params=["llama", "qwen2 untied", "gpt2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, *untied = request.param.split()
    folder = tmp_path_factory.mktemp(kind)
    return make_tiny_checkpoint(
        kind, folder, **SIZES.get(kind, {}), **({"tie_word_embeddings": False} if untied else {})
    )


def methods_of(decoder: Model) -> set[LinearMethod]:
    return {weight.method for weight in decoder.weights() if weight.method is not None}


def logits(directory: Path, quantization: str | None, *, pack: bool = True) -> torch.Tensor:
    method = find_linear_method(quantization, "cpu") if pack else PlainMethod
    decoder = load_tiny(directory, cpu, torch.bfloat16, linear_method=method)
    # The table of an untied embedding is read, not multiplied with.
    matrices = methods_of(decoder) - ({decoder.vocabulary.table} - {decoder.vocabulary.head})
    assert all((getattr(matrix, "packed", None) is not None) == pack for matrix in matrices)
    return torch.cat(PagedRun(decoder, PROMPTS, block_size=8).run(7))


def test_packed_models_compute_the_same(directory: Path) -> None:
    assert_close(logits(directory, None), logits(directory, None, pack=False), 0.03)


def test_int8_models_compute_nearly_the_same(directory: Path) -> None:
    exact, rounded = logits(directory, None, pack=False), logits(directory, "int8")
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1


def test_packing_frees_the_plain_matrix(directory: Path) -> None:
    plain = load_tiny(directory, cpu, torch.bfloat16)
    decoder = load_tiny(directory, cpu, torch.bfloat16, linear_method=PackedMethod)
    shapes = [(weight.name, weight.shape) for weight in decoder.weights()]
    assert shapes == [(weight.name, weight.shape) for weight in plain.weights()]
    untied = {decoder.vocabulary.table} - {decoder.vocabulary.head}
    assert all(method.weight.is_meta for method in methods_of(decoder) - untied)
    assert num_bytes(decoder) == num_bytes(plain)


def test_tied_embedding_and_head_share_the_packed_weight(directory: Path) -> None:
    table = load_tiny(directory, cpu, torch.bfloat16).vocabulary.table.weight
    vocabulary = load_tiny(directory, cpu, torch.bfloat16, linear_method=PackedMethod).vocabulary
    token_ids = torch.tensor([5, 0, 96, 5])
    assert vocabulary.table.weight.is_meta == vocabulary.tied
    assert torch.equal(vocabulary.embed(token_ids), table[token_ids])
    assert vocabulary.logits(torch.randn(2, table.shape[1]).bfloat16()).shape == (2, len(table))


@pytest.mark.parametrize("backend", ["native", "oneDNN", "blocks"])
def test_an_engine_decodes_with_packed_weights(directory: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(backend, monkeypatch)
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 64}
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    embed = VocabEmbedding.embed
    seen: list[VocabEmbedding] = []
    monkeypatch.setattr(VocabEmbedding, "embed", lambda self, ids: seen.append(self) or embed(self, ids))
    with LLM(str(directory), **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert seen[0].table.weight.is_meta == seen[0].tied and seen[0].head.weight.is_meta


def test_each_matrix_is_allocated_late_and_packed_early(directory: Path) -> None:
    allocated: list[PackedMethod] = []
    waiting: list[int] = []

    class Counting(PackedMethod):
        def allocate(self, forms: Any) -> None:
            super().allocate(forms)
            allocated.append(self)

        def finish(self) -> None:
            super().finish()
            waiting.append(sum(method.packed is None and method.weight.is_meta for method in allocated))

    dummy_model(read_spec(directory), dtype=torch.bfloat16, device="cpu", ops=cpu, linear_method=Counting)
    num_methods = 3 * 4 + (1 if read_spec(directory).tie_word_embeddings else 2)
    assert waiting == [0] * num_methods
    allocated.clear()
    waiting.clear()
    load_tiny(directory, cpu, torch.bfloat16, linear_method=Counting)
    assert len(waiting) == num_methods and max(waiting) <= MAX_THREADS
