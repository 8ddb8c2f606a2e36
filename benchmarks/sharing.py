"""Blocks that sharing saves in the engine, for parallel samples and beams (figure 15 of the paper).

    python benchmarks/sharing.py [--model NAME] [--num-samples 150] [--num-beams 24]

Outputs have the lengths of the trace, blocks have 16 tokens, and the prefix cache is off, so requests share nothing
with each other. The saving is counted after every step relative to the blocks needed without sharing:
(references - blocks) / references, summed over the steps. The sharing of samples depends on lengths only, so they use a
model of two small layers with random weights, at ShareGPT-like lengths. The sharing of beams depends on the model, so a
trained one continues passages of docs/ of Alpaca-like lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core import events as ev
from octavo.simulate import traces

DOCS = Path(__file__).parents[1] / "docs"
OPTIONS: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": False, "max_model_len": 2048}


class SavingCounter:
    """Sums block references and used blocks over the steps of an engine."""

    def __init__(self, llm: LLM) -> None:
        self._pool = llm.engine.scheduler.cache.pool
        self.num_refs = self.num_blocks = 0
        llm.engine.scheduler.events.subscribe(self)

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self.num_refs += self._pool.num_refs
            self.num_blocks += self._pool.num_used

    @property
    def percent(self) -> float:
        return 100 * (1 - self.num_blocks / self.num_refs)


SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


def samples_saving(num: int, width: int) -> float:
    rng, sampled = random.Random(0), traces.sharegpt_like(num, seed=1)
    lengths = list(zip(sampled.prompts.tolist(), sampled.outputs.tolist(), strict=True))
    prompts = [{"prompt_token_ids": [rng.randrange(512) for _ in range(p)]} for p, _ in lengths]
    params = [SamplingParams(n=width, max_tokens=o, seed=1, ignore_eos=True, detokenize=False) for _, o in lengths]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL))
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=96, **OPTIONS) as llm:
            counter = SavingCounter(llm)
            llm.generate(prompts, params, use_tqdm=False)
            return counter.percent


def beams_saving(model: str, num: int, width: int) -> float:
    rng, sampled = random.Random(0), traces.alpaca_like(num, seed=1)
    with LLM(model, max_num_seqs=48, **OPTIONS) as llm:
        text = llm.get_tokenizer().encode("".join(path.read_text() for path in sorted(DOCS.glob("*.md"))))
        counter = SavingCounter(llm)
        for num_prompt, num_output in zip(sampled.prompts.tolist(), sampled.outputs.tolist(), strict=True):
            start = rng.randrange(len(text) - num_prompt)
            params = BeamSearchParams(beam_width=width, max_tokens=num_output, ignore_eos=True)
            llm.beam_search({"prompt_token_ids": text[start : start + num_prompt]}, params, use_tqdm=False)
        return counter.percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-samples", type=int, default=150)
    parser.add_argument("--num-beams", type=int, default=24)
    args = parser.parse_args()
    for width in (2, 4, 6):
        print(f"ShareGPT-like, {width} samples: {samples_saving(args.num_samples, width):.1f} % saved", flush=True)
    for width in (2, 4, 6):
        print(f"Alpaca-like, {width} beams: {beams_saving(args.model, args.num_beams, width):.1f} % saved", flush=True)


if __name__ == "__main__":
    main()
