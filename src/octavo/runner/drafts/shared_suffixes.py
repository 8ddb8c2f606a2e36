"""Where the last tokens of a sequence were seen before: in all sequences with its salt.

    last tokens of a row -> hash of the last 8, else 3 -> the newest document and position with them -> what followed

A document has the tokens of one sequence. While a row runs, they are the row's own history; when it gets another
sequence, they are copied, and the oldest copies make room. The table of positions has one fixed size: newer positions
overwrite older ones. A hash may lead to other tokens or to another salt, so both are compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from octavo.engine.suffixes import MAX_MATCH
from octavo.kernels.row_state import MAX_DRAFTS

MAX_SHARED_BYTES = 32 << 20
"""Of the table, three quarters of it, and of copied documents."""
DOCUMENT_BYTES = 512
"""Of a document's objects, beside its tokens and its salt."""
SIZES = 8, 3
"""Lengths of the matches that the table finds, the better one first."""
MULTIPLIER, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(slots=True)
class Document:
    """tokens: [num_tokens] int32; num_indexed: leading tokens whose positions are in the table"""

    salt: bytes
    tokens: np.ndarray
    num_indexed: int = 0

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + len(self.salt) + DOCUMENT_BYTES


class SharedSuffixes:
    """Documents of all rows and of earlier sequences. A row sees those with its own salt and no others."""

    def __init__(self, max_bytes: int = MAX_SHARED_BYTES) -> None:
        self._table = np.zeros(max_bytes * 3 // 4 // 8, dtype=np.int64)  # by hash: document << 32 | position
        self._room = max_bytes - self._table.nbytes
        self._documents: dict[int, Document] = {}
        self._copied: deque[int] = deque()
        self._salts: dict[int, bytes] = {}  # by row
        self._running: dict[int, int] = {}  # row -> document
        self._num_documents = 0

    def begin(self, row: int, salt: bytes) -> None:
        """The row gets another sequence, and still has the tokens of its last one."""
        self._salts[row] = salt
        number = self._running.pop(row, None)
        if number is None:
            return
        document = self._documents[number]
        self._index(number, len(document.tokens) - 1)
        document.tokens = document.tokens.copy()
        self._copied.append(number)
        self._room -= document.num_bytes
        while self._room < 0:
            self._room += self._documents.pop(self._copied.popleft()).num_bytes

    def extend(self, row: int, tokens: np.ndarray) -> None:
        """tokens: [num_tokens] int32, all of the row's sequence: a view, valid until the row's next `begin`"""
        number = self._running.get(row)
        if number is None:
            number = self._running[row] = self._num_documents = self._num_documents + 1
            self._documents[number] = Document(self._salts[row], tokens)
        document = self._documents[number]
        document.tokens = tokens
        if len(tokens) - document.num_indexed >= 2 * MAX_DRAFTS:  # a position that is found has all drafts after it
            self._index(number, len(tokens) - MAX_DRAFTS)

    def match(self, row: int, tokens: np.ndarray) -> tuple[int, list[int]]:
        """Find the last tokens in a document -> (length of the match up to MAX_MATCH, MAX_DRAFTS tokens after it).

        Fewer tokens follow at a document's end. Returns (0, []) if there is no match. Rows that run together find each
        other's tokens, and their own.
        """
        salt = self._salts[row]
        for size in SIZES:
            if len(tokens) < size:
                continue
            number, end = divmod(int(self._table[self._slot(salt, tokens[-size:].tolist())]), 1 << 32)
            document = self._documents.get(number)
            if document is None or document.salt != salt:
                continue
            most = min(end, len(tokens), MAX_MATCH)
            differing = np.flatnonzero(document.tokens[end - most : end] != tokens[-most:])
            length = most - 1 - int(differing[-1]) if len(differing) else most
            if length >= size:
                return length, document.tokens[end : end + MAX_DRAFTS].tolist()
        return 0, []

    def _index(self, number: int, end: int) -> None:
        """Enter a document's positions up to `end`, the number of tokens before it."""
        document = self._documents[number]
        for size in SIZES:
            first = max(document.num_indexed + 1, size)
            if first <= end:
                slots = self._slots(document.salt, document.tokens[first - size : end], size)
                self._table[slots] = np.arange(first, end + 1) + (number << 32)  # of equal slots, numpy keeps the last
        document.num_indexed = end

    def _slot(self, salt: bytes, tokens: list[int]) -> int:
        """`_slots` of all tokens. For one place, Python takes a fifth of numpy's time."""
        key = crc32(salt)
        for token in tokens:
            key = ((key ^ token) * MULTIPLIER) & MASK
        return (key >> 32) % len(self._table)

    def _slots(self, salt: bytes, tokens: np.ndarray, size: int) -> np.ndarray:
        """Places in the table of each `size` tokens in a row -> [num_tokens - size + 1]."""
        num, tokens = len(tokens) - size + 1, tokens.astype(np.uint64)
        keys = np.full(num, crc32(salt), dtype=np.uint64)
        for i in range(size):
            keys = (keys ^ tokens[i : i + num]) * np.uint64(MULTIPLIER)
        slots: np.ndarray = (keys >> np.uint64(32)) % np.uint64(len(self._table))
        return slots
