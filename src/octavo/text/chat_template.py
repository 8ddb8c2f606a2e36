"""Renders a conversation to the prompt text a model was trained on, with the Jinja template from its checkpoint.

A template is an untrusted program. It runs in Jinja's immutable sandbox, which blocks attributes that lead to Python
and changes to its inputs. Its output has 1 MiB at most. On a process's main thread it runs for one second of CPU time
at most; on another thread nothing can interrupt it. A process that only renders also limits its memory.

The environment is the one templates are written for: trimmed blocks, `break` and `continue`, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, and the `{% generation %}` tag, which has no effect here.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import CheckpointError, TemplateError

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 20
MAX_RENDER_S = 1.0
MAX_RENDER_BYTES: int | None = None
"""Address space that a template may use beyond that of the process. None: no limit, since other threads would fail."""
END_SENTINEL = "\ufdd1 "
"""Appended to the final message to find its end in the output; the space shows if the template strips messages."""
SAMPLE_MESSAGES = ({"role": "user", "content": "Hi"},)


def render(
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: dict[str, str],
    **kwargs: Any,
) -> str:
    """The prompt text of a conversation.

    `add_generation_prompt` opens the assistant's turn. `continue_final_message` leaves the final message open for the
    model to continue. `special_tokens` (bos_token, eos_token, ...) and `kwargs` (`enable_thinking`, ...) are the
    template's variables. Raises `TemplateError`, one line, if the template rejects the messages or fails.
    """
    if not isinstance(messages, (list, tuple)) or not messages or not all(isinstance(m, dict) for m in messages):
        text = "messages must be a list of at least one object with role and content"
        raise TemplateError(text, param="messages", code="invalid_value")
    if continue_final_message:
        if add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other; choose one"
            raise TemplateError(text, param="continue_final_message", code="invalid_value")
        messages = [*messages[:-1], _with_text_end(messages[-1], END_SENTINEL)]
    variables = {**special_tokens, **kwargs, "messages": messages, "tools": tools or None}
    text = _run(_compile(template), {**variables, "add_generation_prompt": add_generation_prompt})
    return _cut_after_final_message(text) if continue_final_message else text


def check(template: str) -> None:
    """Check an operator's template before the first request.

    Raises `TemplateError` if it does not compile, or breaks the sandbox or its limits on a one-word conversation. A
    template that merely rejects that conversation passes.
    """
    program = _compile(template)
    try:
        _run(program, {"messages": list(SAMPLE_MESSAGES), "tools": None, "add_generation_prompt": True})
    except TemplateError as e:
        if isinstance(e.__cause__, SecurityError | RecursionError):
            raise


def load(source: str) -> str:
    """The text of an operator's template, given as a file name or as the template itself, checked with `check`.

    Raises `CheckpointError` for an unreadable file or a template that `check` rejects.
    """
    try:
        inline = any(c in source for c in "{}\n")  # file names lack these; nearly every template has one
        template = source if inline else Path(source).read_text(encoding="utf-8")
        check(template)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise CheckpointError(f"cannot read the chat template {source}: {reason}; pass a file of Jinja source") from e
    except TemplateError as e:
        raise CheckpointError(f"{e}; pass another template, or none to use the model's", param="chat_template") from e
    return template


def _run(program: jinja2.Template, variables: dict[str, Any]) -> str:
    parts, num_chars = [], 0
    try:
        with _limits():
            for part in program.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"its output is longer than {MAX_OUTPUT_CHARS:,} characters")
                parts.append(part)
    except _Refused as e:
        text = f"the chat template rejects the messages: {_one_line(e)}"
        raise TemplateError(text, param="messages", code="template_error") from e
    except Exception as e:  # a template can raise anything that Python can
        kind = "template_timeout" if isinstance(e, _RenderTimeoutError) else "template_error"
        raise TemplateError(f"the chat template fails: {_one_line(e)}", param="messages", code=kind) from e
    return "".join(parts)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Raise `SecurityError` after `MAX_RENDER_S`, or beyond `MAX_RENDER_BYTES`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running, deadline = True, time.thread_time() + MAX_RENDER_S

    def stop(*_: object) -> None:
        if running and time.thread_time() >= deadline:  # the timer counts the time of all threads
            raise _RenderTimeoutError(f"it runs for longer than {MAX_RENDER_S:g} s")

    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_RENDER_S, 0.1)  # again and again: Jinja and callbacks of gc drop some
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if MAX_RENDER_BYTES is not None:
            num_pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = num_pages * resource.getpagesize() + MAX_RENDER_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        yield
    except MemoryError as e:
        raise SecurityError("it needs too much memory") from e
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_SOURCE_CHARS:
        raise TemplateError(
            f"the chat template has {len(template):,} characters, the limit is {MAX_SOURCE_CHARS:,}; shorten it",
            param="chat_template",
            code="template_error",
        )
    try:
        with _limits():  # Jinja evaluates constant expressions
            return _ENVIRONMENT.from_string(template)
    except jinja2.TemplateSyntaxError as e:
        text = f"the chat template has a syntax error in line {e.lineno}: {_one_line(e)}"
        raise TemplateError(text, param="chat_template", code="template_error") from e
    except Exception as e:  # nested too deep, ...
        text = f"the chat template cannot be compiled: {_one_line(e)}"
        raise TemplateError(text, param="chat_template", code="template_error") from e


def _one_line(e: BaseException) -> str:
    text = " ".join(str(e).split()) or type(e).__name__
    return re.sub("[\ufdd0\ufdd1]", "", text)[:300]


def _with_text_end(message: dict[str, Any], end: str) -> dict[str, Any]:
    """The message with `end` appended to its text, which is a string or the last text part of a list."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + end}
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        part = content[-1]
        if isinstance(part.get("text"), str):
            return {**message, "content": [*content[:-1], {**part, "text": part["text"] + end}]}
    text = "continue_final_message needs a final message that ends in text; remove the option"
    raise TemplateError(text, param="messages", code="invalid_value")


def _cut_after_final_message(text: str) -> str:
    at = text.rfind(END_SENTINEL.strip())
    if at < 0:
        text = "the chat template omits the final message; remove continue_final_message"
        raise TemplateError(text, param="messages", code="template_error")
    before = text[:at] if text.startswith(END_SENTINEL, at) else text[:at].rstrip()
    # A template may render the message several times.
    return before.replace(END_SENTINEL, "").replace(END_SENTINEL.strip(), "")


# ---- the sandbox


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _RenderTimeoutError(SecurityError):
    """The template exceeds the time limit."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it renders its
    content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's `tojson` escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.datetime.now().strftime(form),
}
