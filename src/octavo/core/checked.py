"""What the classes that hold a caller's options have in common: saying what is wrong with one."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, ClassVar, Self

from octavo.errors import ParameterError, UnknownOptionError


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
            raise ParameterError(f"{name} must be an integer, not {value!r}", param=name)
        if not low <= value <= high:
            raise ParameterError(f"{name} is {value}, it must be from {low} to {high}", param=name)

    def _number(self, name: str, low: float, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ParameterError(f"{name} must be a finite number, not {value!r}", param=name)
        if not low <= value <= high:
            raise ParameterError(f"{name} is {value}, it must be from {low:g} to {high:g}", param=name)

    def _flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self, name), bool):
                raise ParameterError(f"{name} must be True or False, not {value!r}", param=name)

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise ParameterError(f"{name} is {value!r}, it must be one of {', '.join(choices)}", param=name)
