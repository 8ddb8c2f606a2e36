"""Blocks that sharing saves, on the engine with a real model: parallel samples and beams, after the paper's figure 15.

    python benchmarks/sharing.py [--model NAME] [--num 24]

Prompts are passages of docs/ of ShareGPT-like lengths (a quarter as long, with blocks of 4 in the place of 16) and of
Alpaca-like ones (as they are, blocks of 16); outputs have the lengths of the trace. No prefix cache, so that requests
share nothing with each other. What is saved is counted after every step, over all that would be held without sharing:
(references - blocks) / references, summed over the steps.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core import events as ev
from octavo.simulate import traces

DOCS = Path(__file__).parents[1] / "docs"


class Saved:
    """Sums over the steps of an engine."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num", type=int, default=24)
    args = parser.parse_args()
    for name, drawn, part, block_size in (
        ("ShareGPT-like", traces.sharegpt_like(args.num, seed=1), 4, 4),
        ("Alpaca-like", traces.alpaca_like(args.num, seed=1), 1, 16),
    ):
        options: dict[str, Any] = {"block_size": block_size, "enable_prefix_caching": False, "max_num_seqs": 64}
        for kind, width in ((kind, width) for kind in ("samples", "beams") for width in (2, 4, 6)):
            rng = random.Random(0)
            with LLM(args.model, max_model_len=1024, **options) as llm:
                text = llm.get_tokenizer().encode("".join(path.read_text() for path in sorted(DOCS.glob("*.md"))))
                saved, prompts, params = Saved(llm), [], []
                for p, o in zip(drawn.prompts, drawn.outputs, strict=True):
                    num_prompt, num_output = max(1, int(p) // part), max(2, int(o) // part)
                    start = rng.randrange(len(text) - num_prompt)
                    prompts.append({"prompt_token_ids": text[start : start + num_prompt]})
                    if kind == "samples":
                        params.append(SamplingParams(n=width, max_tokens=num_output, seed=1, ignore_eos=True))
                    else:
                        params.append(BeamSearchParams(beam_width=width, max_tokens=num_output, ignore_eos=True))
                if kind == "samples":
                    llm.generate(prompts, params, use_tqdm=False)
                else:
                    for prompt, beams in zip(prompts, params, strict=True):
                        llm.beam_search(prompt, beams, use_tqdm=False)
                print(f"{name}, {kind} of {width}: {saved.percent:.1f} % saved", flush=True)


if __name__ == "__main__":
    main()
