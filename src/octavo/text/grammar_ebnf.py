r"""EBNF as llama.cpp (GBNF) and XGrammar write it, converted to llguidance's Lark.

    root  ::= "[" item ("," item)* "]"     # the output follows `root`
    item  ::= [a-z]+ | root | "\u00e9"{2,3} | .

A rule that refers to no recursive rule becomes a terminal, so one regular expression. If `root` is one, the conversion
is exact. Otherwise each terminal takes as much text as it can, as in Lark: every output matches the grammar, but one
that needs a shorter match is not found.

Time and memory are linear in the text.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import NamedTuple

IS_EBNF = re.compile(r"(?:\s|#[^\n]*(?:\n|\Z))*+[\w-]+\s*::=", re.ASCII)
TOKEN = re.compile(
    r"""(?P<skip>(?:\s|\#[^\n]*)+)
      | (?P<define>[\w-]+)\s*::=
      | (?P<rule>[\w-]+)
      | "(?P<text>(?:[^"\\\n]|\\.)*)"
      | \[(?P<negated>\^?)(?P<set>(?:[^\]\\\n]|\\.)*)\]
      | (?P<repeat>[*+?]|\{\s*(?P<min>\d{0,9})\s*(?P<comma>,?)\s*(?P<max>\d{0,9})\s*\})
      | (?P<mark>[.|()])""",
    re.VERBOSE | re.ASCII,
)
CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])", re.DOTALL)
ESCAPES = dict(zip("abefnrtv0", "\a\b\x1b\f\n\r\t\v\0", strict=True)) | {c: c for c in "\"'\\[]-^?/."}
ANY = r"/[\x{0}-\x{10FFFF}]/"
MAX_DEPTH = 100


class Piece(NamedTuple):
    """Part of a rule, as Lark.

    is_atom     True if an operator after it applies to all of it
    is_regular  True if it refers to no recursive rule
    """

    lark: str
    is_atom: bool
    is_regular: bool


def is_ebnf(grammar: str) -> bool:
    """True if the first thing in a grammar is `name ::=`, which Lark has not."""
    return IS_EBNF.match(grammar) is not None


def ebnf_to_lark(grammar: str) -> str:
    """Raises ValueError with the line of a mistake."""
    return _Converter(grammar).convert()


def _characters(text: str) -> list[str]:
    """The characters that a literal or a set spells, without escapes. A bare "-" of a set is "" here."""
    found = []
    for match in CHARACTER.finditer(text):
        *codes, escaped, plain = match.groups()
        code = next(filter(None, codes), None)
        if code is not None:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise ValueError(f"{match[0]} is no Unicode character")
            found.append(chr(number))
        elif escaped is not None:
            if escaped not in ESCAPES:
                raise ValueError(f"unknown escape \\{escaped}")
            found.append(ESCAPES[escaped])
        else:
            found.append("" if plain == "-" else plain)
    return found


def _set_regex(negated: str, text: str) -> str:
    """A set of characters as a regular expression that holds no character but letters, digits and code points."""
    chars = _characters(text)
    if not chars and not negated:
        raise ValueError("[] has no characters")
    parts = []
    at = 0
    while at < len(chars):
        first = last = chars[at] or "-"
        at += 1
        if 0 < at < len(chars) - 1 and chars[at] == "":  # "-" between two characters, not at an end
            last = chars[at + 1] or "-"
            at += 2
        if first > last:
            raise ValueError(f"the range {first}-{last} is reversed")
        parts.append(f"\\x{{{ord(first):x}}}" + (f"-\\x{{{ord(last):x}}}" if first != last else ""))
    return f"/[{negated}{''.join(parts)}]/" if parts else ANY


def _recursive(references: dict[str, list[str]]) -> set[str]:
    """The rules that refer to themselves, directly or through others, and those that refer to such a rule."""
    num_open = {name: len(found) for name, found in references.items()}
    users = defaultdict(list)
    for name, found in references.items():
        for reference in found:
            users[reference].append(name)
    ready = [name for name, number in num_open.items() if not number]
    for name in ready:  # grows
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user]:
                ready.append(user)
    return set(references) - set(ready)


class _Converter:
    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.tokens: list[re.Match[str]] = []
        self.at = self.depth = 0
        self.terminals: list[str] = []

    def convert(self) -> str:
        self._scan()
        references = self._references()
        if "root" not in references:
            raise ValueError("EBNF: there is no rule named root")
        recursive = _recursive(references)
        self.names = {
            name: f"r{i}_{name.replace('-', '_').lower()}" if name in recursive else f"R{i}"
            for i, name in enumerate(references)
        }
        self.recursive = recursive
        lines = [f"start: {self.names['root']}"]
        self.at = 0
        while self.at < len(self.tokens):
            name = self._take()["define"]
            lines.append(f"{self.names[name]}: {self._choices().lark}")
            if self.at < len(self.tokens) and self._peek("define") is None:
                raise self._error("unexpected )", self.tokens[self.at].start())
        return "\n".join(lines + self.terminals) + "\n"

    def _scan(self) -> None:
        at = 0
        while at < len(self.grammar):
            token = TOKEN.match(self.grammar, at)
            if token is None:
                raise self._error(f"cannot read {self.grammar[at : at + 20]!r}", at)
            at = token.end()
            if token["skip"] is None:
                self.tokens.append(token)

    def _references(self) -> dict[str, list[str]]:
        """Rule -> rules that its body names."""
        found: dict[str, list[str]] = {}
        name = ""
        for token in self.tokens:
            if token["define"] is not None:
                name = token["define"]
                if name in found:
                    raise self._error(f"{name} is defined twice", token.start())
                found[name] = []
            elif token["rule"] is not None:
                found[name].append(token["rule"])
        for token in self.tokens:
            if token["rule"] is not None and token["rule"] not in found:
                raise self._error(f"there is no rule named {token['rule']}", token.start())
        return found

    def _error(self, text: str, at: int) -> ValueError:
        return ValueError(f"EBNF, line {self.grammar.count(chr(10), 0, at) + 1}: {text}")

    def _peek(self, kind: str) -> str | None:
        return self.tokens[self.at][kind] if self.at < len(self.tokens) else None

    def _take(self) -> re.Match[str]:
        self.at += 1
        return self.tokens[self.at - 1]

    def _choices(self) -> Piece:
        pieces = [self._sequence()]
        while self._peek("mark") == "|":
            self._take()
            pieces.append(self._sequence())
        return self._joined(pieces, " | ")

    def _sequence(self) -> Piece:
        pieces: list[Piece] = []
        while self.at < len(self.tokens) and self._peek("define") is None and self._peek("mark") not in ("|", ")"):
            token = self._take()
            try:
                if token["repeat"] is None:
                    pieces.append(self._atom(token))
                elif pieces:
                    pieces[-1] = self._repeated(pieces[-1], token)
                else:
                    raise ValueError(f"{token[0]} has nothing to repeat")
            except ValueError as error:
                text = str(error)
                raise error if text.startswith("EBNF") else self._error(text, token.start()) from None
        return self._joined(pieces, " ")

    def _atom(self, token: re.Match[str]) -> Piece:
        if token["rule"] is not None:
            return Piece(self.names[token["rule"]], True, token["rule"] not in self.recursive)
        if token["text"] is not None:
            return Piece(json.dumps("".join(c or "-" for c in _characters(token["text"]))), True, True)
        if token["set"] is not None:
            return Piece(_set_regex(token["negated"], token["set"]), True, True)
        if token["mark"] == ".":
            return Piece(ANY, True, True)
        if token["mark"] != "(":
            raise ValueError(f"unexpected {token[0]}")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} nested groups")
        inner = self._choices()
        if self._peek("mark") != ")":
            raise ValueError("( is not closed")
        self._take()
        self.depth -= 1
        return Piece(f"({inner.lark})", True, inner.is_regular)

    def _repeated(self, piece: Piece, token: re.Match[str]) -> Piece:
        suffix = token["repeat"]
        if suffix[0] == "{":
            least, most = token["min"], token["max"] if token["comma"] else token["min"]
            if not (least or most) or (least and most and int(least) > int(most)):
                raise ValueError(f"{suffix} is no number of times")
            suffix = f"{{{least or 0},{most}}}"
        return Piece((piece.lark if piece.is_atom else f"({piece.lark})") + suffix, False, piece.is_regular)

    def _joined(self, pieces: list[Piece], separator: str) -> Piece:
        """Of pieces that are not all regular, those that are become terminals."""
        if len(pieces) == 1:
            return pieces[0]
        if all(piece.is_regular for piece in pieces):
            return Piece(separator.join(piece.lark for piece in pieces) or '""', False, True)
        return Piece(separator.join(map(self._lexeme, pieces)), False, False)

    def _lexeme(self, piece: Piece) -> str:
        if not piece.is_regular or piece.lark.isalnum() or piece.lark == '""':
            return piece.lark
        self.terminals.append(f"T{len(self.terminals)}: {piece.lark}")
        return f"T{len(self.terminals) - 1}"
