"""A draft model changes no token, and its K and V go where the blocks of the target go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM
from octavo.errors import ParameterError
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.passes.graph_cache import GraphCache
from octavo.runner.passes.prefill_batch import PrefillSize
from tests.differential.test_speculation import (
    CHUNKS,
    OPTIONS,
    PLAIN,
    SMALL,
    SPECULATION,
    SWAP,
    WINDOWS,
    Ask,
    Case,
    Expected,
    ask,
    asks,
    generate,
    on_host,
    run,
    tokens_of,
    with_grammars,
)
from tests.differential.test_transformers import ManualScheduler
from tests.engine.models import write_tokenizer
from tests.models.tiny import make_tiny_checkpoint
from tests.runner.stub_platform import use_stub_platform

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "target": ("llama", {}),
    "other": ("qwen3", {"num_hidden_layers": 2}),
    "gpt2": ("gpt2", {}),
    "large": ("llama", {"vocab_size": 98}),
    "short": ("llama", {"max_position_embeddings": 40}),
    "window": ("mistral", {}),
}


@pytest.fixture(autouse=True)
def _use_manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    def make(name: str, kind: str, sizes: dict[str, Any]) -> str:
        directory = make_tiny_checkpoint(kind, tmp_path_factory.mktemp("tiny") / name, **sizes)
        write_tokenizer(directory)
        return str(directory)

    return {name: make(name, *shape) for name, shape in SHAPES.items()}


def speculation(model: str, num: int = 5) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num}


def expect(model: str, asked: list[Ask]) -> Expected:
    with LLM(model, max_logprobs=30, **OPTIONS) as llm:
        return Expected(asked, generate(llm, asked), [])


# -- the same outputs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_kinds(models: dict[str, str]) -> Expected:
    return expect(models["target"], [*asks(), *on_host(), *with_grammars()])


@pytest.mark.parametrize(
    ("draft", "case"),
    [
        ("target", Case("llama", "cpu", "suffix", {})),
        ("target", Case("llama", "graphs", "suffix", WINDOWS, "swap")),
        ("target", Case("llama", "stub", "suffix", SMALL | WINDOWS)),
        ("other", Case("llama", "cpu", "suffix", WINDOWS | CHUNKS, "swap")),
        ("other", Case("llama", "graphs", "suffix", CHUNKS, "recompute")),
        ("gpt2", Case("llama", "cpu", "suffix", SMALL | WINDOWS | SWAP | PLAIN)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.place}-{value.preempts}",
)
def test_drafts_of_a_model_change_no_output(
    models: dict[str, str], all_kinds: Expected, draft: str, case: Case
) -> None:
    counts = run(case, models["target"], all_kinds, speculation(models[draft]))
    assert not counts["unwanted"]
    if draft == "target":  # it knows no logits processors
        assert counts["right"] > 25 and counts["wrong"] > 20, counts
    else:
        assert counts["wrong"] > 30 and counts["right"] < counts["wrong"] / 2, counts


# -- the draft model's K and V -----------------------------------------------------------------------------------------


def plain_asks() -> list[Ask]:
    """Greedy and with noise, of one sample and of several, two of three with a prefix of others."""
    shared = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    asked = [ask(i, temperature=i % 2, n=1 + (i % 4 == 3) * 2, max_tokens=24) for i in range(14)]
    return [Ask(shared[: 9 * (i % 3 > 0)] + prompt, params) for i, (prompt, params) in enumerate(asked)]


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> Expected:
    return expect(models["target"], plain_asks())


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", "cpu", "suffix", {}, "swap"),
        Case("llama", "cpu", "suffix", CHUNKS | WINDOWS, "recompute"),
        Case("llama", "graphs", "suffix", WINDOWS | CHUNKS, "swap"),
        Case("llama", "stub", "suffix", SMALL | PLAIN),
        Case("llama", "cpu", "suffix", {"enable_prefix_caching": False}),
    ],
    ids=lambda case: f"{case.place}-{case.preempts}-{len(case.options)}",
)
def test_a_model_that_drafts_for_itself_is_always_right(models: dict[str, str], plain: Expected, case: Case) -> None:
    """At any temperature, after swaps, recomputation, forks, copies and prefix hits: a block without the draft model's
    K and V would make wrong drafts."""
    counts = run(case, models["target"], plain, speculation(models["target"]))
    assert counts["right"] > 80 and not counts["wrong"], counts


@pytest.mark.parametrize("place", ["cpu", "stub", "graphs"])
def test_only_a_devices_target_has_several_lines_a_row(
    models: dict[str, str], plain: Expected, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`RaggedBatch.lines_per_row` of every decode pass, and what it promises to kernels."""
    found: dict[int, set[int]] = {}  # of each model
    decode_logits = GraphCache.decode_logits

    def check(self: GraphCache, model: Any, inputs: DecodeInputs, kv: Tensor, *, sliced: bool = False) -> Tensor:
        batch, lines = inputs.batch, inputs.batch.lines_per_row
        found.setdefault(id(model), set()).add(lines)
        lens = batch.seq_lens.view(-1, lines)
        tables = batch.block_tables.unflatten(0, (-1, lines))
        for i in range(1, lines):
            live = lens[:, i] > 0
            assert torch.equal(lens[live, i], lens[live, 0] + i)
            num_blocks = (lens[live, i] - 1) // kv.shape[4]
            common = torch.arange(tables.shape[2]) < num_blocks.unsqueeze(1)
            assert torch.equal(tables[live, i][common], tables[live, 0][common])
        return decode_logits(self, model, inputs, kv, sliced=sliced)

    monkeypatch.setattr(GraphCache, "decode_logits", check)
    run(Case("llama", place, "suffix", {}), models["target"], plain, speculation(models["target"], 7))
    draft, target = sorted(found.values(), key=len)
    assert draft == {1} and (target == {1} if place == "cpu" else max(target) > 1)


@pytest.mark.parametrize("config", ["none", "suffix", "draft_model"])
def test_kernels_of_passes_with_drafts_are_compiled_at_the_start(
    models: dict[str, str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {"none": None, "suffix": SPECULATION, "draft_model": speculation(models["target"])}
    with use_stub_platform(LLM(models["target"], speculative_config=configs[config], **OPTIONS)) as llm:
        passes = llm.engine.executor.runner.passes  # type: ignore[attr-defined]
        shapes, compute = [], passes._compute
        monkeypatch.setattr(passes, "_compute", lambda shape, packed: shapes.append(shape))
        passes.run_all_variants()
        drafted = [shape for shape in shapes if shape.num_drafts]
        assert bool(drafted) == (config != "none")
        for shape in drafted[:1]:
            compute(shape, None)
        assert all(isinstance(s.size, PrefillSize) or s.size % (1 + s.num_drafts) == 0 for s in shapes)


# -- the start of an engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["target", "other"])
def test_blocks_and_weights_count_both_models(models: dict[str, str], draft: str) -> None:
    options: dict[str, Any] = {"block_size": 4, "device": "cpu", "kv_cache_memory_bytes": 1 << 20, "swap_space": 0.0001}
    configs = []
    for model, config in (
        (models["target"], None),
        (models[draft], None),
        (models["target"], speculation(models[draft])),
    ):
        with LLM(model, speculative_config=config, **options) as llm:
            configs.append(llm.config)
            state = llm.engine.executor.runner.state  # type: ignore[attr-defined]
            pools = [state.kv, *([state.draft.kv] if state.draft else [])]
            hosts = [state.swapper.host_kv, *([state.draft.host_kv] if state.draft else [])]
            for tensors, num_blocks in ((pools, llm.config.num_blocks), (hosts, llm.config.num_host_blocks)):
                assert {len(tensor) for tensor in tensors} == {num_blocks + 1}
                assert sum(tensor[0].nbytes for tensor in tensors) == llm.config.kv.bytes_per_block
    target, alone, both = configs
    assert both.kv.bytes_per_block == target.kv.bytes_per_block + alone.kv.bytes_per_block
    assert both.num_blocks == (1 << 20) // both.kv.bytes_per_block - 1 < target.num_blocks
    assert both.num_host_blocks < target.num_host_blocks
    assert both.weight_bytes == target.weight_bytes + alone.weight_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "large"}, "large has 98 tokens in its vocabulary, and {target} 97; use one with the same tokenizer"),
        ({"model": "short"}, "short has 40 positions, and {target} 128; set max_model_len to 40, or use another"),
        ({"method": "draft_model"}, "model is None with the method draft_model; name one with spec_model"),
        ({"method": "suffix", "model": "other"}, "other' with the method suffix; leave it out, or set method to draft"),
        ({"method": "eagle", "model": "other"}, "method is 'eagle': drafts come from earlier text or a draft model"),
        ({"model": ""}, "model must be a path or a name, not ''"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    models: dict[str, str], config: dict[str, Any], message: str
) -> None:
    name = config.get("model")
    config = config | ({"model": models[name]} if name else {})
    with pytest.raises(ParameterError) as raised:
        LLM(models["target"], speculative_config=config, **OPTIONS)
    assert message.format(**models) in str(raised.value) and raised.value.param == "speculative_config"


def test_a_shorter_context_makes_a_short_draft_model_fit(models: dict[str, str]) -> None:
    with LLM(models["target"], speculative_config={"model": models["short"]}, max_model_len=40, **OPTIONS) as llm:
        (output,) = llm.generate([[3, 4, 5]], use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16 and llm.config.args.speculation().method == "draft_model"


def test_a_draft_model_reads_no_block_that_the_target_frees(models: dict[str, str]) -> None:
    """The target keeps the blocks of its attention window only. A narrower one in the draft model is no problem."""
    with pytest.raises(ParameterError, match=r"has no tokens as attention window, and .*window keeps 9; use one that"):
        LLM(models["window"], speculative_config=speculation(models["target"]), **OPTIONS)
    asked = plain_asks()[:5]
    expected = expect(models["target"], asked)
    run(Case("llama", "cpu", "suffix", {}), models["target"], expected, speculation(models["window"]))


def test_short_options_name_a_draft_model(models: dict[str, str]) -> None:
    asked = plain_asks()[:3]
    with LLM(models["target"], spec_model=Path(models["target"]), spec_tokens=3, **OPTIONS) as llm:
        assert llm.config.args.spec_model == models["target"]
        assert llm.engine.executor.runner.state.draft is not None  # type: ignore[attr-defined]
        assert tokens_of(generate(llm, asked)) == tokens_of(expect(models["target"], asked).outputs)
