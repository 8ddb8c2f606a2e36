"""Validation shared by all classes of user-supplied options."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.vllm_arguments import Owner, adopt

INT32 = (1 << 31) - 1
"""The largest value that int32 tensors of token ids and request parameters can hold."""
MAX_STRING_CHARS = 4096
"""Limit of characters in one string of the options."""


class _OptionsType(type):
    """Class of classes of options: checks the names of an instance's options before it is made."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        known = field_names(cls)
        if not given.keys() <= known:
            owner = getattr(cls, "ARGUMENT_OWNER", None)
            given = given if owner is None else adopt(owner, given)
            for name in given:
                if name not in known:
                    raise UnknownOptionError.of(cls.TITLE, name, known)  # type: ignore[attr-defined]
        return super().__call__(*args, **given)


@functools.cache
def field_names(options: type) -> frozenset[str]:
    """The options of a class of options."""
    return frozenset(f.name for f in fields(options) if f.init)


class ValidatedParams(metaclass=_OptionsType):
    """Base class of dataclasses of options. It refuses an unknown option and names the nearest known one.

    The checks raise `ParameterError` with the value, the limits, and the option's name as `param`.
    """

    __slots__ = ()
    TITLE: ClassVar[str]
    """The owner of the options in error messages."""
    ARGUMENT_OWNER: ClassVar[Owner | None] = None
    """The owner of those arguments of vLLM that are accepted beside the fields, in `octavo.params.vllm_arguments`."""

    def _check_integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if (value is None and optional) or (type(value) is int and low <= value <= high):
            return
        if not _is_integer(value):
            raise invalid(name, f"must be an integer, not {value!r}", "invalid_type")
        if not low <= value <= high:
            raise invalid(name, f"is {value}, it must be from {low} to {high}", "integer_out_of_range")

    def _check_number(self, name: str, low: float, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if (value is None and optional) or (type(value) is float and low <= value <= high):
            return
        # Integers are finite, and math.isfinite raises for those beyond the range of floats.
        if not _is_integer(value) and not (isinstance(value, float) and math.isfinite(value)):
            raise invalid(name, f"must be a finite number, not {value!r}", "invalid_type")
        if not low <= value <= high:
            raise invalid(name, f"is {value}, it must be from {low:g} to {high:g}", "decimal_out_of_range")

    def _check_bool(self, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self, name), bool):
                raise invalid(name, f"must be True or False, not {value!r}", "invalid_type")

    def _check_choice(self, name: str, choices: tuple[Any, ...]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise invalid(name, f"is {value!r}, it must be one of {', '.join(map(str, choices))}")

    def _check_strings(self, name: str, max_strings: int) -> tuple[str, ...]:
        """Return the option's strings: it may be one string or a list of at most `max_strings`."""
        value = getattr(self, name)
        if value is None or (type(value) is tuple and not value):
            return ()
        strings = (value,) if isinstance(value, str) else as_list(name, value)
        if len(strings) > max_strings:
            raise invalid(
                name, f"has {len(strings)} strings, at most {max_strings} are allowed", "array_above_max_length"
            )
        for s in strings:
            if not isinstance(s, str) or not s:
                raise invalid(name, f"must be non-empty strings, not {s!r}; leave it out for none")
            if len(s) > MAX_STRING_CHARS:
                raise invalid(name, f"has a string of {len(s)} characters, at most {MAX_STRING_CHARS} are allowed")
        return strings

    def _check_numbers_by_id(self, name: str, low: float, high: float) -> dict[int, float]:
        """Return the option as a dict of token id to finite number."""
        value = getattr(self, name)
        if value is None:
            return {}
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else [(value, None)]
        for t, x in pairs:
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            if not _is_token_id(t) or not is_number or not low <= x <= high:
                text = f"maps token ids to numbers from {low:g} to {high:g}, not {t!r} to {x!r}"
                raise invalid(name, text, f"invalid_{name}")
        return dict(pairs)

    def _set(self, name: str, value: Any) -> None:
        """Set a field to its normalized value, also in a frozen dataclass."""
        object.__setattr__(self, name, value)


def invalid(name: str, text: str, code: str | None = None) -> ParameterError:
    return ParameterError(f"{name} {text}", param=name, code=code)


def as_list(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list option as a tuple; None becomes ()."""
    if value is None or (type(value) is tuple and not value):
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise invalid(name, f"must be a list, not {value!r}", "invalid_type")
    return tuple(value)


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = as_list(name, value)
    if not ids:
        return ids
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= INT32:
        return ids  # the usual case, many times as fast as the loop
    for t in ids:
        if not _is_token_id(t):
            raise invalid(name, f"must be token ids, not {t!r}", "invalid_token_id")
    return ids


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    """True for a valid token id of some vocabulary. The engine checks the model's vocabulary size."""
    return _is_integer(value) and 0 <= value <= INT32
