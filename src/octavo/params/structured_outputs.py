"""Structured outputs: constraints on a request's output. `text.grammar` compiles them."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.params.validation import ValidatedParams, invalid

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHARS = 1 << 18
"""Limit of characters of a schema, a pattern, a grammar, or all choices together. Tools and forms need 1 % of it."""
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(ValidatedParams):
    """A constraint on the output: exactly one of the first five fields is set. Names are vLLM's.

    json         a JSON schema, as a dict, as text, or as a pydantic class
    regex        a regular expression that the whole output matches
    choice       the output is one of these
    grammar      a grammar in Lark's syntax, whose first rule is `start`, or EBNF, whose first rule is `root`
    json_object  any JSON object
    disable_any_whitespace  JSON without white space between its elements
    whitespace_pattern      a regular expression for the white space between JSON elements

    Raises `ParameterError` with the code invalid_json_schema or invalid_grammar, or `UnknownOptionError`.
    """

    TITLE: ClassVar[str] = "StructuredOutputsParams"

    json: str | Mapping[str, Any] | type[Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """Convert a caller's value: an instance, a dict of fields, or None."""
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return cls(**value)
        if value is None or isinstance(value, cls):
            return value
        raise invalid("structured_outputs", f"is StructuredOutputsParams or a dict of its fields, not {value!r:.80}")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> str:
        """The JSON schema, as text of ASCII characters."""
        if self.json_object:
            return '{"type": "object"}'
        assert isinstance(self.json, str)  # `__post_init__` converted it
        return self.json

    def __post_init__(self) -> None:
        if self.json_object is None:
            self._set("json_object", False)
        self._check_bool("json_object", "disable_any_whitespace")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise invalid("structured_outputs", f"must have exactly one of {', '.join(KINDS)}, it has {found}")
        if self.json is not None:
            self._set("json", _schema(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not 0 < len(text) <= MAX_CHARS or _is_broken(text)):
                raise _invalid_grammar(name, text, f"Unicode text of 1 to {MAX_CHARS} characters")
        if self.whitespace_pattern is not None and self.kind not in ("json", "json_object"):
            raise invalid("structured_outputs", f"has whitespace_pattern that has no effect on {self.kind}; remove it")
        if self.choice is not None:
            choices = self.choice
            is_list = isinstance(choices, list | tuple) and bool(choices)
            if not is_list or not all(isinstance(c, str) and c for c in choices):
                raise _invalid_grammar("choice", choices, "a list of non-empty strings")
            if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHARS:
                raise _invalid_grammar("choice", choices, f"at most {MAX_CHOICES} strings and {MAX_CHARS} characters")
            self._set("choice", tuple(dict.fromkeys(choices)))


def _schema(value: Any) -> str:
    """Return a JSON schema as text. Unlike a dict, text cannot be changed later and can be a cache key."""
    try:
        if isinstance(value, str):
            if len(value) > MAX_CHARS:
                raise ValueError(f"{len(value)} characters, at most {MAX_CHARS} are taken")
            value = json_text.loads(value)
        if hasattr(value, "model_json_schema"):
            value = value.model_json_schema()
        if not isinstance(value, Mapping):
            raise ValueError("it is not a JSON object")
        text = json_text.dumps(dict(value), allow_nan=False)
        if len(text) > MAX_CHARS:
            raise ValueError(f"{len(text)} characters, at most {MAX_CHARS} are taken")
        return text
    except RecursionError:
        reason = "it is nested too deeply"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise invalid("structured_outputs", f"has an invalid JSON schema: {reason}", "invalid_json_schema")


def _is_broken(text: str) -> bool:
    """True if the text has a lone surrogate, which no output can contain."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def _invalid_grammar(name: str, value: Any, want: str) -> Exception:
    shown = f"{value!r:.80}" if not isinstance(value, str | list | tuple) or len(value) < 80 else f"{len(value)} long"
    return invalid("structured_outputs", f"has a {name} that must be {want}, it is {shown}", "invalid_grammar")
