"""KV memory of a real runner, slot by slot: each pass checks the tags of all slots that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from torch import Tensor

from octavo import LLM
from octavo.runner.platform import CpuPlatform, Platform
from tests.proof import tags as t
from tests.proof.oracle import ReadBack
from tests.runner.stub_platform import StubPlatform

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_model_len": 96,
    "swap_space": 0.001,
    "max_logprobs": 21,
}
CASES: dict[str, dict[str, Any]] = {
    "swap": {"block_size": 4, "num_gpu_blocks_override": 28, "preemption_mode": "swap", "decode_window": 3},
    "recompute": {"block_size": 2, "num_gpu_blocks_override": 50, "preemption_mode": "recompute"},
    "chunks": {"block_size": 8, "num_gpu_blocks_override": 18, "max_num_batched_tokens": 12, "decode_window": 4},
}
SEEDS = range(5)


@pytest.fixture(scope="module")
def plain(model: str) -> dict[int, dict[str, list[list[int]]]]:
    """Outputs of each seed's requests with a KV pool that holds all."""
    with LLM(model, block_size=16, num_gpu_blocks_override=200, **OPTIONS) as llm:
        return {seed: t.serve(llm, seed)[0] for seed in SEEDS}


@pytest.mark.parametrize("way", ["cpu", "stub_platform", "graphs"])
@pytest.mark.parametrize("case", list(CASES))
def test_every_slot_that_a_pass_reads_belongs_to_its_sequence(
    model: str, plain: dict[int, dict[str, list[list[int]]]], case: str, way: str
) -> None:
    seen: Counter[str] = Counter()
    with LLM(model, **OPTIONS, **CASES[case]) as llm:
        tags = t.tag(
            llm,
            CpuPlatform() if way == "cpu" else StubPlatform(graphs=way == "graphs"),
            graphs=way == "graphs",
        )
        for seed in SEEDS:
            outputs, events = t.serve(llm, seed)
            seen += events
            assert tags.check() > 0
            both = outputs.keys() & plain[seed].keys()
            assert len(both) > 0 and all(outputs[name] == plain[seed][name] for name in both)
        stats = llm.engine.scheduler.stats()
    assert tags.check() > 10_000 and tags.num_lost > 100
    assert stats.num_hits and stats.num_copied and seen["Preempted"] and seen["Evicted"]
    assert bool(stats.num_swapped_out and stats.num_swapped_in) == (case != "recompute")


# -- planted bugs -----------------------------------------------------------------------------------------------------

Plant: TypeAlias = Callable[[t.Tags, Any], None]


def lose_a_copy(tags: t.Tags, runner: Any) -> None:
    copy = runner.platform.ops.block_copy
    runner.platform.ops.block_copy = lambda kv, src, dst: copy(kv, src[:-1], dst[:-1])


def swap_to_the_wrong_block(tags: t.Tags, runner: Any) -> None:
    move = runner.state.swapper.move

    def wrong(outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> Any:
        return move(outs, [(src, dst % (len(runner.state.kv) - 1) + 1) for src, dst in ins[:1]] + ins[1:])

    runner.state.swapper.move = wrong


def write_one_slot_off(tags: t.Tags, runner: Any) -> None:
    """The last token of a pass with slices of several tokens."""
    check_pass = tags.check_pass

    def wrong(token_ids: Tensor, batch: Any) -> None:
        if batch.max_query_len > 1:
            batch.slot_mapping[-1] += 1
        check_pass(token_ids, batch)

    tags.check_pass = wrong  # type: ignore[method-assign]


def use_a_block_of_another_sequence(tags: t.Tags, runner: Any) -> None:
    """The first block of a block table is another sequence's."""
    prepare = runner.platform.ops.prepare_decode_inputs

    def wrong(state: Any, inputs: Any, block_size: int) -> None:
        prepare(state, inputs, block_size)
        if len(inputs.rows) > 1:
            inputs.batch.block_tables[0, 0] = inputs.batch.block_tables[1, 0]

    runner.platform.ops.prepare_decode_inputs = wrong


PLANTS: list[Plant] = [lose_a_copy, swap_to_the_wrong_block, write_one_slot_off, use_a_block_of_another_sequence]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_noticed(model: str, plant: Plant) -> None:
    check_notices(model, plant, StubPlatform())


def check_notices(model: str, plant: Plant, platform: Platform, **options: Any) -> None:
    with LLM(model, **(OPTIONS | CASES["swap"] | options)) as llm:
        tags = t.tag(llm, platform)
        plant(tags, llm.engine.executor.executor.runner)  # type: ignore[attr-defined]
        for seed in SEEDS:
            t.serve(llm, seed)
        with pytest.raises(ReadBack, match="first the slot at"):
            tags.check()
