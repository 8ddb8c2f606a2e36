"""Keys and values that are no numbers any more: their request fails alone, and their memory is good for the next one.

Nobody clears a block. So what lies in one beyond its sequence's end, and before its window, may be NaN, which no weight
of 0 makes harmless.
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
from tests.runner.test_cuda_model_runner import use_cuda_runner

PROMPTS = random_prompts(9, 17, 14, 5)
VICTIM = 1
LATE = random_prompts(18, 22, 21, 20, seed=1)
"""As many as the pool has room for."""
SMALL = OPTIONS | {"num_gpu_blocks_override": 24}


def poison_one(llm: LLM, prompts: Sequence[list[int]], late: Sequence[list[int]]) -> list[RequestOutput]:
    """The outputs of `prompts`, one of which has NaN in its blocks after some tokens, without that one's; and behind
    them those of `late`, which get these blocks as they are. The engine is a new one."""
    runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
    kv, requests = runner.kv, llm.engine.scheduler.requests
    newest: dict[int, RequestOutput] = {}
    lost: list[int] = []
    seen: set[int] = set()

    def wait() -> None:
        if kv.is_cuda:
            torch.cuda.synchronize()

    def watch(output: RequestOutput) -> None:
        newest[int(output.request_id)] = output
        others = [request for name, request in requests.items() if name != str(VICTIM)]
        seen.update(block for request in others for block in request.sequences[0].block_ids if lost)

    for output in llm.stream(list(prompts), GREEDY):
        watch(output)
        victim = requests.get(str(VICTIM))
        if not lost and victim is not None and len(victim.sequences[0].output_token_ids) > 3:
            lost = [block for block in victim.sequences[0].block_ids if block]  # those that it still has
            wait()
            kv[lost] = math.nan
            wait()
        elif output.request_id == str(VICTIM) and output.finished:
            wait()
            assert kv[lost].isnan().float().mean() > 0.5  # nobody clears them, and few are others' by now
    failed = newest.pop(VICTIM).outputs[0]
    assert failed.finish_reason == "error" and "not finite" in str(failed.stop_reason)
    assert 3 < len(failed.token_ids) < GREEDY.max_tokens
    for output in llm.stream([*late], GREEDY):
        watch(output)
    assert len(seen.intersection(lost)) > len(lost) / 2
    return [newest[name] for name in sorted(newest)]


def tokens_of(outputs: list[RequestOutput]) -> list[Any]:
    return [output.outputs[0].token_ids for output in outputs]


def survive(model: str, on: Callable[[LLM], LLM], **options: Any) -> None:
    """Whoever is not the victim gets the tokens that he gets where nothing happens; so does who sends the victim's
    prompt again: none of its blocks is found in the cache, those behind its window not either."""
    late = [PROMPTS[VICTIM], *LATE[1:]]
    with LLM(model, device="cpu", **OPTIONS) as llm:
        others = [prompt for i, prompt in enumerate(PROMPTS) if i != VICTIM]
        expected = tokens_of(llm.generate([*others, *late], GREEDY, use_tqdm=False))
    with on(LLM(model, **(SMALL | options))) as llm:
        assert tokens_of(poison_one(llm, PROMPTS, late)) == expected


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("runner", ["cpu", "rows", "graphs"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "opt"])
def test_keys_that_became_nan_fail_one_request_and_spoil_no_block(
    tmp_path: Path, kind: str, runner: str, window: int
) -> None:
    def on(llm: LLM) -> LLM:
        return llm if runner == "cpu" else use_cuda_runner(llm, fake_graphs=runner == "graphs")

    model = str(make_tiny_checkpoint(kind, tmp_path / kind))
    survive(model, on, device="cpu", decode_window=window)


def test_attention_that_reads_what_is_nobodys_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 0 for a key that is no number."""
    attention = cpu.paged_attention

    def wrong(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, **words: Any) -> Any:
        last = batch.block_tables.gather(1, (batch.seq_lens[:, None].long() - 1).clamp(min=0) // kv_layer.shape[3])
        nothing = (kv_layer[last[:, 0].long(), 1].flatten(1) * 0.0).sum(1)  # [num_seqs]
        nothing = nothing.repeat_interleave(batch.query_start.diff())
        return attention(q, kv_layer, batch, **words) + nothing[:, None, None]

    monkeypatch.setattr(cpu, "paged_attention", wrong)
    with pytest.raises(AssertionError):
        survive(str(make_tiny_checkpoint("llama", tmp_path / "llama")), use_cuda_runner, device="cpu")
