"""`octavo demo`: answers eight questions in one batch and prints KV cache statistics."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from octavo.cli.commands.chat import chat_prompt
from octavo.cli.commands.generate import report_failures
from octavo.cli.commands.models import load
from octavo.cli.options import DEFAULT_MODEL, Model, options_of
from octavo.cli.terminal import printable
from octavo.config import EngineArgs
from octavo.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from octavo.core.cache.kv_stats import KVStats
    from octavo.engine.outputs import RequestOutput
    from octavo.frontend.llm import LLM

# Fills several blocks, which three requests share: they are computed and stored once.
LIBRARIAN = (
    "You are the librarian of a small public library by the sea. You answer visitors in two or three short, friendly "
    "sentences. You never invent a title, you prefer plain words to technical ones, and you like to name one thing "
    "that the visitor could look at next. The library opens at nine in the morning and closes at six in the evening, "
    "children are welcome at any time, nobody pays anything, and every question is a good question. When somebody asks "
    "about science, give an example from daily life. When somebody asks about history, say roughly when it happened. "
    "When you are not sure of something, say so."
)
QUESTIONS: tuple[tuple[str | None, str], ...] = (
    (LIBRARIAN, "Why is the sky blue?"),
    (LIBRARIAN, "What is photosynthesis?"),
    (LIBRARIAN, "How do bees make honey?"),
    (None, "What is the capital of France, and what is it known for?"),
    (None, "Explain what a computer's memory is for, in one sentence."),
    (None, "What is a prime number?"),
    (None, "Write one sentence about a lighthouse."),
    (None, "What does a baker do?"),
)


class Measurements(NamedTuple):
    """Measurements of a run."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    elapsed_s: float
    first_token_s: list[float]
    peak: KVStats  # at the maximum of used blocks
    last: KVStats


@options_of(EngineArgs, into="engine")
def demo(
    *,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 56,
    engine: dict[str, Any],
) -> None:
    """Answer eight questions in one batch, and show the KV cache's use.

    Three of the questions share a long system prompt. It is computed once, although all eight arrive at the same time.
    """
    with load(model, engine) as llm:
        measured = measure(llm, max_tokens)
    from rich.console import Console

    Console().print(report(measured))


def measure(llm: LLM, max_tokens: int) -> Measurements:
    """Submit all questions at once; show each answer while it grows, and again when it is complete."""
    from rich.console import Console
    from rich.live import Live

    prompts = [chat_prompt(llm, _messages(system, question)) for system, question in QUESTIONS]
    question_index = {prompt["prompt"]: i for i, prompt in enumerate(prompts)}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    console = Console(highlight=False)
    unfinished: dict[int, RequestOutput] = {}
    done: list[RequestOutput] = []
    first_token_s: dict[int, float] = {}
    peak = llm.kv_stats()
    started = time.perf_counter()
    # Without a terminal, only complete answers are printed.
    with Live(console=console, transient=True) if console.is_terminal else contextlib.nullcontext() as live:
        for output in llm.stream(prompts, params):
            i = question_index[output.prompt or ""]
            if output.outputs[0].token_ids:
                first_token_s.setdefault(i, time.perf_counter() - started)
            peak = max(peak, llm.kv_stats(), key=lambda stats: stats.num_used)
            unfinished[i] = output
            if output.finished:
                done.append(unfinished.pop(i))
                console.print(_finished_answer(QUESTIONS[i][1], output), end="\n\n")
            if live is not None:
                live.update(_live_table(unfinished))
    if report_failures(done):
        raise typer.Exit(1)
    return Measurements(
        num_tokens=sum(len(output.outputs[0].token_ids) for output in done),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in done),
        num_cached_tokens=sum(output.num_cached_tokens for output in done),
        elapsed_s=time.perf_counter() - started,
        first_token_s=sorted(first_token_s.values()),
        peak=peak,
        last=llm.kv_stats(),
    )


def report(run: Measurements) -> Table:
    """The summary table."""
    from rich.table import Table

    peak, last = run.peak, run.last
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows = {
        "tokens generated": f"{run.num_tokens} in {run.elapsed_s:.1f} s",
        "tokens/s": f"{run.num_tokens / run.elapsed_s:.1f}",
        "time to first token": f"{run.first_token_s[0]:.2f} s, the last of eight {run.first_token_s[-1]:.2f} s",
        "blocks used at peak": f"{peak.num_used} of {peak.num_blocks:,}, {peak.block_size} tokens each",
        "blocks saved by sharing": f"{peak.num_saved_by_sharing}, at that peak",
        "prefix-cache hit rate": f"{last.hit_rate:.1%} of blocks; {run.num_cached_tokens} of "
        f"{run.num_prompt_tokens} prompt tokens were not computed",
        "unfilled slots": f"{peak.num_unfilled_slots} of {peak.num_used * peak.block_size}, at that peak",
        "blocks used now": f"{last.num_used}, {last.num_cached} kept in the cache",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _messages(system: str | None, question: str) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": question}]


def _finished_answer(question: str, output: RequestOutput) -> Text:
    from rich.text import Text

    answer = output.outputs[0]
    ellipsis = " ..." if answer.finish_reason == "length" else ""
    return Text.assemble((question, "bold"), "\n", printable(answer.text).strip() + ellipsis)


def _live_table(unfinished: dict[int, RequestOutput]) -> Table:
    """Unfinished answers, one line each: the question and the answer's last 60 characters."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, expand=True)
    table.add_column(width=28, no_wrap=True, style="bold")
    table.add_column(ratio=1, no_wrap=True)
    for i in sorted(unfinished):
        tail = " ".join(printable(unfinished[i].outputs[0].text).split())[-200:]
        table.add_row(QUESTIONS[i][1], f"...{tail[-60:]}" if len(tail) > 60 else tail)
    return table
