"""A conversation as the text that a model was trained on, by the Jinja template that the model brings.

A template is a program by a stranger. It runs in Jinja's immutable sandbox (no attribute that leads to Python, no
change to what it is given) and within bounds: about a second, 1 MiB of output, and no value larger than that. So that
both can be kept, it has the filters that templates use and no others, and whatever can make much out of little
(operators, literals that hold a value twice, padding, formats, `replace`, `join`, text in loops) is measured first;
what a filter makes, a few times what it was given at most, is measured before anything else is done with it.
The environment is the one that templates are written for: trimmed blocks, `break` and `continue`, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, and the `{% generation %}` tag, which changes nothing here.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.errors import CheckpointError, TemplateError

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 20
MAX_RENDER_S = 1.0
MAX_INT_BITS = 4096
HERE = "\ufdd1 "
"""Put behind the final message to see where it ends; the space shows whether the template trims what it is given."""
MAX_DEPTH = 64
"""Of lists in lists."""
PADDING_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs")
REFUSED_METHODS = ("encode", "translate", "to_bytes")
"""Of strings and numbers: they lead to bytes, or make much out of little. No chat needs one."""
# fmt: off
FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape",
    "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper",
    "urlencode", "wordcount",
)
# fmt: on
"""Jinja's own filters that a template has; `_OWN_FILTERS` are those with bounds."""
SAMPLE = ({"role": "user", "content": "Hi"},)


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
    """The prompt's text.

    `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the final message open, for the
    model to go on with it. `special_tokens` (bos_token, eos_token, ...) and `kwargs` (`enable_thinking`, ...) are the
    template's variables. Raises `TemplateError`, one line, for whatever the template refuses or does wrong.
    """
    if not isinstance(messages, (list, tuple)) or not messages or not all(isinstance(m, dict) for m in messages):
        text = "messages must be a list of at least one object with role and content"
        raise TemplateError(text, param="messages", code="invalid_value")
    if continue_final_message:
        if add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other; choose one"
            raise TemplateError(text, param="continue_final_message", code="invalid_value")
        messages = [*messages[:-1], _with_text_end(messages[-1], HERE)]
    variables = {**special_tokens, **kwargs, "messages": messages, "tools": tools or None}
    text = _run(_compiled(template), {**variables, "add_generation_prompt": add_generation_prompt})
    return _cut_at_end_of_final(text) if continue_final_message else text


def check(template: str) -> None:
    """Raises `TemplateError` if the template cannot be compiled, or breaks out of the sandbox or its bounds on a
    conversation of one word; for whoever is given a template to call before the first request. That it refuses the one
    word, or wants more of a conversation than that, is no mistake of its.
    """
    code = _compiled(template)
    try:
        _run(code, {"messages": list(SAMPLE), "tools": None, "add_generation_prompt": True})
    except TemplateError as e:
        if isinstance(e.__cause__, SecurityError | RecursionError):
            raise


def load(source: str) -> str:
    """The template that an operator gives: a file's name, or the template itself. It is checked.

    Raises `CheckpointError` for a file that cannot be read, or a template that `check` refuses.
    """
    try:
        inline = any(c in source for c in "{}\n")  # no name has them, nearly every template does
        template = source if inline else Path(source).read_text(encoding="utf-8")
        check(template)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise CheckpointError(f"cannot read the chat template {source}: {reason}; give a file of Jinja source") from e
    except TemplateError as e:
        raise CheckpointError(f"{e}; give another template, or none for the model's own", param="chat_template") from e
    return template


def _run(code: CodeType, variables: dict[str, Any]) -> str:
    sandbox = _Sandbox()  # one for each rendering: it holds the clock and the count
    program = jinja2.Template.from_code(sandbox, code, sandbox.make_globals(None))
    parts, num_chars = [], 0
    try:
        for part in program.generate(variables):
            num_chars += len(part)
            if num_chars > MAX_OUTPUT_CHARS:
                raise SecurityError(f"its text is longer than {MAX_OUTPUT_CHARS:,} characters")
            parts.append(part)
    except _Refused as e:
        text = f"the chat template refuses the messages: {_line(e)}"
        raise TemplateError(text, param="messages", code="template_error") from e
    except Exception as e:  # a template can raise anything that Python can
        kind = "template_timeout" if isinstance(e, _RenderTimeoutError) else "template_error"
        raise TemplateError(f"the chat template fails: {_line(e)}", param="messages", code=kind) from e
    return "".join(parts)


@lru_cache(maxsize=32)
def _compiled(template: str) -> CodeType:
    if len(template) > MAX_SOURCE_CHARS:
        raise TemplateError(
            f"the chat template has {len(template):,} characters; at most {MAX_SOURCE_CHARS:,} are read",
            param="chat_template",
            code="template_error",
        )
    try:
        return _Sandbox().compile(template)
    except jinja2.TemplateSyntaxError as e:
        text = f"the chat template is wrong in line {e.lineno}: {_line(e)}"
        raise TemplateError(text, param="chat_template", code="template_error") from e
    except Exception as e:  # nested too deep, ...
        text = f"the chat template cannot be compiled: {_line(e)}"
        raise TemplateError(text, param="chat_template", code="template_error") from e


def _line(e: BaseException) -> str:
    text = " ".join(str(e).split()) or type(e).__name__
    return re.sub("[\ufdd0\ufdd1]", "", text)[:300]


def _with_text_end(message: dict[str, Any], end: str) -> dict[str, Any]:
    """The message with `end` behind its text, which is a string or the last text part of a list."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + end}
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        part = content[-1]
        if isinstance(part.get("text"), str):
            return {**message, "content": [*content[:-1], {**part, "text": part["text"] + end}]}
    text = "continue_final_message needs a final message that ends in text"
    raise TemplateError(text, param="messages", code="invalid_value")


def _cut_at_end_of_final(text: str) -> str:
    at = text.rfind(HERE.strip())
    if at < 0:
        text = "the chat template leaves the final message out, so it cannot be continued"
        raise TemplateError(text, param="messages", code="template_error")
    before = text[:at] if text.startswith(HERE, at) else text[:at].rstrip()
    return before.replace(HERE, "").replace(HERE.strip(), "")  # a template may have shown the message before, too


# ---- the sandbox


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _RenderTimeoutError(SecurityError):
    """The template runs for longer than a template may."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a clock, which every call and every turn of a loop looks at, and limits on sizes."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation], finalize=self._count
        )
        self._deadline = time.monotonic() + MAX_RENDER_S
        self._num_chars = 0
        filters = {name: self.filters[name] for name in FILTERS} | _OWN_FILTERS
        self.filters = {name: self._bounded(function) for name, function in filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(str(form)[:200])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        program: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return program

    def tick(self, num_chars: int = 0) -> str:
        """A turn of a loop, with so much text of the template's own in it."""
        if time.monotonic() > self._deadline:
            raise _RenderTimeoutError(f"it runs for longer than {MAX_RENDER_S:g} s")
        self._num_chars += num_chars
        _check_size(self._num_chars // 4)  # text may pass through a few macros on its way out
        return ""

    def hold(self, value: Any) -> Any:
        """A list, tuple or dict that the template writes: what holds another one twice doubles it. Also what a filter,
        a call or a slice makes: there may be thousands of them, one behind the other, without any loop."""
        self.tick()
        _check_size(_size(value))
        return value

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def filtered(*args: Any, **kwargs: Any) -> Any:
            return self.hold(function(*args, **kwargs))

        vars(filtered).update(getattr(function, "__dict__", {}))  # the marks by which Jinja knows what it has to pass
        return filtered

    def join(self, *values: Any) -> str:
        """What `a ~ b` means, bounded."""
        return "".join(_joinable("", values))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | int | float) and name in REFUSED_METHODS:
            raise SecurityError(f"it calls {name}, which templates cannot")
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                _check_format(owner, (*args, *kwargs.values()))
            elif name == "join" and args:
                args = (_joinable(owner, args[0]),)
            elif name == "replace" and len(args) > 1:
                _check_replace(owner, str(args[0]), str(args[1]))
            elif name in PADDING_METHODS:
                for value in (*args, *kwargs.values()):
                    _check_size(abs(value) * max(1, owner.count("\t")) if isinstance(value, int) else 0)
        return self.hold(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            _check_size(max(_size(left), 1) * abs(right) if isinstance(right, int) else 0)
            _check_size(max(_size(right), 1) * abs(left) if isinstance(left, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def _count(self, value: Any) -> Any:
        """Sees every `{{ value }}`, also inside `{% set %}` blocks and macros, whose text is no output yet."""
        self.tick(_size(value))
        return value


class _Bounds(NodeTransformer):
    """Rewrites a template so that loops look at the clock, and `~` and literals at the size of what they make."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        count = nodes.Const(sum(map(_static_chars, chain(node.body, node.else_))))
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [count], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        return self._named(node, node.attr)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            return self._held(node)
        return self._named(node, node.arg.value if isinstance(node.arg, nodes.Const) else "")

    def _named(self, node: nodes.Node, name: Any) -> nodes.Node:
        """The sandbox refuses such names when they are reached; here, before anything runs."""
        if isinstance(name, str) and name.startswith("__"):
            raise SecurityError(f"it reaches for {name!r}, which is Python's own")
        self.generic_visit(node)
        return node

    def _held(self, node: nodes.Literal | nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # the left side of `for a, b in` or `set a, b =`
        return nodes.Call(nodes.EnvironmentAttribute("hold"), [node], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = _held  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` frames the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _static_chars(node: nodes.Node) -> int:
    """The template's own text in a loop's body, without that of loops in it, which count it themselves."""
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    return 0 if isinstance(node, nodes.For) else sum(map(_static_chars, node.iter_child_nodes()))


def _size(value: Any) -> int:
    """Characters and items, those inside included; counting stops soon after the limit."""
    if isinstance(value, str):
        return len(value)
    size, level = 0, [value]
    for _ in range(MAX_DEPTH):
        lists = [v for v in level if isinstance(v, (list, tuple, dict))]
        size += sum(len(v) for v in level if isinstance(v, str)) + sum(map(len, lists))
        if not lists or size > MAX_OUTPUT_CHARS:
            return size
        level = [*chain.from_iterable(chain(v, v.values()) if isinstance(v, dict) else v for v in lists)]
    raise SecurityError(f"it nests lists more than {MAX_DEPTH} deep")


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise SecurityError(f"it asks for a value of {size:,} characters or items; the limit is {MAX_OUTPUT_CHARS:,}")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise SecurityError(f"it asks for an integer of {num_bits:,} bits; the limit is {MAX_INT_BITS:,}")


def _check_format(form: str, values: Sequence[Any]) -> None:
    """Of a format, % or braces: no width of five digits, none that is given by an argument."""
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", form):
        raise SecurityError("it formats with a width above 9,999 or with a width given as an argument")
    width = max(map(int, re.findall(r"\d+", form)), default=0)
    _check_size((form.count("%") + form.count("{")) * max(width, _size(list(values))))


def _check_replace(text: str, old: str, new: str) -> None:
    times = text.count(old) if len(new) > len(old) else 0
    _check_size(len(text) + times * (len(new) - len(old)))


def _joinable(separator: str, values: Any) -> list[str]:
    """Values as texts that may be joined."""
    texts, size = [], 0
    for value in values:
        size += _size(value) + len(separator)
        _check_size(size)
        texts.append(str(value))
    _check_size(sum(map(len, texts)))
    return texts


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter, at most 16 columns wide."""
    return filters.do_indent(text, width[:16] if isinstance(width, str) else min(width, 16), first, blank)


def _format(form: str, *args: Any, **kwargs: Any) -> str:
    """Jinja's filter: `"%s" | format(x)`."""
    _check_format(form, (*args, *kwargs.values()))
    return str(form) % (kwargs or args)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, values: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter."""
    if attribute is not None:
        values = map(filters.make_attrgetter(context.environment, attribute), values)
    return str(d).join(_joinable(str(d), values))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's filter."""
    _check_size(_size(text))
    _check_replace(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), -1 if count is None else count)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's filter, to at most 15 digits."""
    return filters.do_round(value, max(-15, min(precision, 15)), method)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, values: Any, attribute: str | int | None = None, start: float = 0) -> Any:
    """Jinja's filter, of numbers."""
    return filters.do_sum(environment, values, attribute, float(start) if isinstance(start, float) else int(start))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    if isinstance(indent, int):
        indent = min(indent, 16)
    width = max(indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ("", "")), 1)
    _check_size(_size(value) * width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_OWN_FILTERS = {
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": _tojson,
}
