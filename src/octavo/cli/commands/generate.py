"""`octavo generate`: completes prompts in one continuous batch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from octavo.cli.commands.models import load
from octavo.cli.options import DEFAULT_MODEL, Model, options_of
from octavo.cli.terminal import catch_interrupt, printable
from octavo.config import EngineArgs
from octavo.errors import PromptError
from octavo.params.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import Logprob, RequestOutput
    from octavo.frontend.llm import LLM

Prompt: TypeAlias = str | dict[str, Any]
"""Text, {"prompt_token_ids": [...]}, or {"prompt": text, "parse_special": True}."""


@options_of(EngineArgs, into="engine")
@options_of(SamplingParams, into="sampling")
def generate(
    *,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be repeated.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt per line, text or JSON with "prompt" or "prompt_token_ids"; - reads stdin.',
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Parse special tokens in prompts. Default: they are text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete prompts in one continuous batch.

    A single prompt is streamed to a terminal. With several prompts, each result is printed when it is complete, so that
    Ctrl-C loses none. --json prints one object per line: prompt, text, token_ids, finish_reason, num_cached_tokens;
    with several prompts prompt_index, from 0; with --logprobs and --prompt-logprobs also these.
    """
    prompts: list[Prompt] = list(prompt or [])
    if prompts_file is not None:
        prompts += read_prompts(prompts_file)
    if not prompts:
        raise PromptError("no prompt; give --prompt TEXT or --prompts-file FILE", param="prompt")

    if parse_special:
        prompts = [{"prompt": p, "parse_special": True} if isinstance(p, str) else p for p in prompts]
    SamplingParams(**sampling)  # refuse invalid options before the model is loaded
    with load(model, engine) as llm:
        params = sampling_params(llm, sampling)
        shows_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if len(prompts) == 1 and params.n == 1 and sys.stdout.isatty() and not as_json and not shows_logprobs:
            failed = stream(llm, prompts[0], params)
        else:
            failed = show_all(llm, prompts, params, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def sampling_params(llm: LLM, options: dict[str, Any]) -> SamplingParams:
    """The command line's options over the model's sampling defaults, which are printed on stderr."""
    if defaults := str(llm.sampling_defaults):
        print(defaults, file=sys.stderr)
    return dataclasses.replace(llm.get_default_sampling_params(), **options)


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file; "-" is stdin. All lines are JSON objects, or none is.

    Raises `PromptError` with the line number for an invalid prompt.
    """
    try:
        text = sys.stdin.buffer.read().decode() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}", param="prompts_file") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 (byte {error.start})", param="prompts_file") from None
    # Not splitlines(): a prompt may contain characters, such as U+2028, that only Unicode counts as line ends.
    lines = [(i, line) for i, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptError(f"{path} has no prompt; write one per line", param="prompts_file")
    if not _is_object(lines[0][1]):
        if number := next((i for i, line in lines if line.startswith("{") and _is_object(line)), 0):
            text = f"{path}, line {number} is a JSON object, but line {lines[0][0]} is text; write all as JSON objects"
            raise PromptError(text, param="prompts_file")
        return [line.rstrip("\r") for _, line in lines]
    return [_prompt_of(line, f"{path}, line {i}") for i, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _prompt_of(line: str, location: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{location} is not JSON: {error}", param="prompts_file") from None
    if isinstance(record, dict):
        if isinstance(text := record.get("prompt"), str):
            return text
        if isinstance(ids := record.get("prompt_token_ids"), list):
            return {"prompt_token_ids": ids}
    raise PromptError(f'{location} has neither a "prompt" (text) nor "prompt_token_ids"', param="prompts_file")


def stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> bool:
    """Stream one completion to stdout. Returns True if it failed."""
    shown = 0
    for output in llm.stream([prompt], params):
        completion = output.outputs[0]
        print(printable(completion.text[shown:]), end="", flush=True)
        shown = len(completion.text)
    print()
    return report_failures([output])


def show_all(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, as_json: bool) -> bool:
    """Print each request's result when it finishes. Returns True if any failed."""
    from tqdm import tqdm

    params = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    titled = len(prompts) > 1 or params.n > 1
    failed: list[RequestOutput] = []
    no_bar = not sys.stderr.isatty() or sys.stdout.isatty()  # results on a terminal show the progress
    with (
        tqdm(total=len(prompts), desc="Processed prompts", unit="req", disable=no_bar, dynamic_ncols=True) as bar,
        contextlib.closing(cast("Generator[RequestOutput]", llm.stream(prompts, params))) as outputs,
    ):
        for output in outputs:
            with catch_interrupt() as interrupt:  # do not interrupt a result
                if as_json:
                    show_json(output, index=None if len(prompts) == 1 else int(output.request_id))
                else:
                    show_text(output, titled=titled)
                sys.stdout.flush()
            if interrupt.pressed:
                raise KeyboardInterrupt
            bar.update(1)
            if has_failed(output):
                failed.append(output)
    return report_failures(failed)


def show_text(output: RequestOutput, *, titled: bool) -> None:
    """Print completions, below their prompt if `titled`."""
    if titled:
        print(f">>> {output.prompt if output.prompt is not None else list(output.prompt_token_ids)}")
    for completion in output.outputs:
        print(printable(completion.text) if sys.stdout.isatty() else completion.text, end="\n\n" if titled else "\n")
        if completion.logprobs is not None:
            print_table(completion.logprobs, completion.token_ids)
    echoed = output.outputs[0].logprobs is not None and None in output.outputs[0].logprobs
    if output.prompt_logprobs is not None and not echoed:
        print("prompt")
        print_table(output.prompt_logprobs, output.prompt_token_ids)


def print_table(positions: Sequence[Mapping[int, Logprob] | None], token_ids: Sequence[int]) -> None:
    """Print one line per token: the token, its log-probability and rank, and the top tokens at its position."""
    from rich.console import Console
    from rich.table import Table

    table = Table("token", "logprob", "rank", "top", box=None, pad_edge=False)
    for token_id, logprobs in zip(token_ids, positions, strict=True):
        row = logprob_record(token_id, logprobs)
        top = "  ".join(f"{_quoted(each['token'])} {each['logprob']:.3f}" for each in row.get("top", []))
        figures = (f"{row['logprob']:.3f}", str(row["rank"])) if row["logprob"] is not None else ("", "")
        table.add_row(_quoted(row["token"]) if row["token"] is not None else str(token_id), *figures, top)
    Console(markup=False, highlight=False).print(table)


def _quoted(token: str) -> str:
    """The token in quotes, which makes spaces and line ends visible."""
    return json.dumps(token, ensure_ascii=False)


def logprob_record(token_id: int, logprobs: Mapping[int, Logprob] | None) -> dict[str, Any]:
    """The log-probabilities of one position as JSON. A prompt's first token has none."""
    if logprobs is None or token_id not in logprobs:
        return {"token_id": token_id, "token": None, "logprob": None, "rank": None}
    entry = logprobs[token_id]
    ranked = sorted(logprobs.items(), key=lambda item: (item[1].rank or 0, item[0]))
    top = [{"token_id": i, "token": each.decoded_token or "", "logprob": each.logprob} for i, each in ranked]
    record = {"token_id": token_id, "token": entry.decoded_token or "", "logprob": entry.logprob, "rank": entry.rank}
    return record | ({"top": top} if len(top) > 1 else {})


def show_json(output: RequestOutput, *, index: int | None) -> None:
    """Print JSON records. index: position of the prompt if there are several; requests finish in any order."""
    position = {} if index is None else {"prompt_index": index}
    for record in records(output):
        print(json.dumps(record | position, ensure_ascii=False))


def records(output: RequestOutput) -> Iterator[dict[str, Any]]:
    """The objects that --json prints, one per completion, with an index if a prompt has several."""
    for completion in output.outputs:
        record: dict[str, Any] = {
            "prompt": output.prompt if output.prompt is not None else list(output.prompt_token_ids),
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "num_cached_tokens": output.num_cached_tokens,
        }
        if completion.logprobs is not None:
            record["logprobs"] = list(map(logprob_record, completion.token_ids, completion.logprobs))
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = list(map(logprob_record, output.prompt_token_ids, output.prompt_logprobs))
        yield record | ({"index": completion.index} if len(output.outputs) > 1 else {})


def has_failed(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "error" for completion in output.outputs)


def report_failures(outputs: Sequence[RequestOutput]) -> bool:
    """Print one line on stderr for each failed request. Returns True if there is one."""
    failed = [output for output in outputs if has_failed(output)]
    sys.stdout.flush()
    for output in failed:
        print(f"error: request {output.request_id} failed: {output.outputs[0].stop_reason}", file=sys.stderr)
    return bool(failed)
