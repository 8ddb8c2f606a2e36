"""Lines of code per folder of src/octavo against a budget; fails when one is above it.

A line of code holds a token that is no comment and no docstring: a budget on explanations would be a reason to explain
less. All lines stand in a column beside it. A budget may be raised, with a reason in the same commit.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

BUDGETS: dict[str, int] = {
    "core": 2240,  # 1500, a failed step, attention windows, all of vLLM's parameters, preemption by cost, pins, and
    # tenants who share steps beside long prompts, blocks that came back corrupt, and requests found by halves
    "engine": 2620,  # 1200, every parameter's output, beams, constraints, a process of its own, events for routers,
    # commands that are checked before they are read, questions without an answer, failing requests found by halves, and
    # log-probabilities in slices
    "text": 1580,  # 700, vocab.json with merges.txt, bounds of a stranger's template, grammars on trial, tool calls,
    # a stack, a process that died and a bound of memory for those, files that say nonsense told by their names, one
    # automaton for all stop strings, and tool calls read in one pass
    "kernels": 6110,  # 2200, prefill on Hopper, sampling and rows of a GPU, the CPU's packed and native kernels, layers
    # of few tokens with all that is around their products, decoding that merges in one launch, small blocks' swaps, and
    # what requests ask of their logits, kept by rows, masks inside the draw, beams' candidates, streamed weights, and
    # kernels compiled ahead, a schedule of decoding in one place, the product that turns and writes its heads, and
    # decoding that reads once what sequences have in common, and what the model thought of the tokens of rows that ask,
    # and a product for every processor, with a compiler and without
    "models": 1220,  # 1200, and names of models and tensors that are checked and cut
    "runner": 2480,  # 1800, and what requests ask of their logits on a GPU: its own part of it, and the host's; masks
    # and beams from graphs, a draw with the pass behind it; passes that are rehearsed; rows that begin alike; a device
    # that is lost, and what does not fit told with the flag and the value that would do; log-probabilities that
    # land, and checksums of swapped blocks
    "serve": 5640,  # 1800, the table of parameters, limits before a request and on the whole of it, responses,
    # restarts, traces, the viewer, a document of every route, what a connection may still say beside its request (an
    # upgrade, trailers, the next), a queue that keys share, tenants: whose request it is, what a key sees and may ask
    # for, text work in processes of its own, answers in slices, closed schemas, pins that are given up, and bounds of
    # what a body holds
    "cluster": 500,
    "simulate": 2770,  # 1800, the nine figures of the paper as a file each, calibration, and pictures without a library
    "view": 3350,  # 600, the flight recorder and its run again (900), the playground and its lessons (860), attaching,
    # a tenant's share of each frame, and bounds of a stranger's history
    "view (JavaScript)": 2050,  # 1200, three uses, a canvas up to a million blocks, and no framework to lean on
    "cli": 2050,  # 800, the demo, a program of its own, vLLM's flags, the server, its load, the simulator, view, top,
    # what is said of an option that has no part, a check of the environment and of the model, options given once
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
    """One file's. In JavaScript only blank lines and lines of // are no code."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if path.suffix in JAVASCRIPT:
        return Size(sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines), len(lines))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone: a docstring, or the description under an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return Size(len(code), len(lines))


def sizes(root: Path) -> dict[str, Size]:
    """Per top-level folder of the package at `root`; its own modules are "(top)"; JavaScript stands apart."""
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
