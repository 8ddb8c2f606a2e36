"""The tokens of a playground: numbers in order of their making, each with its text."""

from __future__ import annotations

from urllib.parse import unquote

from octavo.view.playground.pool import MAX_TOKENS, RefusedError, invalid

MAX_WORDS, MAX_WORD_CHARS = 512, 32


class TokenTexts:
    """`texts` by token. New tokens are named after their position, typed words are equal if their text is."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._typed: dict[str, int] = {}
        self._prompt: list[int] = []

    def _new(self, text: str) -> int:
        if len(self.texts) >= MAX_TOKENS:
            raise RefusedError(f"This history has made {MAX_TOKENS} tokens, the limit.", "Reset the pool.")
        self.texts.append(text)
        return len(self.texts) - 1

    def new(self, name: str, begin: int, count: int) -> list[int]:
        return [self._new(f"{name.lower()}{i + 1}") for i in range(begin, begin + count)]

    @property
    def num_shared(self) -> int:
        """Tokens of the shared prompt so far."""
        return len(self._prompt)

    def shared(self, count: int) -> list[int]:
        """The first tokens of the shared prompt."""
        self._prompt += self.new("p", len(self._prompt), count - len(self._prompt))
        return self._prompt[:count]

    def typed(self, words: str) -> list[int]:
        texts = unquote(words).split()
        if not 1 <= len(texts) <= MAX_WORDS or any(len(text) > MAX_WORD_CHARS for text in texts):
            raise invalid(f"a text has 1 to {MAX_WORDS} words of at most {MAX_WORD_CHARS} characters; shorten it")
        for text in texts:
            if text not in self._typed:
                self._typed[text] = self._new(text)
        return [self._typed[text] for text in texts]
