"""`octavo blocks`: drive the engine's KV cache by hand, without a model.

Every word is a token, and tokens count as computed at once.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from octavo.cli.terminal import on_terminal, read_line
from octavo.core.cache.kv_stats import KVStats
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence
from octavo.errors import UsageError
from octavo.params.sampling_params import SamplingParams

HELP = """\
allocate NAME WORD...   a sequence of these tokens; cached full blocks are shared
generate NAME WORD...   append tokens, one after another
fork NAME NEW           a second sequence that shares the blocks, copied on write
free NAME               free its blocks; full ones stay in the prefix cache
show [NAME]             block tables: blocks, filled slots, references, tokens
stats                   hits, misses, free and allocated blocks
help, exit"""

MAX_LEN = 1 << 20
"""Maximum length of a sequence, more than a pool holds."""


class Session:
    """Named sequences in one `KVCacheManager`. Commands return the lines to print."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = KVCacheManager(num_blocks, block_size)
        self.sequences: dict[str, Sequence] = {}
        self.ids: dict[str, int] = {}  # word -> token id, in order of appearance
        self.commands: dict[str, Callable[..., list[str]]] = {
            "allocate": self.allocate,
            "generate": self.generate,
            "fork": self.fork,
            "free": self.free,
            "show": self.show,
            "stats": self.stats,
            "help": HELP.splitlines,
        }

    def run(self, line: str) -> list[str]:
        """Run one command line. Raises `UsageError` for an invalid one, which changes nothing."""
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"{error}: {line}") from None
        if not words:
            return []
        name, *arguments = words
        command = self.commands.get(name)
        if command is None:
            raise UsageError(f"no command {name!r}; the commands are {', '.join(self.commands)} and exit")
        if not _takes(command, arguments):
            usage = next(line for line in HELP.splitlines() if line.startswith(name))
            raise UsageError(f"usage: {usage.split('  ')[0]}")
        return command(*arguments)

    # -- commands ------------------------------------------------------------------------------------------------------

    def allocate(self, name: str, first: str, *words: str) -> list[str]:
        self._check_new(name)
        tokens = self._tokens([first, *words])
        request = Request(name, tokens, SamplingParams(max_tokens=MAX_LEN))
        request.begin(0, (0, 0), MAX_LEN)
        sequence = request.sequences[0]
        prefix = self.kv.prefixes.lookup(sequence)
        needs = self.kv.blocks_to_admit(sequence, prefix)
        if needs > self.kv.pool.num_available:
            return [self._no_room(needs)]
        self.kv.prefixes.count_lookup(sequence, prefix)
        self.kv.attach(sequence, prefix)
        self._compute(sequence, len(tokens) - sequence.num_computed)
        self.sequences[name] = sequence
        found = f", {len(prefix.block_ids)} of them cached" if prefix.block_ids else ""
        return [f"{name}: {_count(len(tokens), 'token')} in blocks {_ids(sequence)}{found}"]

    def generate(self, name: str, first: str, *words: str) -> list[str]:
        sequence = self._sequence(name)
        lines: list[str] = []
        for token in self._tokens([first, *words]):
            needs = self.kv.blocks_needed([(sequence, 1)])
            if needs > self.kv.pool.num_available:
                return [*lines, self._no_room(needs)]
            held = len(sequence.block_ids)
            sequence.token_ids.append(token)
            plan = self._compute(sequence, 1)
            lines += [f"{name}: block {src} is shared, copied to {dst}" for src, dst in plan.copies]
            if len(sequence.block_ids) > held:
                lines.append(f"{name}: allocates block {sequence.block_ids[-1]}")
        return [*lines, f"{name}: {_count(len(sequence.token_ids), 'token')} in blocks {_ids(sequence)}"]

    def fork(self, name: str, new: str) -> list[str]:
        parent = self._sequence(name)
        self._check_new(new)
        child = Sequence(parent.request, len(parent.request.sequences), parent.token_ids[:], parent.max_length)
        parent.request.sequences.append(child)
        self.kv.fork(parent, child)
        self.sequences[new] = child
        return [f"{new}: shares blocks {_ids(child)} with {name}"]

    def free(self, name: str) -> list[str]:
        sequence = self._sequence(name)
        before = self.kv.stats()
        self.kv.free(sequence)
        sequence.request.sequences.remove(sequence)
        del self.sequences[name]
        after = self.kv.stats()
        return [
            f"{name}: {_count(after.num_free - before.num_free, 'block')} free again, "
            f"{after.num_cached - before.num_cached} kept in the prefix cache, {after.num_used} still in use"
        ]

    def show(self, name: str = "") -> list[str]:
        if name:
            return self._table(name, self._sequence(name))
        tables = [line for each, sequence in self.sequences.items() for line in self._table(each, sequence)]
        return tables or ["no sequences; allocate one"]

    def stats(self) -> list[str]:
        return stats_lines(self.kv.stats())

    # -- shared by commands --------------------------------------------------------------------------------------------

    def _compute(self, sequence: Sequence, count: int) -> StepPlan:
        plan = StepPlan()
        self.kv.grow(sequence, count, plan)
        sequence.num_computed += count
        self.kv.prefixes.seal(sequence)
        return plan

    def _table(self, name: str, sequence: Sequence) -> list[str]:
        size, words = self.kv.block_size, list(self.ids)
        lines = [f"{name}, {_count(len(sequence.token_ids), 'token')}", "  logical  physical  filled  refs  tokens"]
        for i, block in enumerate(sequence.block_ids):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            text = " ".join(words[t] for t in tokens)
            lines.append(f"  {i:<7}  {block:<8}  {f'{len(tokens)}/{size}':<6}  {self.kv.pool.refs[block]:<4}  {text}")
        return lines

    def _tokens(self, words: list[str]) -> array[int]:
        return array("i", [self.ids.setdefault(word, len(self.ids)) for word in words])

    def _sequence(self, name: str) -> Sequence:
        if name not in self.sequences:
            raise UsageError(f"no sequence {name!r}; there is {', '.join(self.sequences) or 'none'}")
        return self.sequences[name]

    def _check_new(self, name: str) -> None:
        if name in self.sequences:
            raise UsageError(f"{name!r} exists; free it, or choose another name")

    def _no_room(self, needs: int) -> str:
        pool = self.kv.pool
        return (
            f"no room: needs {_count(needs, 'block')}, {pool.num_free} free, {pool.num_cached} cached; free a sequence"
        )


def stats_lines(stats: KVStats) -> list[str]:
    return [
        f"Hits: {stats.num_hits}",
        f"Misses: {stats.num_misses}",
        f"Hit Rate: {100 * stats.hit_rate:.1f}%",
        f"Free Blocks: {stats.num_free + stats.num_cached}/{stats.num_blocks} ({stats.num_cached} of them cached)",
        f"Allocated Blocks: {stats.num_used}",
        f"Saved by Sharing: {_count(stats.num_saved_by_sharing, 'block')}",
        f"Unfilled Slots: {stats.num_unfilled_slots}",
    ]


def _takes(command: Callable[..., list[str]], arguments: list[str]) -> bool:
    try:
        inspect.signature(command).bind(*arguments)
    except TypeError:
        return False
    return True


def _ids(sequence: Sequence) -> str:
    return " ".join(map(str, sequence.block_ids))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def blocks(
    script: Annotated[
        Path | None, typer.Option(help="Read commands from this file; - is stdin.", metavar="FILE")
    ] = None,
    num_blocks: Annotated[int, typer.Option(min=1, max=1_000_000, help="Blocks in the pool.")] = 16,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens per block.")] = 4,
) -> None:
    """Drive the KV cache by hand, without a model.

    Allocate, generate, fork and free sequences, and show block tables and statistics. Every word is a token.
    With a script, the exit status is 1 if a command was invalid.
    """
    session, is_valid = Session(num_blocks, block_size), True
    try:
        if script is None:
            _run_interactively(session)
        elif str(script) == "-":
            is_valid = _run_script(session, sys.stdin)
        else:
            try:
                file = script.open(encoding="utf-8")
            except OSError as error:
                raise UsageError(f"cannot read {script}: {error.strerror}", param="script") from None
            with file:
                is_valid = _run_script(session, file)
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {script or 'stdin'}: {error}; save it as UTF-8", param="script") from None
    if not is_valid:
        raise typer.Exit(1)


def _run_interactively(session: Session) -> None:
    if on_terminal():
        print(f"{session.kv.pool.num_blocks} blocks of {session.kv.block_size} tokens; `help` lists the commands")
    while (line := read_line("blocks> ")) is not None and line.strip() not in ("exit", "quit"):
        _run_line(session, line)


def _run_script(session: Session, lines: TextIO) -> bool:
    """Run all lines; returns whether all were valid."""
    is_valid = True
    for line in lines:
        if line.strip() in ("exit", "quit"):
            break
        if line.strip():
            print(f"blocks> {line.strip()}")
            is_valid &= _run_line(session, line)
    return is_valid


def _run_line(session: Session, line: str) -> bool:
    """Run and print one line; returns whether it was valid."""
    try:
        lines, is_valid = session.run(line), True
    except UsageError as error:
        lines, is_valid = [f"error: {error}"], False
    for text in lines:
        print(text, flush=True)
    return is_valid
