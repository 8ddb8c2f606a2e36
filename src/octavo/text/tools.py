"""An answer's text taken apart as it arrives: reasoning, what is said, and calls of tools.

    <think>weather, in Oslo</think>Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    `--------- reasoning ---------'`- content -'`------------------ a call, its arguments streamed --------------------'

Nothing shown is ever taken back: what may be the beginning of a marker, or of a call, is held until it is decided. What
looked like a call and is none comes out as content, whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

ToolFormat = Literal["hermes", "llama3_json"]
"""hermes: calls stand between <tool_call> and </tool_call> (Hermes, Qwen). llama3_json: the answer is a call, or
several with semicolons between, and nothing else (Llama 3)."""

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The beginning of a call in the order in which models write it, up to the arguments; Llama often names its type."""
MAX_HEAD_CHARS = 400


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. `index` counts calls; `name` is set in a call's first piece, whose `text` is empty."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    name: str | None = None


def tool_format(template: str | None) -> ToolFormat | None:
    """How a model writes calls, from what its chat template shows it; None: it was not taught to."""
    if template is None or "tools" not in template:
        return None
    if CALL in template:
        return "hermes"
    if "python_tag" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def thinks(template: str | None) -> bool:
    """Whether a model sets its reasoning apart, as its chat template has it."""
    return template is not None and END_THINK in template


class AnswerParser:
    """Takes one answer apart.

    think          look for reasoning; `in_think`: the prompt has opened it already
    tools          how calls are written, None: do not look for any
    names          of the tools; an answer in Llama's format that names none of them is content
    """

    def __init__(
        self,
        *,
        think: bool = False,
        in_think: bool = False,
        tools: ToolFormat | None = None,
        names: Collection[str] = (),
    ) -> None:
        self.num_calls = 0
        self._think = think
        self._tools = tools
        self._names = names
        self._text = ""  # what is not decided
        self._step = self._reasoning if think and in_think else self._begin
        self._scanner = _ObjectScanner()
        self._out: list[Part] = []
        self._blank = ""  # white space, or Llama's tag, before what may be a call
        self._is_fresh = True  # no content has been told

    @property
    def in_reasoning(self) -> bool:
        return self._step == self._reasoning

    def push(self, text: str) -> list[Part]:
        """The pieces that are certain now."""
        self._text += text
        return self._decided()

    def finish(self) -> list[Part]:
        """No more will come: what was held, as what it turns out to be."""
        parts = self._decided()
        if self._step == self._reasoning:
            rest, self._text = self._text, ""
            return [*parts, *_piece("reasoning", rest)]
        if self._step == self._head:
            call = self._whole_call(self._text)
            rest = "" if call else self._blank + self._opening + self._text
            parts += call
            self.num_calls += bool(call)
        elif self._step in (self._arguments, self._behind, self._over):
            rest = ""
        else:
            rest = self._text
        self._text = ""
        return [*parts, *_piece("content", rest)]

    # -- states: each takes what it can off the text, and says whether to ask again ------------------------------------

    def _decided(self) -> list[Part]:
        while self._step():
            pass
        parts, self._out = self._out, []
        return parts

    def _tell(self, kind: Literal["reasoning", "content"], text: str) -> None:
        self._out += _piece(kind, text)
        self._is_fresh = self._is_fresh and not (text and kind == "content")

    def _begin(self) -> bool:
        """Before the first word. White space there belongs to whatever follows."""
        head = self._text.lstrip()
        if not head:
            return False
        if self._think:
            if head.startswith(THINK):
                self._text = head[len(THINK) :]
                self._step = self._reasoning
                return True
            if THINK.startswith(head):
                return False
        if self._tools == "llama3_json":
            if PYTHON_TAG.startswith(head):
                return False
            head = head.removeprefix(PYTHON_TAG)
            if not head.lstrip():
                return False
            if head.lstrip().startswith("{"):
                self._blank, self._text = self._text.removesuffix(head), head
                self._step = self._head
                return True
        self._step = self._content
        return True

    def _reasoning(self) -> bool:
        before, found, after = self._text.partition(END_THINK)
        if not found:
            before, self._text = _held_back(self._text, END_THINK)
            self._tell("reasoning", before)
            return False
        self._tell("reasoning", before)
        self._text, self._think = after, False
        self._step = self._begin
        return True

    def _content(self) -> bool:
        if self._tools != "hermes":
            self._tell("content", self._text)
            self._text = ""
            return False
        before, found, after = self._text.partition(CALL)
        if not found:
            before, self._text = _held_back(self._text, CALL)
            if (self.num_calls or self._is_fresh) and not before.strip():
                self._text = before + self._text  # white space before calls is nobody's
                return False
            self._tell("content", before)
            return False
        self._blank = "" if before.strip() else before
        self._tell("content", before.removesuffix(self._blank))
        self._text = after
        self._step = self._head
        return True

    def _head(self) -> bool:
        """At the beginning of a call: until its name is known and its arguments begin."""
        found = _HEAD.match(self._text)
        if found and self._is_tool(found[1]):
            self._out.append(Part("call", "", self.num_calls, found[1]))
            self._blank, self._text = "", self._text[found.end() :]
            self._scanner = _ObjectScanner()
            self._step = self._arguments
            return True
        if self._tools == "hermes":
            before, over, after = self._text.partition(END_CALL)
            if over:  # in another order, or no call at all
                call = self._whole_call(before)
                self._out += call
                self.num_calls += bool(call)
                self._tell("content", "" if call else self._blank + CALL + before + END_CALL)
                self._text = after
                self._step = self._content
                return True
        elif found or len(self._text) > MAX_HEAD_CHARS:
            self._tools, self._text = None, self._blank + self._text
            self._step = self._content
            return True
        return False

    def _arguments(self) -> bool:
        end = self._scanner.end_of_object(self._text)
        shown = self._text if end is None else self._text[:end]
        if shown:
            self._out.append(Part("call", shown, self.num_calls))
        self._text = self._text[len(shown) :]
        if end is None:
            return False
        self.num_calls += 1
        self._step = self._behind
        return True

    def _behind(self) -> bool:
        """Behind the arguments: the rest of the call, of which nothing is told."""
        if self._tools == "hermes":
            _, found, after = self._text.partition(END_CALL)
            if not found:
                self._text = _held_back(self._text, END_CALL)[1]
                return False
            self._text = after
            self._step = self._content
            return True
        self._text = self._text.lstrip(" \n\t}")
        if self._text:
            self._step = self._head if self._text.startswith(";") else self._over
            self._text = self._text[1:]
        return bool(self._text)

    def _over(self) -> bool:
        """Behind the last call: nothing of it is told."""
        self._text = ""
        return False

    # -- calls ---------------------------------------------------------------------------------------------------------

    @property
    def _opening(self) -> str:
        return CALL if self._tools == "hermes" else ""

    def _is_tool(self, name: str) -> bool:
        return self._tools == "hermes" or name in self._names

    def _whole_call(self, text: str) -> list[Part]:
        """A call that is all there, in whatever order; nothing if it is none."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return []
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not self._is_tool(name):
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not is_unicode(written) and not isinstance(arguments, str):
            written = json.dumps(arguments)
        if not is_unicode(name + written):
            return []
        return [Part("call", "", self.num_calls, name), Part("call", written, self.num_calls)]


def is_unicode(text: str) -> bool:
    """Not so of half a surrogate pair, which JSON can spell and nothing that is sent can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _ObjectScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_of_object(self, text: str) -> int | None:
        """Where in `text` the object ends; None: further on."""
        for i, c in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._in_string = False
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _piece(kind: Literal["reasoning", "content"], text: str) -> list[Part]:
    return [Part(kind, text)] if text else []


def _held_back(text: str, marker: str) -> tuple[str, str]:
    """`text` up to where it may be the beginning of `marker`, and from there."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""
