"""What the classes that hold a caller's options have in common: saying what is wrong with one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from octavo.errors import ParameterError, UnknownOptionError

MOST_CHARS = 4096
"""Characters of one string among a caller's options."""


class Checked:
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

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise ParameterError(f"{name} must be an integer, not {value!r}", param=name, code="invalid_type")
        if not low <= value <= high:
            code = "integer_out_of_range"
            raise ParameterError(f"{name} is {value}, it must be from {low} to {high}", param=name, code=code)

    def _number(self, name: str, low: float, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ParameterError(f"{name} must be a finite number, not {value!r}", param=name)
        if not low <= value <= high:
            code = "decimal_out_of_range"
            raise ParameterError(f"{name} is {value}, it must be from {low:g} to {high:g}", param=name, code=code)

    def _flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self, name), bool):
                raise ParameterError(f"{name} must be True or False, not {value!r}", param=name, code="invalid_type")

    def _choice(self, name: str, choices: tuple[Any, ...]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise ParameterError(f"{name} is {value!r}, it must be one of {', '.join(map(str, choices))}", param=name)

    def _list(self, name: str, value: Any) -> tuple[Any, ...]:
        """None is a list of nothing."""
        if value is not None and (not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping)):
            raise ParameterError(f"{name} must be a list, not {value!r}", param=name, code="invalid_type")
        return tuple(value or ())

    def _strings(self, name: str, most: int) -> tuple[str, ...]:
        """One string, or a list of them."""
        value = getattr(self, name)
        strings = (value,) if isinstance(value, str) else self._list(name, value)
        if len(strings) > most:
            code = "array_above_max_length"
            raise ParameterError(
                f"{name} has {len(strings)} strings, at most {most} are allowed", param=name, code=code
            )
        for s in strings:
            if not isinstance(s, str) or not s:
                raise ParameterError(f"{name} must be non-empty strings, not {s!r}; leave it out for none", param=name)
            if len(s) > MOST_CHARS:
                raise ParameterError(
                    f"{name} has a string of {len(s)} characters, at most {MOST_CHARS} are allowed", param=name
                )
        return strings

    def _token_ids(self, name: str, value: Any) -> tuple[int, ...]:
        ids = self._list(name, value)
        for t in ids:
            if not isinstance(t, int) or isinstance(t, bool) or t < 0:
                raise ParameterError(f"{name} must be token ids, not {t!r}", param=name, code="invalid_token_id")
        return ids

    def _numbers_by_id(self, name: str, low: float, high: float) -> dict[int, float]:
        """Token id -> finite number."""
        value = getattr(self, name)
        value = {} if value is None else value
        for t, number in value.items() if isinstance(value, Mapping) else ((value, None),):
            good = isinstance(t, int) and not isinstance(t, bool) and t >= 0
            if not good or not isinstance(number, int | float) or isinstance(number, bool) or not low <= number <= high:
                raise ParameterError(
                    f"{name} maps token ids to numbers from {low:g} to {high:g}, not {t!r} to {number!r}",
                    param=name,
                    code=f"invalid_{name}",
                )
        return dict(value)

    def _set(self, name: str, value: Any) -> None:
        """Put a value into its one form, frozen or not."""
        object.__setattr__(self, name, value)
