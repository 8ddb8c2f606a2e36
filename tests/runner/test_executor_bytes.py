"""A real executor whose plans, bitmasks and results pass through their bytes gives the same outputs."""

from __future__ import annotations

from typing import Any

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.plan import StepPlan
from tests.runner.hash_model import HandleOfBytes

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [5, 6, 7, 8, 20]]
LOADS: list[Any] = [
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=12, logprobs=2, prompt_logprobs=3),
    SamplingParams(temperature=0.9, seed=2, max_tokens=12, structured_outputs={"regex": "[a-f]{9}"}),  # type: ignore[arg-type]
    SamplingParams(temperature=0, max_tokens=12, logprobs=21, presence_penalty=0.5, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=3, max_tokens=9, bad_words_token_ids=[[8]]),
    BeamSearchParams(beam_width=3, max_tokens=6, logprobs=2),
]


class ExecutorOfBytes:
    def __init__(self, inner: Any) -> None:
        self.inner, self.close = inner, inner.close

    def submit(self, plan: StepPlan) -> HandleOfBytes:
        plan = StepPlan.decode(plan.encode())
        return HandleOfBytes(plan, self.inner.submit(plan))


def outputs_of(model: str, *, in_bytes: bool) -> list[Any]:
    options = {"block_size": 4, "num_gpu_blocks_override": 60, "max_logprobs": 30, "decode_window": 3}
    with LLM(model, device="cpu", **options) as llm:
        if in_bytes:
            llm.engine.executor = ExecutorOfBytes(llm.engine.executor)
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for params in LOADS]
        return [(o.outputs, o.prompt_logprobs) for outputs in found for o in outputs]


def test_outputs_survive_the_bytes_of_their_steps(model: str) -> None:
    assert outputs_of(model, in_bytes=True) == outputs_of(model, in_bytes=False)
