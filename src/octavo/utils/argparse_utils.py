"""`FlexibleArgumentParser`, under the name of vLLM's module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser in whose option names `_` and `-` are the same."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words: Sequence[str] = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(word) for word in words], namespace)


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
