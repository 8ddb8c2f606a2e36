"""An answer's text taken apart as it arrives: reasoning, what is said, and calls of tools.

    <think>weather, in Oslo</think>Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    `--------- reasoning ---------'`- content -'`------------------ a call, its arguments streamed --------------------'

Nothing shown is ever taken back: what may be the beginning of a marker, or of a call, is held until it is decided. What
looked like a call and is none comes out as content, whole. No character is looked at again for every piece that comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
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
_BLANK = re.compile(r"\s*+")
_CLOSING = re.compile(r"[ \n\t}]*+")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. `index` counts calls; `name` is set in a call's first piece, whose `text` is empty."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    name: str | None = None


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """How a model writes calls, from what its chat template shows it; None: it was not taught to."""
    if template is None or "tools" not in template:
        return None
    if CALL in template:
        return "hermes"
    if "python_tag" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def has_reasoning(template: str | None) -> bool:
    """Whether a model sets its reasoning apart, as its chat template has it."""
    return template is not None and END_THINK in template


class OutputParser:
    """Takes one answer apart.

    think          look for reasoning; `starts_in_reasoning`: the prompt has opened it already
    tools          how calls are written, None: do not look for any
    names          of the tools; an answer in Llama's format that names none of them is content
    """

    def __init__(
        self,
        *,
        think: bool = False,
        starts_in_reasoning: bool = False,
        tools: ToolFormat | None = None,
        names: Collection[str] = (),
    ) -> None:
        self.num_calls = 0
        self._think = think
        self._tools = tools
        self._names = names
        self._text = ""  # what is not decided, from `_at` on
        self._at = 0
        self._seen = 0  # up to here it was searched in vain for what the state waits for
        self._step = self._reasoning if think and starts_in_reasoning else self._begin
        self._scanner = _ObjectScanner()
        self._out: list[Part] = []
        self._blank = ""  # white space, or Llama's tag, before what may be a call
        self._is_fresh = True  # no content has been told

    @property
    def in_reasoning(self) -> bool:
        return self._step == self._reasoning

    def push(self, text: str) -> list[Part]:
        """The pieces that are certain now."""
        held, self._text = self._text, ""
        held += text  # where it is: nothing else has this text, which is not copied
        self._text = held
        return self._decided()

    def finish(self) -> list[Part]:
        """No more will come: what was held, as what it turns out to be."""
        parts = self._decided()
        rest, self._text = self._text, ""
        if self._step == self._reasoning:
            return [*parts, *_piece("reasoning", rest)]
        if self._step == self._head:
            call = self._whole_call(rest)
            rest = "" if call else self._blank + self._opening + rest
            parts += call
            self.num_calls += bool(call)
        elif self._step == self._tagged:
            rest = self._blank + rest
        elif self._step in (self._arguments, self._behind, self._over):
            rest = ""
        return [*parts, *_piece("content", rest)]

    # -- states: each takes what it can off the text, and says whether to ask again ------------------------------------

    def _decided(self) -> list[Part]:
        while self._step():
            pass
        if self._at:
            self._text, self._seen = self._text[self._at :], max(0, self._seen - self._at)
            self._at = 0
        parts, self._out = self._out, []
        return parts

    def _tell(self, kind: Literal["reasoning", "content"], text: str) -> None:
        self._out += _piece(kind, text)
        self._is_fresh = self._is_fresh and not (text and kind == "content")

    def _take(self, end: int | None = None) -> str:
        """The text up to `end`, which is decided now."""
        taken = self._text[self._at : end]
        self._at = self._seen = len(self._text) if end is None else end
        return taken

    def _enter(self, step: Callable[[], bool]) -> bool:
        self._step, self._seen = step, self._at
        return True

    def _find(self, marker: str) -> int:
        """Where the marker is; -1: not yet. What was searched before is not searched again."""
        found = self._text.find(marker, max(self._at, self._seen - len(marker) + 1))
        self._seen = len(self._text)
        return found

    def _past_blank(self) -> int:
        """Behind the white space that the text begins with."""
        self._seen = _ended(_BLANK, self._text, max(self._at, self._seen))
        return self._seen

    def _begin(self) -> bool:
        """Before the first word. White space there belongs to whatever follows."""
        word = self._past_blank()
        if word == len(self._text):
            return False
        if self._think:
            if self._text.startswith(THINK, word):
                self._take(word + len(THINK))
                return self._enter(self._reasoning)
            if self._may_become(THINK, word):
                return False
        if self._tools == "llama3_json":
            if self._may_become(PYTHON_TAG, word):
                return False
            if self._text.startswith(PYTHON_TAG, word):
                self._blank = self._take(word + len(PYTHON_TAG))
                return self._enter(self._tagged)
            if self._text[word] == "{":
                self._blank = self._take(word)
                return self._enter(self._head)
        return self._enter(self._content)

    def _tagged(self) -> bool:
        """Behind Llama's tag."""
        word = self._past_blank()
        if word == len(self._text):
            return False
        self._blank += self._take(word)
        if self._text[word] == "{":
            return self._enter(self._head)
        self._tell("content", self._blank)
        return self._enter(self._content)

    def _reasoning(self) -> bool:
        found = self._find(END_THINK)
        if found < 0:
            self._tell("reasoning", self._take(self._certain(END_THINK)))
            return False
        self._tell("reasoning", self._take(found))
        self._take(found + len(END_THINK))
        self._think = False
        return self._enter(self._begin)

    def _content(self) -> bool:
        if self._tools != "hermes":
            self._tell("content", self._take())
            return False
        may_be_blank = self.num_calls > 0 or self._is_fresh  # white space before calls is nobody's
        word = self._past_blank() if may_be_blank else self._at
        found = self._text.find(CALL, word)
        if found < 0:
            certain = self._certain(CALL)
            if may_be_blank and word >= certain:
                self._seen = certain
                return False
            self._tell("content", self._take(certain))
            return False
        before = self._take(found)
        self._take(found + len(CALL))
        self._blank = "" if before.strip() else before
        self._tell("content", before.removesuffix(self._blank))
        return self._enter(self._head)

    def _head(self) -> bool:
        """At the beginning of a call: until its name is known and its arguments begin."""
        num_chars = len(self._text) - self._at
        found = None
        if self._seen - self._at < MAX_HEAD_CHARS:  # else it was tried with all that a head may have
            found = _HEAD.match(self._text, self._at, self._at + MAX_HEAD_CHARS)
        if found and self._is_tool(found[1]):
            self._out.append(Part("call", "", self.num_calls, found[1]))
            self._blank = ""
            self._take(found.end())
            self._scanner = _ObjectScanner()
            return self._enter(self._arguments)
        if self._tools == "hermes":
            end = self._find(END_CALL)
            if end >= 0:  # in another order, or no call at all
                before = self._take(end)
                self._take(end + len(END_CALL))
                call = self._whole_call(before)
                self._out += call
                self.num_calls += bool(call)
                self._tell("content", "" if call else self._blank + CALL + before + END_CALL)
                return self._enter(self._content)
        elif found or num_chars > MAX_HEAD_CHARS:
            self._tools = None
            self._tell("content", self._blank)
            return self._enter(self._content)
        return False

    def _arguments(self) -> bool:
        end = self._scanner.end_of_object(self._text, self._at)
        if shown := self._take(end):
            self._out.append(Part("call", shown, self.num_calls))
        if end is None:
            return False
        self.num_calls += 1
        return self._enter(self._behind)

    def _behind(self) -> bool:
        """Behind the arguments: the rest of the call, of which nothing is told."""
        if self._tools == "hermes":
            found = self._find(END_CALL)
            if found < 0:
                self._take(self._certain(END_CALL))
                return False
            self._take(found + len(END_CALL))
            return self._enter(self._content)
        self._take(_ended(_CLOSING, self._text, self._at))
        if self._at == len(self._text):
            return False
        return self._enter(self._head if self._take(self._at + 1) == ";" else self._over)

    def _over(self) -> bool:
        """Behind the last call: nothing of it is told."""
        self._take()
        return False

    def _may_become(self, marker: str, at: int) -> bool:
        """Whether the text from `at` on is a beginning of the marker, and not the whole of it."""
        return len(self._text) - at < len(marker) and marker.startswith(self._text[at:])

    def _certain(self, marker: str) -> int:
        """Where the last of the text may be the beginning of the marker."""
        for length in range(min(len(marker) - 1, len(self._text) - self._at), 0, -1):
            if self._text.endswith(marker[:length]):
                return len(self._text) - length
        return len(self._text)

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

    def end_of_object(self, text: str, begin: int = 0) -> int | None:
        """Where in `text`, from `begin` on, the object ends; None: further on."""
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


def _piece(kind: Literal["reasoning", "content"], text: str) -> list[Part]:
    return [Part(kind, text)] if text else []


def _ended(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Behind what the pattern, which may match nothing, matches at `at`."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
