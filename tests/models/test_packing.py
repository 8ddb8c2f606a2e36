"""Models whose matrices are packed while they are loaded."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu import packed_linear as packed
from octavo.models.decoder import Decoder
from octavo.models.linear import PackableWeight, VocabEmbedding
from octavo.models.loading.loader import dummy_model
from tests.kernels.cpu.backends import use_backend
from tests.models.tiny import PagedRun, assert_close, load_tiny, make_tiny_checkpoint, random_prompts, read_spec

PROMPTS = random_prompts(11, 3, 30)


@pytest.fixture(scope="module", params=["llama", "qwen2 untied", "gpt2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, *untied = request.param.split()
    folder = tmp_path_factory.mktemp(kind)
    return make_tiny_checkpoint(kind, folder, **({"tie_word_embeddings": False} if untied else {}))


def logits(directory: Path, quantization: packed.Quantization | None, *, pack: bool = True) -> torch.Tensor:
    finish = methodcaller("pack", quantization) if pack else None
    decoder = load_tiny(directory, cpu, torch.bfloat16, finish=finish)
    assert all((matrix.packed is not None) == pack for matrix in decoder.matrices())
    return torch.cat(PagedRun(decoder, PROMPTS, block_size=8).run(7))


def test_packed_models_compute_the_same(directory: Path) -> None:
    assert_close(logits(directory, None), logits(directory, None, pack=False), 0.03)


def test_int8_models_compute_nearly_the_same(directory: Path) -> None:
    exact, rounded = logits(directory, None, pack=False), logits(directory, "int8")
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1


def test_packing_frees_the_plain_matrix(directory: Path) -> None:
    decoder = load_tiny(directory, cpu, torch.bfloat16)
    shapes = [matrix.weight.shape for matrix in decoder.matrices()]
    num_bytes = decoder.num_bytes
    for matrix in decoder.matrices():
        matrix.pack()
    assert [matrix.weight.shape for matrix in decoder.matrices()] == shapes
    assert all(matrix.weight.is_meta for matrix in decoder.matrices())
    assert decoder.num_bytes == num_bytes


def test_tied_embedding_and_head_share_the_packed_weight(directory: Path) -> None:
    vocabulary = load_tiny(directory, cpu, torch.bfloat16).vocabulary
    table, token_ids = vocabulary.embedding.clone(), torch.tensor([5, 0, 96, 5])
    vocabulary.pack()
    assert vocabulary.embedding.is_meta == vocabulary.tied
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
    assert seen[0].embedding.is_meta == seen[0].tied


def test_each_matrix_is_packed_as_soon_as_it_is_filled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Decoder] = []
    monkeypatch.setattr(
        "octavo.models.loading.loader.empty_model", lambda *_, **k: created.append(Decoder(*_, **k)) or created[-1]
    )
    if "gpt2" in str(directory):
        pytest.skip("one kind is enough")
    plain_left: list[int] = []

    def finish(matrix: PackableWeight) -> None:
        matrix.pack()
        plain_left.append(sum(not m.weight.is_meta for m in created[-1].matrices()))

    decoder = dummy_model(read_spec(directory), dtype=torch.bfloat16, device="cpu", ops=cpu, finish=finish)
    assert plain_left == list(range(len(plain_left) - 1, -1, -1))
    assert len(plain_left) == len(list(decoder.matrices()))
    created.clear()
    plain_left.clear()
    load_tiny(directory, cpu, torch.bfloat16, finish=finish)
    assert plain_left == list(range(len(plain_left) - 1, -1, -1))
