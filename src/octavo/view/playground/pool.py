"""The size of a playground's pool, what an action's explanation is made of, and the limits of a history."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from octavo.errors import ParameterError

MAX_BLOCKS, MAX_BLOCK_SIZE = 4096, 256
MAX_TOKENS = 65_536
"""In a pool, and made by a history, at most."""
POOL = re.compile(r"([0-9]{1,5})x([0-9]{1,4})(?:x([0-9]{1,6})(?:x([0-9]{1,5}))?)?")
NUMBER = re.compile(r"[0-9]{1,6}")


class Pool(NamedTuple):
    """The size of a pool."""

    num_blocks: int
    block_size: int
    max_len: int
    num_host_blocks: int

    @classmethod
    def parse(cls, text: str) -> Pool:
        """Parse NUM_BLOCKSxBLOCK_SIZE[xMAX_LEN[xNUM_HOST_BLOCKS]]. Raises `ParameterError`."""
        found = POOL.fullmatch(text)
        if found is None:
            raise invalid(f"a history begins with its pool, such as 64x16, not with {text[:40]!r}")
        num_blocks, size = int(found[1]), int(found[2])
        if not (1 <= num_blocks <= MAX_BLOCKS and 1 <= size <= MAX_BLOCK_SIZE and num_blocks * size <= MAX_TOKENS):
            raise invalid(
                f"a pool of {num_blocks} blocks of {size} tokens is not supported: 1 to {MAX_BLOCKS} blocks of 1 to "
                f"{MAX_BLOCK_SIZE} tokens, at most {MAX_TOKENS} tokens in all; use a smaller one"
            )
        num_slots = num_blocks * size
        max_len = int(found[3]) if found[3] else min(16 * size, num_slots)
        num_host = int(found[4]) if found[4] else num_blocks
        if not 1 <= max_len <= num_slots or num_host > num_blocks:
            raise invalid(
                f"the maximum length is {max_len} in {num_slots} slots, with {num_host} host blocks; reserve 1 to "
                f"{num_slots} slots per sequence, and use at most {num_blocks} host blocks"
            )
        return cls(num_blocks, size, max_len, num_host)


class Explanation(NamedTuple):
    """What an action did, and why."""

    text: str
    reason: str


class RefusedError(Exception):
    """An action cannot be done now. The pool may be inconsistent: make it again from its history."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.explanation = Explanation(text, reason)


def invalid(message: str) -> ParameterError:
    return ParameterError(message, param="history")


def number(text: str, min_value: int = 1) -> int:
    """Parse a number of an action. Raises `ParameterError`."""
    if NUMBER.fullmatch(text) is None or not min_value <= int(text) <= MAX_TOKENS:
        raise invalid(f"{text[:40]!r} is not a number from {min_value} to {MAX_TOKENS}")
    return int(text)


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def list_of(items: Iterable[Any]) -> str:
    """A, B and C; if there are many, the first ones and the last."""
    texts = [str(item) for item in items]
    if len(texts) > 12:
        return f"{', '.join(texts[:6])}, ... and {texts[-1]}"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
