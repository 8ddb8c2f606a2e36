"""Lines of code per folder of src/octavo against a budget; fails if a folder exceeds it.

A line of code holds a token other than a comment or a docstring: a budget on explanations would be a reason to explain
less. A second column counts all lines. A budget may be raised, with a reason in the same commit.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

BUDGETS: dict[str, int] = {
    "(top)": 1140,  # public names, EngineArgs, exceptions, logging, `octavo doctor`, groups, states, 8-bit K and V
    "params": 672,  # sampling, beam search and structured output parameters, with their validation; vLLM's arguments
    "core": 3420,  # blocks, window groups, states, prefix cache, scheduler, policy, events, commands, snapshots, plans
    "checkpoint": 723,  # finding a model's files, reading headers, the tables of keys
    "engine": 2742,  # step loop, requests, drafts in grammars, queries, outputs, beams, supervisor, also of ranks
    "frontend": 2507,  # LLM, ranks, the client with its transports, text input; PagedAttention without an engine
    "text": 2810,  # tokenizers, chat templates, detokenizer, grammars (Lark, EBNF), helpers; output parsers 790,
    # of them harmony and calls in XML 310, Gemma 4 200 and markers that are special tokens 50
    "kernels": 12929,  # reference, CPU (torch, numpy, C++), Triton, Hopper variants, choice by capability; of quantised
    # weights 1,150: products in 4, 5, 6 and 8 bits and float8, rounding, K and V in 8 bits; recurrent layers 832; batch
    # invariance 185; experts in groups on a GPU 170; races over slices 95, filters by
    # candidates of slices 55; steps in one native call 70; Hopper's stream of quantised weights 400, with Q, K and V
    # written 250, tiles of many tokens 430, of float8 310, norms in float8 60, K and V by pairs; sums over ranks in
    # products 130, with whole norms 85, and sent by copy engines 165
    "models": 5342,  # a module a family, config readers, decoders, recurrent layers, linear methods, loaders; parts of
    # ranks 140: their sizes, vocabulary, joint norms, columns of files; of four formats of quantised checkpoints and
    # llama.cpp's blocks 900: their keys, tensors and the bits that are kept; experts 290; llama.cpp's
    # files of hybrids 120, columns in another order 35, layers that keep 8 bits 25; Gemma 4 (K/V
    # heads of two sizes, experts beside the MLP) 375; passes in two parts 50
    "router": 246,  # which replica caches what, and the choice of one
    "runner": 4266,  # plans to tensors, passes, sampling, draft models, shared suffixes, CUDA graphs, memory, executors
    # of ranks 650: the ring of plans, their processes, collectives, where each is and whether one hangs
    "serve": 5020,  # OpenAI's routes, HTTP server with its limits, metrics (of ranks 20), tenants; harmony 40,
    # Gemma 4 10
    "simulate": 3335,  # replicas behind the router, cost models, also of ranks, traces, planner, the paper
    "bench": 1111,  # `octavo bench`; perplexity of a text
    "view": 3672,  # live view with ranks, flight recorder and player, playground; lessons, of them 650 lines of texts
    "view (JavaScript)": 2324,  # the page, without a framework; the card of ranks, states 25
    "cluster": 997,  # the Ray Serve application: replicas, the pool with a slot a number, failover, `octavo cluster`
    "cli": 2387,  # one file a command; `octavo top` reads every engine of a server and its ranks, and fits the terminal
    "utils": 24,  # the argument parser of vLLM's scripts, the choice of the event loop
    "v1": 5,  # names of modules that vLLM's scripts import
}
JAVASCRIPT = {".js", ".mjs"}
VENDORED = "vendor"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    code: int
    lines: int

    def plus(self, other: Size) -> Size:
        return Size(self.code + other.code, self.lines + other.lines)


def size_of(path: Path) -> Size:
    """Size of one file. In JavaScript, blank lines and // comments do not count as code."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if path.suffix in JAVASCRIPT:
        return Size(sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines), len(lines))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string statement: a docstring, or the description of an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return Size(len(code), len(lines))


def sizes(root: Path) -> dict[str, Size]:
    """Sizes by top-level folder of the package at `root`; its own modules are "(top)"; JavaScript is separate."""
    totals: dict[str, Size] = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if VENDORED in parts or path.suffix not in {".py", *JAVASCRIPT}:
            continue
        folder = parts[0] if len(parts) > 1 else "(top)"
        if path.suffix in JAVASCRIPT:
            folder += " (JavaScript)"
        totals[folder] = totals.get(folder, Size(0, 0)).plus(size_of(path))
    return totals


def main(root: Path) -> int:
    totals = sizes(root)
    if not totals:
        print(f"error: no source in {root}", file=sys.stderr)
        return 1
    print(f"{'':<20}{'code':>7}{'budget':>8}{'all lines':>11}")
    over: list[str] = []
    for folder in sorted(totals, key=lambda name: (name not in BUDGETS, name)):
        code, lines = totals[folder]
        budget = BUDGETS.get(folder)
        print(f"{folder:<20}{code:>7,}{f'{budget:,}' if budget else '-':>8}{lines:>11,}")
        if budget is not None and code > budget:
            over.append(f"error: {folder} is {code - budget} lines over its budget of {budget:,}")
    print(f"{'all':<20}{sum(s.code for s in totals.values()):>7,}{'':>8}{sum(s.lines for s in totals.values()):>11,}")
    for line in over:
        print(line, file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src" / "octavo"))
