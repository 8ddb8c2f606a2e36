"""Renders a conversation to the prompt text a model was trained on, with the Jinja template from its checkpoint.

A template is an untrusted program. It runs in Jinja's immutable sandbox, which blocks attributes that lead to Python
and changes to its inputs, and within bounds: one second, 1 MiB of output, no larger intermediate value. To keep the
bounds, only the filters that templates use are available. Everything that can expand a small input (operators, list and
dict literals, padding, formats, `replace`, `join`, text in loops) is measured before it runs. Other filters expand
their input a few times at most; their results are measured before use.

The environment is the one templates are written for: trimmed blocks, `break` and `continue`, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, and the `{% generation %}` tag, which has no effect here.
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
END_SENTINEL = "\ufdd1 "
"""Appended to the final message to find its end in the output; the space shows if the template strips messages."""
MAX_DEPTH = 64
"""Maximum nesting of lists."""
PADDING_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs")
REFUSED_METHODS = ("encode", "translate", "to_bytes")
"""Methods of strings and numbers that return bytes or expand their input. No chat template needs them."""
# fmt: off
FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape",
    "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper",
    "urlencode", "wordcount",
)
# fmt: on
"""Jinja's own filters that templates may use; `_BOUNDED_FILTERS` replace those that need bounds."""
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

    Raises `TemplateError` if it does not compile, or breaks the sandbox or its bounds on a one-word conversation. A
    template that merely rejects that conversation passes.
    """
    code = _compile(template)
    try:
        _run(code, {"messages": list(SAMPLE_MESSAGES), "tools": None, "add_generation_prompt": True})
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


def _run(code: CodeType, variables: dict[str, Any]) -> str:
    sandbox = _Sandbox()  # one per rendering: it holds the clock and the character count
    program = jinja2.Template.from_code(sandbox, code, sandbox.make_globals(None))
    parts, num_chars = [], 0
    try:
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


@lru_cache(maxsize=32)
def _compile(template: str) -> CodeType:
    if len(template) > MAX_SOURCE_CHARS:
        raise TemplateError(
            f"the chat template has {len(template):,} characters, the limit is {MAX_SOURCE_CHARS:,}; shorten it",
            param="chat_template",
            code="template_error",
        )
    try:
        return _Sandbox().compile(template)
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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a time limit, checked at every call and loop iteration, and limits on sizes."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = [LoopControlExtension, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._check_expression)
        self._deadline = time.thread_time() + MAX_RENDER_S  # not wall time: the machine may be busy
        self._num_chars = 0
        filters = {name: self.filters[name] for name in FILTERS} | _BOUNDED_FILTERS
        self.filters = {name: self._bounded(function) for name, function in filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(str(form)[:200])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        program: nodes.Template = _BoundsTransformer().visit(super()._parse(source, name, filename))
        return program

    def tick(self, num_chars: int = 0) -> str:
        """Called once per loop iteration with the characters of template text in its body; checks the time limit."""
        if time.thread_time() > self._deadline:
            raise _RenderTimeoutError(f"it runs for longer than {MAX_RENDER_S:g} s")
        self._num_chars += num_chars
        _check_size(self._num_chars // 4)  # text may pass through a few macros before the output
        return ""

    def check_value(self, value: Any) -> Any:
        """Check the size of a list, tuple or dict literal, which doubles a value that it holds twice, and of the result
        of a filter, call or slice, of which there may be thousands in a row without a loop."""
        self.tick()
        _check_size(_size(value))
        return value

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def filtered(*args: Any, **kwargs: Any) -> Any:
            return self.check_value(function(*args, **kwargs))

        vars(filtered).update(getattr(function, "__dict__", {}))  # the markers of Jinja's pass_context and the like
        return filtered

    def join(self, *values: Any) -> str:
        """`a ~ b`, bounded."""
        return "".join(_bounded_strings("", values))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | int | float) and name in REFUSED_METHODS:
            raise SecurityError(f"it calls {name}, which templates may not use")
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                _check_format(owner, (*args, *kwargs.values()))
            elif name == "join" and args:
                args = (_bounded_strings(owner, args[0]),)
            elif name == "replace" and len(args) > 1:
                _check_replace(owner, str(args[0]), str(args[1]))
            elif name in PADDING_METHODS:
                for value in (*args, *kwargs.values()):
                    _check_size(abs(value) * max(1, owner.count("\t")) if isinstance(value, int) else 0)
        return self.check_value(super().call(context, obj, *args, **kwargs))

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

    def _check_expression(self, value: Any) -> Any:
        """Counts each `{{ value }}`, also inside `{% set %}` blocks and macros, whose text is not output yet."""
        self.tick(_size(value))
        return value


class _BoundsTransformer(NodeTransformer):
    """Rewrites a template: loops call `tick`, and `~`, slices and literals check the size of their result."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        count = nodes.Const(sum(map(_static_chars, chain(node.body, node.else_))))
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [count], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        return self._check_name(node, node.attr)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            return self._check_literal(node)
        return self._check_name(node, node.arg.value if isinstance(node.arg, nodes.Const) else "")

    def _check_name(self, node: nodes.Node, name: Any) -> nodes.Node:
        """Reject dunder names before anything runs; the sandbox rejects them only on access."""
        if isinstance(name, str) and name.startswith("__"):
            raise SecurityError(f"it accesses {name!r}, a Python internal")
        self.generic_visit(node)
        return node

    def _check_literal(self, node: nodes.Literal | nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # the target of `for a, b in` or `set a, b =`
        return nodes.Call(nodes.EnvironmentAttribute("check_value"), [node], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = _check_literal  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it renders its
    content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _static_chars(node: nodes.Node) -> int:
    """Characters of literal template text in a loop's body, without nested loops, which count their own."""
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    return 0 if isinstance(node, nodes.For) else sum(map(_static_chars, node.iter_child_nodes()))


def _size(value: Any) -> int:
    """Characters and items in `value`, nested ones included; counting stops soon after the limit."""
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
        raise SecurityError(f"it creates a value of {size:,} characters or items; the limit is {MAX_OUTPUT_CHARS:,}")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise SecurityError(f"it creates an integer of {num_bits:,} bits; the limit is {MAX_INT_BITS:,}")


def _check_format(form: str, values: Sequence[Any]) -> None:
    """Check a format string, % or braces: no width of five digits, no width given as an argument."""
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", form):
        raise SecurityError("it formats with a width above 9,999 or with a width given as an argument")
    width = max(map(int, re.findall(r"\d+", form)), default=0)
    _check_size((form.count("%") + form.count("{")) * max(width, _size(list(values))))


def _check_replace(text: str, old: str, new: str) -> None:
    times = text.count(old) if len(new) > len(old) else 0
    _check_size(len(text) + times * (len(new) - len(old)))


def _bounded_strings(separator: str, values: Any) -> list[str]:
    """The values as strings, checked to stay within the limit when joined."""
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
    """Jinja's `indent`, at most 16 columns wide."""
    return filters.do_indent(text, width[:16] if isinstance(width, str) else min(width, 16), first, blank)


def _format(form: str, *args: Any, **kwargs: Any) -> str:
    """Jinja's `format`: `"%s" | format(x)`."""
    _check_format(form, (*args, *kwargs.values()))
    return str(form) % (kwargs or args)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, values: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's `join`, bounded."""
    if attribute is not None:
        values = map(filters.make_attrgetter(context.environment, attribute), values)
    return str(d).join(_bounded_strings(str(d), values))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's `replace`, bounded."""
    _check_size(_size(text))
    _check_replace(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), -1 if count is None else count)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's `round`, to at most 15 digits."""
    return filters.do_round(value, max(-15, min(precision, 15)), method)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, values: Any, attribute: str | int | None = None, start: float = 0) -> Any:
    """Jinja's `sum`, of numbers only."""
    return filters.do_sum(environment, values, attribute, float(start) if isinstance(start, float) else int(start))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's `tojson` escapes for HTML."""
    if isinstance(indent, int):
        indent = min(indent, 16)
    width = max(indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ("", "")), 1)
    _check_size(_size(value) * width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_BOUNDED_FILTERS = {
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": _tojson,
}
