"""Octavo against llama.cpp with its own n-gram lookup, on the same GGUF file and prompts, one sequence on one core.

    OMP_NUM_THREADS=1 python benchmarks/speculation_llamacpp.py LLAMA_LOOKUP [--tokens N] [--rounds N] [--dtype D]

LLAMA_LOOKUP is llama.cpp's program llama-lookup (`cmake --build build --target llama-lookup`). Both draft up to 8
tokens, greedily, by turns. llama.cpp's time is its own, of decoding alone; Octavo's is that of the whole request, with
a cache that holds the prompt.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
from typing import Any

from speculation import AGAIN, PROMPTS, SCHEMA, forget_requests, run

from octavo import LLM, SamplingParams
from octavo.checkpoint.catalog import cached_path

NUM_DRAFTS = 8


def lookup(program: str, path: str, prompt: str, num_tokens: int) -> float:
    """Tokens per second."""
    command = [program, "-m", path, "-p", prompt, "-n", str(num_tokens), "--temp", "0", "-t", "1", "-c", "2048"]
    found = subprocess.run([*command, "--spec-draft-n-max", str(NUM_DRAFTS)], capture_output=True, text=True)
    speed = re.search(r"decoded .* speed:\s+([\d.]+)", found.stdout + found.stderr)
    assert speed, found.stderr[-500:]
    return float(speed[1])


def chat_text(llm: LLM, messages: list[dict[str, str]]) -> str:
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[arg-type]
    return llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    options = parser.parse_args()
    config = {"method": "suffix", "num_speculative_tokens": NUM_DRAFTS}
    common: dict[str, Any] = {"dtype": options.dtype, "max_model_len": 2048, "quantization": options.quantization}
    llm = LLM(options.model, **common, speculative_config=config)
    path = str(cached_path(options.model))
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    print("| prompt | Octavo, tokens/s | llama.cpp, tokens/s | ratio |\n|---|--:|--:|--:|")
    for name, prompts in PROMPTS.items():
        for prompt in () if name in (AGAIN, SCHEMA) else prompts:
            text = prompt if isinstance(prompt, str) else chat_text(llm, prompt)
            ours, theirs = [], []
            for turn in range(options.rounds + 1):
                forget_requests(llm)
                seconds, outputs = run(llm, [prompt], params)
                if turn:
                    ours.append(len(outputs[0]) / seconds)
                    theirs.append(lookup(options.program, path, text, options.tokens))
            a, b = statistics.median(ours), statistics.median(theirs)
            print(f"| {name} | {a:.0f} | {b:.0f} | {a / b:.2f} |", flush=True)


if __name__ == "__main__":
    main()
