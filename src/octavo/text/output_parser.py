"""Splits a model's output, as it arrives, into reasoning, content and tool calls.

    <think>weather, in Oslo</think>Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    `--------- reasoning ---------'`- content -'`------------------ a call, its arguments streamed --------------------'

Returned parts are never taken back: text that may be the start of a marker or call is held until that is decided. Text
that turns out to be no call is returned as content, whole. The cost is linear: no character is scanned again for each
new chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
HARMONY_CHANNEL = "<|channel|>"
GEMMA_CALL, GEMMA_CHANNEL = "<|tool_call>", "<|channel>"

ToolFormat = Literal["hermes", "llama3_json", "qwen3_coder", "openai", "gemma4"]
"""hermes: calls stand between <tool_call> and </tool_call> (Hermes, Qwen). llama3_json: the output is one call, or
several separated by semicolons, and nothing else (Llama 3). qwen3_coder: XML between the tags of hermes (Qwen3-Coder,
Qwen3.5; `formats.xml_calls`). openai: harmony (gpt-oss; `formats.harmony`). gemma4: `formats.gemma_calls`."""
ReasoningFormat = Literal["think", "openai_gptoss", "gemma4"]
"""think: between <think> and </think>. openai_gptoss: harmony's analysis channel. gemma4: its channel of thoughts."""

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The start of a call in the order models write it, up to the arguments; Llama often names its type."""
MAX_HEAD_CHARS = 400
_WHITE_SPACE = re.compile(r"\s*+")
_CLOSING = re.compile(r"[ \n\t}]*+")
_BETWEEN = re.compile(r"[\s,;\[\]}]*+")
"""What may stand between calls of one block."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part of an output. `index` counts calls; `name` is set in a call's first part, whose `text` is empty."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    name: str | None = None


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The tool call format that a chat template teaches; None if it teaches none."""
    if template is None or "tools" not in template:
        return None
    if HARMONY_CHANNEL in template:
        return "openai"
    if GEMMA_CALL in template:
        return "gemma4"
    if CALL in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "python_tag" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def no_tools_reason(template: str | None) -> str:
    """Why tool calls are not parsed, if `detect_tool_format` finds no format."""
    if template is None or "tools" not in template:
        return "the model's chat template has none"
    name = "Mistral's [TOOL_CALLS]" if "[TOOL_CALLS]" in template else "the format of the model's chat template"
    return f"{name} is not parsed; choose another model, or a parser by --tool-call-parser"


def detect_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """How a chat template marks reasoning; None if it does not."""
    if template is None:
        return None
    markers: dict[str, ReasoningFormat] = {
        HARMONY_CHANNEL: "openai_gptoss",
        GEMMA_CHANNEL: "gemma4",
        END_THINK: "think",
    }
    return next((name for marker, name in markers.items() if marker in template), None)


class OutputParser:
    """Incremental parser of one output.

    `reasoning_begin` and `reasoning_end`: texts of the tokens around reasoning; "": it is counted from its first token.

    reasoning            look for reasoning; `starts_in_reasoning`: the prompt has opened it already
    tools                format of tool calls; None: do not look for any
    tool_names           names of the tools; in Llama's format an output that names none of them is content
    """

    reasoning_begin, reasoning_end = "", END_THINK

    def __init__(
        self,
        *,
        reasoning: bool = False,
        starts_in_reasoning: bool = False,
        tools: ToolFormat | None = None,
        tool_names: Collection[str] = (),
    ) -> None:
        self.num_calls = 0
        self._expects_reasoning = reasoning
        self._tools = tools
        self._tool_names = tool_names
        self._buffer = ""  # undecided text, from `_at` on
        self._at = 0
        self._searched = 0  # searched up to here for the current state's marker
        self._step = self._reasoning if reasoning and starts_in_reasoning else self._begin
        self._scanner = _ObjectScanner()
        self._parts: list[OutputPart] = []
        self._prefix = ""  # white space or Llama's tag before a possible call
        self._no_content_yet = True

    @property
    def in_reasoning(self) -> bool:
        return self._step == self._reasoning

    def push(self, text: str) -> list[OutputPart]:
        """Append text; returns the parts that are certain."""
        buffer, self._buffer = self._buffer, ""
        buffer += text  # in place: the local variable holds the only reference
        self._buffer = buffer
        return self._parse()

    def finish(self) -> list[OutputPart]:
        """End of the output: returns the held text as what it turned out to be."""
        parts = self._parse()
        rest, self._buffer = self._buffer, ""
        if self._step == self._reasoning:
            return [*parts, *_text_parts("reasoning", rest)]
        if self._step == self._call_head:
            call = self._whole_call(rest)
            rest = "" if call else self._prefix + self._opening + rest
            parts += call
            self.num_calls += bool(call)
        elif self._step == self._after_tag:
            rest = self._prefix + rest
        elif self._step == self._after_arguments:
            self._further_calls(rest)
            parts, rest = parts + self._parts, ""
        elif self._step in (self._arguments, self._after_calls):
            rest = ""
        return [*parts, *_text_parts("content", rest)]

    # -- states: each consumes text and returns True if parsing can continue -------------------------------------------

    def _parse(self) -> list[OutputPart]:
        while self._step():
            pass
        if self._at:
            self._buffer, self._searched = self._buffer[self._at :], max(0, self._searched - self._at)
            self._at = 0
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        self._parts += _text_parts(kind, text)
        self._no_content_yet = self._no_content_yet and not (text and kind == "content")

    def _take(self, end: int | None = None) -> str:
        """Consumes and returns the text up to `end`."""
        taken = self._buffer[self._at : end]
        self._at = self._searched = len(self._buffer) if end is None else end
        return taken

    def _enter(self, step: Callable[[], bool]) -> bool:
        self._step, self._searched = step, self._at
        return True

    def _find(self, marker: str) -> int:
        """Position of the marker, -1 if it is not there yet. Searched text is not searched again."""
        found = self._buffer.find(marker, max(self._at, self._searched - len(marker) + 1))
        self._searched = len(self._buffer)
        return found

    def _skip_blank(self) -> int:
        """Position after the leading white space."""
        self._searched = match_end(_WHITE_SPACE, self._buffer, max(self._at, self._searched))
        return self._searched

    def _begin(self) -> bool:
        """Before the first word. White space belongs to the part that follows."""
        start = self._skip_blank()
        if start == len(self._buffer):
            return False
        if self._expects_reasoning:
            if self._buffer.startswith(THINK, start):
                self._take(start + len(THINK))
                return self._enter(self._reasoning)
            if self._may_be_prefix(THINK, start):
                return False
        if self._tools == "llama3_json":
            if self._may_be_prefix(PYTHON_TAG, start):
                return False
            if self._buffer.startswith(PYTHON_TAG, start):
                self._prefix = self._take(start + len(PYTHON_TAG))
                return self._enter(self._after_tag)
            if self._buffer[start] == "{":
                self._prefix = self._take(start)
                return self._enter(self._call_head)
        return self._enter(self._content)

    def _after_tag(self) -> bool:
        """After Llama's <|python_tag|>."""
        start = self._skip_blank()
        if start == len(self._buffer):
            return False
        self._prefix += self._take(start)
        if self._buffer[start] == "{":
            return self._enter(self._call_head)
        self._emit("content", self._prefix)
        return self._enter(self._content)

    def _reasoning(self) -> bool:
        found = self._find(END_THINK)
        if found < 0:
            self._emit("reasoning", self._take(self._certain_end(END_THINK)))
            return False
        self._emit("reasoning", self._take(found))
        self._take(found + len(END_THINK))
        self._expects_reasoning = False
        return self._enter(self._begin)

    def _content(self) -> bool:
        if self._tools != "hermes":
            self._emit("content", self._take())
            return False
        may_be_blank = self.num_calls > 0 or self._no_content_yet  # white space before a call is dropped
        start = self._skip_blank() if may_be_blank else self._at
        found = self._buffer.find(CALL, start)
        if found < 0:
            certain = self._certain_end(CALL)
            if may_be_blank and start >= certain:
                self._searched = certain
                return False
            self._emit("content", self._take(certain))
            return False
        before = self._take(found)
        self._take(found + len(CALL))
        self._prefix = "" if before.strip() else before
        self._emit("content", before.removesuffix(self._prefix))
        return self._enter(self._call_head)

    def _call_head(self) -> bool:
        """At the start of a call, until its name and the start of its arguments are known."""
        num_chars = len(self._buffer) - self._at
        found = None
        if self._searched - self._at < MAX_HEAD_CHARS:  # a longer text has been tried already
            found = _HEAD.match(self._buffer, self._at, self._at + MAX_HEAD_CHARS)
        if found and self._is_tool(found[1]):
            self._parts.append(OutputPart("call", "", self.num_calls, found[1]))
            self._prefix = ""
            self._take(found.end())
            self._scanner = _ObjectScanner()
            return self._enter(self._arguments)
        if self._tools == "hermes":
            end = self._find(END_CALL)
            if end >= 0:  # keys in another order, or no call
                before = self._take(end)
                self._take(end + len(END_CALL))
                call = self._whole_call(before)
                self._parts += call
                self.num_calls += bool(call)
                self._emit("content", "" if call else self._prefix + CALL + before + END_CALL)
                return self._enter(self._content)
        elif found or num_chars > MAX_HEAD_CHARS:
            self._tools = None
            self._emit("content", self._prefix)
            return self._enter(self._content)
        return False

    def _arguments(self) -> bool:
        end = self._scanner.end_of_object(self._buffer, self._at)
        if shown := self._take(end):
            self._parts.append(OutputPart("call", shown, self.num_calls))
        if end is None:
            return False
        self.num_calls += 1
        return self._enter(self._after_arguments)

    def _after_arguments(self) -> bool:
        """After the arguments: the rest of the call is dropped."""
        if self._tools == "hermes":
            found = self._find(END_CALL)
            if found < 0:
                return False
            self._further_calls(self._take(found))
            self._take(found + len(END_CALL))
            return self._enter(self._content)
        self._take(match_end(_CLOSING, self._buffer, self._at))
        if self._at == len(self._buffer):
            return False
        return self._enter(self._call_head if self._take(self._at + 1) == ";" else self._after_calls)

    def _after_calls(self) -> bool:
        """After the last call: everything is dropped."""
        self._take()
        return False

    def _may_be_prefix(self, marker: str, at: int) -> bool:
        """True if the text from `at` is a proper prefix of the marker."""
        return len(self._buffer) - at < len(marker) and marker.startswith(self._buffer[at:])

    def _certain_end(self, marker: str) -> int:
        """End of the text that cannot be the start of the marker."""
        for length in range(min(len(marker) - 1, len(self._buffer) - self._at), 0, -1):
            if self._buffer.endswith(marker[:length]):
                return len(self._buffer) - length
        return len(self._buffer)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _further_calls(self, rest: str) -> None:
        """The calls after the first in one block. What is no call is content; only the first call's other keys are
        dropped."""
        end = _ObjectScanner(depth=1).end_of_object(rest)
        if self._tools != "hermes" or (end is None and not rest.lstrip().startswith("{")):
            return
        end = end or 0  # else the first call lacks its last brace
        while (end := match_end(_BETWEEN, rest, end)) < len(rest):
            try:
                call, after = _DECODER.raw_decode(rest, end)
            except (ValueError, RecursionError):
                call, after = None, end
            parts = self._parts_of_call(call)
            if not parts:
                self._emit("content", rest[end:])
                return
            self._parts += parts
            self.num_calls += 1
            end = after

    @property
    def _opening(self) -> str:
        return CALL if self._tools == "hermes" else ""

    def _is_tool(self, name: str) -> bool:
        return self._tools == "hermes" or name in self._tool_names

    def _whole_call(self, text: str) -> list[OutputPart]:
        """The parts of a complete call with its keys in any order; empty if the text is no call."""
        try:
            return self._parts_of_call(json.loads(text))
        except (ValueError, RecursionError):
            return []

    def _parts_of_call(self, call: Any) -> list[OutputPart]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not self._is_tool(name):
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not is_unicode(written) and not isinstance(arguments, str):
            written = json.dumps(arguments)
        if not is_unicode(name + written):
            return []
        return [OutputPart("call", "", self.num_calls, name), OutputPart("call", written, self.num_calls)]


def quoted(text: str) -> str:
    """The string of JSON."""
    return json.dumps(text, ensure_ascii=not is_unicode(text))


def is_unicode(text: str) -> bool:
    """False for lone surrogates, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _ObjectScanner:
    """Finds the end of a JSON object that arrives in chunks."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def end_of_object(self, text: str, begin: int = 0) -> int | None:
        """Position in `text`, from `begin`, after the object; None if it continues."""
        for i in range(begin, len(text)):
            c = text[i]
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


def _text_parts(kind: Literal["reasoning", "content"], text: str) -> list[OutputPart]:
    return [OutputPart(kind, text)] if text else []


def match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Position after the match at `at`; the pattern may match the empty string."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
