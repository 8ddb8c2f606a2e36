"""What the classes that hold a caller's options have in common: saying what is wrong with one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from octavo.errors import ParameterError, UnknownOptionError

INT32 = (1 << 31) - 1
"""The largest number that a tensor of token ids, or of what requests ask for, can hold."""
MAX_STRING_CHARS = 4096
"""Characters of one string among a caller's options."""


class ValidatedParams:
    """Base of a dataclass of options. A name that does not exist is refused with the nearest that does.

    The checks raise `ParameterError`, with the value, the limits and the name as `param`.
    """

    __slots__ = ()
    TITLE: ClassVar[str]
    """Whose options they are, as a message says it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        known = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                raise UnknownOptionError.of(cls.TITLE, name, known)
        return object.__new__(cls)

    def _check_integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_integer(value):
            raise invalid(name, f"must be an integer, not {value!r}", "invalid_type")
        if not low <= value <= high:
            raise invalid(name, f"is {value}, it must be from {low} to {high}", "integer_out_of_range")

    def _check_number(self, name: str, low: float, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        # Every integer is finite, and math.isfinite takes none that no float can hold.
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

    def _check_strings(self, name: str, most: int) -> tuple[str, ...]:
        """One string, or a list of them."""
        value = getattr(self, name)
        strings = (value,) if isinstance(value, str) else as_list(name, value)
        if len(strings) > most:
            raise invalid(name, f"has {len(strings)} strings, at most {most} are allowed", "array_above_max_length")
        for s in strings:
            if not isinstance(s, str) or not s:
                raise invalid(name, f"must be non-empty strings, not {s!r}; leave it out for none")
            if len(s) > MAX_STRING_CHARS:
                raise invalid(name, f"has a string of {len(s)} characters, at most {MAX_STRING_CHARS} are allowed")
        return strings

    def _check_numbers_by_id(self, name: str, low: float, high: float) -> dict[int, float]:
        """Token id -> finite number."""
        value = getattr(self, name)
        pairs: Iterable[tuple[Any, Any]] = ()
        if value is not None:
            pairs = value.items() if isinstance(value, Mapping) else [(value, None)]
        for t, x in pairs:
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            if not _is_token_id(t) or not is_number or not low <= x <= high:
                text = f"maps token ids to numbers from {low:g} to {high:g}, not {t!r} to {x!r}"
                raise invalid(name, text, f"invalid_{name}")
        return dict(pairs)

    def _set(self, name: str, value: Any) -> None:
        """Put a value into its one form, frozen or not."""
        object.__setattr__(self, name, value)


def invalid(name: str, text: str, code: str | None = None) -> ParameterError:
    return ParameterError(f"{name} {text}", param=name, code=code)


def as_list(name: str, value: Any) -> tuple[Any, ...]:
    """None is a list of nothing."""
    if value is not None and (not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping)):
        raise invalid(name, f"must be a list, not {value!r}", "invalid_type")
    return tuple(value or ())


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = as_list(name, value)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= INT32:
        return ids  # the usual, many times as fast
    for t in ids:
        if not _is_token_id(t):
            raise invalid(name, f"must be token ids, not {t!r}", "invalid_token_id")
    return ids


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    """Of some vocabulary; of which, those know who have a model."""
    return _is_integer(value) and 0 <= value <= INT32
