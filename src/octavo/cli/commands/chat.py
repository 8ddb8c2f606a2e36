"""`octavo chat`: a conversation on the terminal. Each turn's prompt begins with all of the last, found in the cache."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from octavo.cli.commands.generate import report_failures, sampling_params
from octavo.cli.commands.models import load
from octavo.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Model, Variables, options_of
from octavo.cli.terminal import catch_interrupt, on_terminal, printable, read_line
from octavo.config import EngineArgs
from octavo.errors import TemplateError, UsageError
from octavo.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput
    from octavo.frontend.llm import LLM

HELP = "/new begins again, /exit leaves; Ctrl-C stops an answer, twice leaves"


@options_of(EngineArgs, ENGINE, into="engine")
@options_of(SamplingParams, SAMPLING, into="sampling")
def chat(
    *,
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    chat_template_kwargs: Variables = None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. Answers are streamed, and the conversation so far is found in the prefix cache."""
    sampling = {"max_tokens": None} | sampling  # an answer may be as long as fits, unless told
    params = SamplingParams(**sampling)
    if params.n != 1:
        raise UsageError(f"n is {params.n}; a conversation goes on from one answer: leave --n out", param="n")
    with load(model, engine) as llm:
        if llm.get_tokenizer().chat_template is None:
            raise TemplateError(
                f"{model} has no chat template; give one with --chat-template, or complete plain text with octavo "
                "generate",
                param="model",
            )
        Conversation(llm, sampling_params(llm, sampling), system, chat_template_kwargs or {}).run()


class Conversation:
    """Messages in, answers out, until the reader has enough."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, variables: Mapping[str, Any] | None = None
    ) -> None:
        self.llm = llm
        self.params = params
        self.variables = variables or {}
        self.opening: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def run(self) -> None:
        terminal = on_terminal()
        if terminal:
            print(HELP)
        just_interrupted = False
        while True:
            try:
                line = read_line("> ")
            except KeyboardInterrupt:
                if just_interrupted or not terminal:
                    raise
                just_interrupted = True
                print("(Ctrl-C again leaves)")
                continue
            if line is None or line.strip() in ("/exit", "/quit"):
                return
            just_interrupted = False
            if line.strip() == "/new":
                self.messages = list(self.opening)
            elif line.strip() == "/help":
                print(HELP)
            elif line.strip():
                just_interrupted = self.ask(line)

    def ask(self, text: str) -> bool:
        """Answer one message; whether Ctrl-C cut the answer short. What was said stays in the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        started = time.perf_counter()
        first = None
        output: RequestOutput | None = None
        shown = 0
        with catch_interrupt() as interrupt:
            try:
                stream = self.llm.stream([chat_prompt(self.llm, messages, self.variables)], self.params)
            except UsageError as error:  # too long a conversation, most of all
                print(f"error: {error}; /new begins again", file=sys.stderr)
                return False
            # Closing it aborts the request, whoever leaves and why; its full blocks stay in the cache.
            with contextlib.closing(cast("Generator[RequestOutput]", stream)) as answers:
                for output in answers:
                    first = first or time.perf_counter()
                    answer = output.outputs[0].text
                    print(printable(answer[shown:]), end="", flush=True)
                    shown = len(answer)
                    if interrupt.pressed:
                        break
        print()
        if output is not None and not report_failures([output]):
            self.messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
            self._tell(output, started, first or started)
        return interrupt.pressed

    def _tell(self, output: RequestOutput, started: float, first: float) -> None:
        from rich.console import Console

        num_tokens = len(output.outputs[0].token_ids)
        decode_s = time.perf_counter() - first
        rate = f"{(num_tokens - 1) / decode_s:.1f} tokens/s, " if num_tokens > 1 and decode_s > 0 else ""
        cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
        line = f"{num_tokens} tokens, {rate}first after {first - started:.2f} s, {cached}"
        Console(stderr=True, highlight=False).print(line, style="dim")


def chat_prompt(llm: LLM, messages: list[dict[str, str]], variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Messages as the prompt that the model's chat template makes of them, up to where the answer begins."""
    text, ids = llm.get_tokenizer().encode_chat(messages, **(variables or {}))
    return {"prompt": text, "prompt_token_ids": ids}
