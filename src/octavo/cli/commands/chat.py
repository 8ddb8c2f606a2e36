"""`octavo chat`: a conversation on the terminal. Each prompt begins with the previous turns, a prefix cache hit."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from octavo.cli.commands.generate import report_failures, sampling_params
from octavo.cli.commands.models import load
from octavo.cli.options import DEFAULT_MODEL, Model, Variables, options_of
from octavo.cli.terminal import catch_interrupt, on_terminal, printable, read_line
from octavo.config import EngineArgs
from octavo.errors import TemplateError, UsageError
from octavo.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput
    from octavo.frontend.llm import LLM

COMMAND = re.compile(r"/\w+(\s.*)?")
"""A line whose first word has one slash, at its beginning: a command, not a message."""
HELP = "/new: new conversation; /exit: exit; Ctrl-C: stop the answer, twice: exit"
MAX_TOKENS = 1024
"""Of an answer, unless the model or the user sets it: a small model may never end one."""


@options_of(EngineArgs, into="engine")
@options_of(SamplingParams, into="sampling", defaults={"max_tokens": MAX_TOKENS})
def chat(
    *,
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    chat_template_kwargs: Variables = None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Chat with a model. Answers are streamed; the prefix cache holds the conversation so far."""
    params = SamplingParams(**sampling)
    if params.n != 1:
        raise UsageError(f"n is {params.n}; a conversation continues with one answer; remove --n", param="n")
    with load(model, engine) as llm:
        if llm.input_processor.tokenizer.chat_template is None:
            raise TemplateError(
                f"{model} has no chat template; give one with --chat-template, or complete plain text with octavo "
                "generate",
                param="model",
            )
        if "max_tokens" not in llm.sampling_defaults.values:
            sampling = {"max_tokens": MAX_TOKENS} | sampling
        Conversation(llm, sampling_params(llm, sampling), system, chat_template_kwargs or {}).run()


class Conversation:
    """A conversation: reads messages and streams answers until the user exits."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, variables: Mapping[str, Any] | None = None
    ) -> None:
        self.llm = llm
        self.params = params
        self.variables = variables or {}
        self.initial_messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.initial_messages)

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
                print("(press Ctrl-C again to exit)")
                continue
            if line is None or line.strip() in ("/exit", "/quit"):
                return
            just_interrupted = False
            if line.strip() == "/new":
                self.messages = list(self.initial_messages)
            elif line.strip() == "/help":
                print(HELP)
            elif COMMAND.fullmatch(line):
                print(f"no command {line.strip():.40}; {HELP}; a space before the / sends it", file=sys.stderr)
            elif line.strip():
                just_interrupted = self.answer_message(line)

    def answer_message(self, text: str) -> bool:
        """Answer one message. Returns True if Ctrl-C stopped the answer; the conversation keeps the partial answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        started = time.perf_counter()
        first = None
        output: RequestOutput | None = None
        shown = 0
        with catch_interrupt() as interrupt:
            try:
                stream = self.llm.stream([chat_prompt(self.llm, messages, self.variables)], self.params)
            except UsageError as error:  # usually the conversation is too long
                print(f"error: {error}; /new begins a new conversation", file=sys.stderr)
                return False
            # On any exit, closing the stream aborts the request; its full blocks stay in the prefix cache.
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
            self._print_stats(output, started, first or started, interrupted=interrupt.pressed)
        return interrupt.pressed

    def _print_stats(self, output: RequestOutput, started: float, first: float, *, interrupted: bool) -> None:
        from rich.console import Console

        num_tokens = len(output.outputs[0].token_ids)
        decode_s = time.perf_counter() - first
        state = "interrupted: " if interrupted else ""
        if output.outputs[0].finish_reason == "length":
            state = f"cut at {'--max-tokens' if num_tokens == self.params.max_tokens else 'the end of the context'}: "
        rate = f"{(num_tokens - 1) / decode_s:.1f} tokens/s, " if num_tokens > 1 and decode_s > 0 else ""
        cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
        line = f"{state}{num_tokens} tokens, {rate}first after {first - started:.2f} s, {cached}"
        Console(stderr=True, highlight=False).print(line, style="dim", soft_wrap=True)


def chat_prompt(llm: LLM, messages: list[dict[str, str]], variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Render messages with the model's chat template, up to the beginning of the answer."""
    text, ids = llm.input_processor.tokenizer.encode_chat(messages, **(variables or {}))
    return {"prompt": text, "prompt_token_ids": ids}
