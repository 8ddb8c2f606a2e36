"""Modules that stand for a peer's package, so that its tests can be imported without it."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import huggingface_hub
import octavo_server
import pytest
import transformers

from octavo.checkpoint import catalog

Counterpart = Callable[[str, str], Any]
"""(module, name) -> the value of that name."""


class Internal(type):
    """The type of placeholders: using one skips the test."""

    def _skip(cls, *_: Any, **__: Any) -> Any:
        raise pytest.skip.Exception("tests the peer's own code", allow_module_level=True)

    __call__ = __instancecheck__ = __iter__ = __getitem__ = __enter__ = __add__ = __sub__ = _skip

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._skip()


def placeholder(module: str, name: str) -> type:
    return Internal(name, (), {"__module__": module, "__qualname__": f"{module}.{name}"})


class StandIn(ModuleType):
    """A module whose names are looked up when they are first used."""

    def __init__(self, name: str, counterpart: Counterpart, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__dict__.update(values or {})
        self._counterpart = counterpart

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = self._counterpart(self.__name__, name)
        setattr(self, name, value)
        return value


class Finder:
    """Imports a package and its submodules as `StandIn`s."""

    def __init__(self, package: str, counterpart: Counterpart) -> None:
        self.package, self.counterpart = package, counterpart

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] == self.package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name, self.counterpart)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(package: str, counterpart: Counterpart) -> None:
    sys.meta_path.insert(0, Finder(package, counterpart))  # type: ignore[arg-type]


_auto_tokenizer = transformers.AutoTokenizer.from_pretrained


@functools.cache
def get_tokenizer(name: str = "", *_: Any, tokenizer_name: str = "", **__: Any) -> Any:
    """The tokenizer of what stands for a model, as Transformers makes it."""
    base = octavo_server.BASE_MODELS.get(name or tokenizer_name)
    if base is not None:
        return _auto_tokenizer(base)
    file = catalog.cached_path(octavo_server.MODEL)
    return _auto_tokenizer(str(file.parent), gguf_file=file.name)


transformers.AutoTokenizer.from_pretrained = get_tokenizer
huggingface_hub.snapshot_download = lambda repo_id, **_: repo_id  # nothing is fetched
