"""What Octavo does with each key of a model's files.

A key that changes numbers or tokens is obeyed, or refused by name. A key that no table knows is ignored, and logged
once. Tables stand beside the readers of each kind of file; `octavo doctor` shows their verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from logging import getLogger
from typing import Any

from octavo.errors import UnsupportedModelError, cut

logger = getLogger(__name__)
_logged: set[tuple[str, ...]] = set()


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The keys of one file, sorted by what becomes of them."""

    file: str
    read: tuple[str, ...]
    inert: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """The keys of one kind of file. Names may contain "*".

    read     keys that are obeyed; their readers refuse values that are not supported
    inert    keys known to change neither numbers nor tokens
    refused  keys that change them and are not supported -> the values, besides null, that change nothing
    """

    read: Iterable[str]
    inert: Iterable[str] = ()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, values: Mapping[str, Any], file: str, remedy: str) -> KeyUse:
        """Sort the keys of a file, and log unknown ones once.

        Raises `UnsupportedModelError` for a refused key with a value that changes the result. remedy: the end of its
        message.
        """
        use = self.sort(values, file)
        for key, neutral in self.refused.items():
            value = values.get(key)
            if value is not None and not any(_is_same(value, one) for one in neutral):
                raise UnsupportedModelError(f"{file}: {key} {cut(repr(value))} is not supported; {remedy}", param=key)
        if use.unknown and (file, *use.unknown) not in _logged:
            _logged.add((file, *use.unknown))
            logger.warning("%s: unknown keys are ignored: %s", file, ", ".join(map(cut, use.unknown)))
        return use

    def reads(self, key: str) -> bool:
        return _matches(key, self.read)

    def sort(self, values: Iterable[str], file: str) -> KeyUse:
        """Sort the keys of a file. A refused key whose value changes nothing counts as inert."""
        kinds: dict[str, list[str]] = {"read": [], "inert": [], "unknown": []}
        for key in sorted(values):
            kind = "read" if self.reads(key) else "unknown"
            if kind == "unknown" and (key in self.refused or _matches(key, self.inert)):
                kind = "inert"
            kinds[kind].append(key)
        return KeyUse(file, *map(tuple, kinds.values()))


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _matches(key: str, names: Iterable[str]) -> bool:
    return key in names or any("*" in name and fnmatchcase(key, name) for name in names)
