"""Keys and values that become NaN: only their request fails, and other requests can use its blocks.

Blocks are never cleared. A block may hold NaN after its sequence's end or before its sliding window, and NaN times an
attention weight of 0 is still NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, RequestOutput
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch
from tests.models.tiny import make_tiny_checkpoint, random_prompts
from tests.proof.margins import GREEDY
from tests.proof.ways import OPTIONS
from tests.runner.stub_platform import use_stub_platform

PROMPTS = random_prompts(9, 17, 14, 5)
VICTIM = 1
LATE = random_prompts(18, 22, 21, 20, seed=1)
"""They fill the KV pool."""
SMALL = OPTIONS | {"num_gpu_blocks_override": 24}


def poison_one(llm: LLM, prompts: Sequence[list[int]], late: Sequence[list[int]]) -> list[RequestOutput]:
    """Set the blocks of one request to NaN after some tokens. Returns the outputs of the other `prompts`, then those of
    `late`, which reuse these blocks. The engine must be new."""
    runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
    kv, requests = runner.state.kv, llm.engine.scheduler.requests
    last_outputs: dict[int, RequestOutput] = {}
    poisoned: list[int] = []
    kept: list[bool] = []
    reused: set[int] = set()
    step = llm.engine.step  # type: ignore[attr-defined]

    def wait() -> None:
        if kv.is_cuda:
            torch.cuda.synchronize()

    def step_and_watch() -> Any:
        """Runs in the engine's thread, so that no step passes unseen."""
        updates = step()
        victim = requests.get(str(VICTIM))
        if not poisoned and victim is not None and len(victim.sequences[0].output_token_ids) > 3:
            poisoned.extend(filter(None, victim.sequences[0].block_ids))  # without those before its window
            wait()
            kv[poisoned] = math.nan
            wait()
        elif poisoned and victim is None and not kept:
            wait()
            kept.append(bool(kv[poisoned].isnan().any()))
        others = [request for name, request in requests.items() if name != str(VICTIM)]
        reused.update(block for request in others for block in request.sequences[0].block_ids if poisoned)
        return updates

    llm.engine.step = step_and_watch  # type: ignore[attr-defined]
    for prompt_list in (list(prompts), list(late)):
        for output in llm.stream(prompt_list, GREEDY):
            last_outputs[int(output.request_id)] = output
    assert kept == [True]  # blocks are not cleared
    failed = last_outputs.pop(VICTIM).outputs[0]
    assert failed.finish_reason == "error" and "not finite" in str(failed.stop_reason)
    assert 3 < len(failed.token_ids) < GREEDY.max_tokens
    assert len(reused.intersection(poisoned)) > len(poisoned) / 2
    return [last_outputs[name] for name in sorted(last_outputs)]


def tokens_of(outputs: list[RequestOutput]) -> list[Any]:
    return [output.outputs[0].token_ids for output in outputs]


def check_other_requests(model: str, prepare: Callable[[LLM], LLM], **options: Any) -> None:
    """All other requests get the same tokens as without NaN. So does a repetition of the failed request's prompt: its
    blocks, also those before its window, are not in the prefix cache."""
    late = [PROMPTS[VICTIM], *LATE[1:]]
    with LLM(model, device="cpu", **OPTIONS) as llm:
        others = [prompt for i, prompt in enumerate(PROMPTS) if i != VICTIM]
        expected = tokens_of(llm.generate([*others, *late], GREEDY, use_tqdm=False))
    with prepare(LLM(model, **(SMALL | options))) as llm:
        assert tokens_of(poison_one(llm, PROMPTS, late)) == expected


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("runner", ["cpu", "stub_platform", "graphs"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "opt"])
def test_nan_keys_fail_one_request_and_spoil_no_block(tmp_path: Path, kind: str, runner: str, window: int) -> None:
    def prepare(llm: LLM) -> LLM:
        return llm if runner == "cpu" else use_stub_platform(llm, fake_graphs=runner == "graphs")

    model = str(make_tiny_checkpoint(kind, tmp_path / kind))
    check_other_requests(model, prepare, device="cpu", decode_window=window)


def test_attention_that_reads_past_the_sequence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a weight of 0 for a NaN key."""
    attention = cpu.paged_attention

    def wrong(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, **options: Any) -> Any:
        last = batch.block_tables.gather(1, (batch.seq_lens[:, None].long() - 1).clamp(min=0) // kv_layer.shape[3])
        zero = (kv_layer[last[:, 0].long(), 1].flatten(1) * 0.0).sum(1)  # [num_seqs]
        zero = zero.repeat_interleave(batch.query_start.diff())
        return attention(q, kv_layer, batch, **options) + zero[:, None, None]

    monkeypatch.setattr(cpu, "paged_attention", wrong)
    with pytest.raises(AssertionError):
        check_other_requests(str(make_tiny_checkpoint("llama", tmp_path / "llama")), use_stub_platform, device="cpu")
