"""Speculation against the same engine without it, by turns: tokens per second, and tokens per forward pass.

    python benchmarks/speculation.py [--model NAME] [--tokens N] [--drafts K] [--temperature T] [--rounds N]
    python benchmarks/speculation.py --synthetic 0.8 --batch 1 32 256 --model CONFIG_DIR --load-format dummy    on a GPU

The prompts are of kinds whose outputs repeat parts of their prompts more or less. Each output must be the same with and
without speculation; the last column counts those that are not. Drafts come from the request itself, and in "the same
again" also from the same request of earlier rounds, with other seeds. With --synthetic, a draft is accepted with this
chance, whatever the model writes, to measure what passes cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.kernels.row_state import MAX_DRAFTS, DraftLines, RowState
from octavo.runner.drafts.shared_suffixes import SharedSuffixes
from octavo.sampling_params import StructuredOutputsParams

CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        total += item.price * item.quantity
    total = total * (1 + tax_rate)
    return total


def print_items(items):
    for item in items:
        print(item.name, item.price, item.quantity)


def cheapest(items):
    best = items[0]
    for item in items:
        if item.price < best.price:
            best = item
    return best
"""
STORY = (
    "The quick brown fox jumps over the lazy dog near the river bank. Every morning the baker opens his shop at six, "
    "and sells fresh bread to the people of the town. On Sundays he closes at noon, walks along the river, and feeds "
    "the ducks with what is left of the bread."
)
TREES = [(4, 6, 5), (7, 8, 10), (3, 9, 4)]
PEOPLE = "Anna Berg lives in Oslo and is 34. Tom Hill lives in Leeds and is 52. Maria Lopez lives in Madrid and is 29."
Prompt = str | list[dict[str, str]]


def chat(*turns: str) -> Prompt:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def edit(what: str) -> Prompt:
    return f"# Original code:\n\n```python\n{CODE}```\n\n# The same code, {what}:\n\n```python\n"


PROMPTS: dict[str, list[Prompt]] = {
    "editing code": [edit("with `item` renamed to `product`"), edit("with type hints")],
    "quoting": [
        chat(f"Repeat this text word for word:\n\n{STORY}"),
        chat(f"Repeat this text, and then summarise it in one sentence:\n\n{STORY}"),
    ],
    "few-shot": [
        "".join(
            f"Q: A farm has {rows} rows with {each} trees each. {cut} trees are cut. How many trees are left?\n"
            f"A: The farm has {rows} * {each} = {rows * each} trees. {cut} trees are cut, so {rows * each} - {cut} = "
            f"{rows * each - cut} trees are left. The answer is {rows * each - cut}.\n\n"
            for rows, each, cut in TREES
        )
        + "Q: A farm has 5 rows with 12 trees each. 7 trees are cut. How many trees are left?\nA:"
    ],
    "JSON": [
        chat(
            'Extract name, city and age of each person as JSON like {"people": [{"name": "...", "city": "...", "age": '
            f"0}}]}}.\n\n{PEOPLE}"
        )
    ],
    "second turn": [
        chat(
            "Name three rivers of Europe and say where they end.",
            "1. The Danube ends in the Black Sea.\n2. The Rhine ends in the North Sea.\n3. The Rhone ends in the "
            "Mediterranean Sea.",
            "Write the same list with the length of each river.",
        )
    ],
    "first turn": [chat("Why is the sky blue?"), chat("Write a short story about a lighthouse.")],
}

BOOKS = "\n".join(
    f"{title} by {author}, {year}, {pages} pages, {price} euros."
    for title, author, year, pages, price in (
        ("The Trial", "Franz Kafka", 1925, 255, 12),
        ("Ulysses", "James Joyce", 1922, 730, 19),
        ("The Waves", "Virginia Woolf", 1931, 324, 14),
        ("Dubliners", "James Joyce", 1914, 152, 9),
        ("The Castle", "Franz Kafka", 1926, 328, 13),
        ("Orlando", "Virginia Woolf", 1928, 334, 15),
    )
)


def records(name: str, /, **fields: str) -> dict[str, Any]:
    """A JSON schema of a list of objects."""
    item = {"type": "object", "properties": {key: {"type": kind} for key, kind in fields.items()}}
    item |= {"required": list(fields), "additionalProperties": False}
    properties = {name: {"type": "array", "items": item}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


SCHEMA = "JSON under a schema"
SCHEMAS = [
    records("people", name="string", city="string", age="integer"),
    records("books", title="string", author="string", year="integer", pages="integer", price="integer"),
]
PROMPTS[SCHEMA] = [
    chat(f"Extract name, city and age of each person as JSON.\n\n{PEOPLE}"),
    chat(f"Extract title, author, year, pages and price of each book as JSON.\n\n{BOOKS}"),
]
AGAIN = "the same again"
PROMPTS[AGAIN] = PROMPTS["first turn"]


def forget_requests(llm: LLM) -> None:
    """Let no draft come from earlier requests."""
    runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
    if runner.drafter is not None:
        runner.drafter._shared = SharedSuffixes()


class SyntheticAcceptance:
    """Accepts drafts by chance, whatever the model samples. Outputs mean nothing then. Reads no tensor values.

    coins   [max_len] bool, by position
    """

    def __init__(self, llm: LLM, chance: float, max_len: int) -> None:
        runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(0)
        self.coins = (torch.rand(max_len, generator=generator) < chance).to(runner.platform.device)
        runner.platform.ops.propose_drafts, runner.platform.ops.reject_drafts = self.propose, self.reject

    def propose(self, state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
        positions = state.num_computed[rows].unsqueeze(1) + torch.arange(1, num_drafts + 1, device=rows.device)
        state.drafts[rows, :num_drafts] = torch.where(positions < ends.unsqueeze(1), positions % 1000, -1)

    def reject(self, state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
        is_first = drafts.depths == 0
        accepted = is_first | self.coins[state.num_computed[rows] + drafts.depths]
        for _ in range(MAX_DRAFTS - 1):
            accepted = accepted & (is_first | accepted.roll(1))
        return torch.where(accepted, tokens.clamp(min=0), -3)


def run(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Seconds and outputs."""
    begin = time.perf_counter()
    outputs = (llm.chat if isinstance(prompts[0], list) else llm.generate)(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs]


def compare(
    name: str, engines: dict[str, LLM], prompts: Sequence[Any], options: argparse.Namespace, schema: Any = None
) -> None:
    """Print a row of the table: by turns, with caches that hold the prompts."""
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    found: dict[str, list[list[int]]] = {}
    for turn in range(options.rounds + 1):
        params = SamplingParams(temperature=options.temperature, seed=turn, max_tokens=options.tokens)
        params.ignore_eos = options.synthetic is not None
        params.structured_outputs = None if schema is None else StructuredOutputsParams(json=schema)
        for way, llm in engines.items():
            if turn == 0 or not name.startswith(AGAIN):
                forget_requests(llm)
            spent, found[way] = run(llm, prompts, params)
            if turn:
                seconds[way].append(spent)
    num_tokens = sum(map(len, found["off"]))
    on, off = (statistics.median(seconds[way]) for way in ("on", "off"))
    ratio = statistics.median(b / a for a, b in zip(seconds["on"], seconds["off"], strict=True))
    differing = sum(a != b for a, b in zip(found["on"], found["off"], strict=True))
    print(f"| {name} | {num_tokens / on:,.0f} | {num_tokens / off:,.0f} | {ratio:.2f} | {differing} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=[1], help="sequences that run together")
    parser.add_argument("--synthetic", type=float, help="chance of a draft to be right")
    options = parser.parse_args()
    is_dummy = options.load_format == "dummy"
    common = {"load_format": options.load_format, "dtype": options.dtype, "skip_tokenizer_init": is_dummy}
    common |= {"max_model_len": 4096, "max_num_seqs": max(options.batch)}
    shares = (0.42, 0.85) if torch.cuda.is_available() else (None, None)  # of the memory: the second counts the first's
    drafting = {"method": "suffix", "num_speculative_tokens": options.drafts}
    engines = {
        way: LLM(options.model, **common, gpu_memory_utilization=share, speculative_config=config)
        for way, share, config in zip(("off", "on"), shares, (None, drafting), strict=True)
    }
    print(f"| {options.model} | on, tokens/s | off, tokens/s | on / off | outputs that differ |\n|---|--:|--:|--:|--:|")
    if options.synthetic is not None:
        SyntheticAcceptance(engines["on"], options.synthetic, 4096)
    for batch in options.batch:
        if options.synthetic is None:
            for name, chats in PROMPTS.items():
                for i in range(len(chats) if batch == 1 else 1):
                    schema = SCHEMAS[i] if name == SCHEMA else None
                    compare(f"{name}, {batch}", engines, (chats * batch)[i : i + batch], options, schema)
            continue
        prompts = [{"prompt_token_ids": random.Random(i).choices(range(1000), k=512)} for i in range(batch)]
        compare(f"{options.synthetic:.0%} right, {batch}", engines, prompts, options)


if __name__ == "__main__":
    main()
