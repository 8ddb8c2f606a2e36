"""What groups of layers bring: `python benchmarks/groups.py CONFIG_DIR [--device cuda] [--length 4096] ...`.

A model with sliding and full layers and random weights generates in a pool of fixed bytes, once with a block table for
each group and once with one table for all layers, as if none slid. The pool holds `--held` sequences of the one table.
"""

from __future__ import annotations

import argparse
import random
import time

from octavo import LLM, SamplingParams
from octavo.checkpoint.resolve import open_checkpoint
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.integers import cdiv
from octavo.models.config import read_spec


def prompts(num: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
    chance = random.Random(seed)
    return [{"prompt_token_ids": chance.choices(range(3, 1000), k=length)} for _ in range(num)]


def measure(llm: LLM, options: argparse.Namespace) -> str:
    asked = prompts(options.sequences, options.length - options.tokens)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    llm.generate(prompts(2, 64, 1), params, use_tqdm=False)
    begin = time.perf_counter()
    llm.generate(asked, params, use_tqdm=False)
    seconds, stats = time.perf_counter() - begin, llm.stats()
    tokens = options.sequences * options.length
    return f"{tokens / seconds:,.0f} | {stats.peak_running} | {stats.num_preemptions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence, output included")
    parser.add_argument("--tokens", type=int, default=256, help="of the output")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--held", type=int, default=4, help="sequences that the pool holds with one table")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    spec = read_spec(open_checkpoint(options.model, weights=False))
    alike = KVCacheSpec.of(spec, 16, options.dtype)
    num_bytes = alike.pool_bytes(options.held * cdiv(options.length, 16))
    common = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": options.dtype,
        "device": options.device,
        "swap_space": 0,
    }
    common |= {"kv_cache_memory_bytes": num_bytes, "max_model_len": options.length}
    common |= {"max_num_seqs": options.sequences, "enable_prefix_caching": False}
    print(f"pool of {num_bytes / 1e6:,.0f} MB; {options.sequences} sequences of {options.length} tokens")
    print("| tables | tokens/s | at once | preemptions |\n|---|--:|--:|--:|")
    for turn in range(options.rounds):
        for grouped in (True, False) if turn % 2 else (False, True):
            with LLM(options.model, **common, disable_hybrid_kv_cache_manager=not grouped) as llm:
                print(f"| {'a group' if grouped else 'one'} | {measure(llm, options)} |", flush=True)


if __name__ == "__main__":
    main()
