"""EBNF grammars: the texts that they allow, and mistakes with their lines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo.errors import ParameterError
from octavo.text import grammar as grammar_module
from octavo.text.grammar import GrammarCompiler
from octavo.text.grammar_ebnf import ebnf_to_lark, is_ebnf
from octavo.text.tokenizer import Tokenizer
from tests.clients.tiny_server import serving
from tests.text.samples import train_byte_level

JSON = r"""
# JSON, as llama.cpp's json.gbnf has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES = {
    # grammar -> texts that it has, texts that it has not
    'root ::= "a"{5,5}': (["aaaaa"], ["aaaa", "aaaaaa"]),
    'root ::= "a"{2} "b"{1,} "c"{,2}': (["aab", "aabbcc"], ["ab", "aabccc", "aac"]),
    'root ::= ("ab" | "abc")* [c-f]? "x"': (["x", "abcx", "ababccx", "abfx"], ["abca", "abg", "cc"]),
    "root ::= [a-c-] [-x] [^\\]\\[^]": (["b-a", "-x-"], ["d--", "-y-", "-x^", "-x]"]),
    "root ::= [&a-c] . [~[/]": (["a\n[", "&漢/"], ["&&&", "b"]),
    'root ::= "\\x41\\u6f22\\U0001F642\\n\\"\\\\"': (['A漢🙂\n"\\'], ["A漢🙂n"]),
    'root ::= item-1 | Item_1\nitem-1 ::= "a"\nItem_1 ::= "b"': (["a", "b"], ["c", "ab"]),
    'root ::=\n  "a"\n  | "b" # either\n\n# end': (["a", "b"], ["ab"]),
    'root ::= "" | "(" root ")" root': (["", "()", "(())()"], ["(", "())"]),
    'root ::= root "+" n | n\nn ::= [0-9]+ ("." [0-9]+)?': (["1", "1.25+3+44"], ["1.", "+1", "1++2"]),
    'root ::= ("if" | [a-z]+) " " root | "."': (["if .", "iffy if ."], ["if", "IF ."]),
    JSON: (['{"a": [1, -2.5, {"b":"x\\u00e9"}], "c": null}', "{}"], ["[]", '{"a": 01}', '{"a": "\t"}', "{'a': 1}"]),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_byte_level())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    yield made
    made.close()


@pytest.mark.parametrize("grammar", CASES)
def test_texts_of_a_grammar(grammar: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(grammar)
    for text, is_right in [(t, True) for t in CASES[grammar][0]] + [(t, False) for t in CASES[grammar][1]]:
        matcher = compiled.start()
        matcher.accept_tokens(tokenizer.encode(text))
        assert (matcher.is_accepting and not matcher.error) == is_right, text


def test_regular_grammar_is_exact(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Rules that overlap and stop anywhere are one expression: every text of up to six letters is decided right."""
    compiled = compiler.compile('root ::= a b | b a\na ::= "x" | "xy" "x"*\nb ::= a{0,2} [xy] "x"')
    a = {"x"} | {"xy" + "x" * n for n in range(7)}
    b = {"".join(parts) + c + "x" for n in range(3) for parts in itertools.product(a, repeat=n) for c in "xy"}
    expected = {s for x, y in itertools.product(a, b) for s in (x + y, y + x) if len(s) <= 6}
    found = set()
    for length in range(7):
        for text in map("".join, itertools.product("xy", repeat=length)):
            matcher = compiled.start()
            matcher.accept_tokens(tokenizer.encode(text))
            found |= {text} if matcher.is_accepting else set()
    assert found == expected and len(found) > 20


MISTAKES = {
    'root ::= a\n\nb ::= "x"': "line 1: there is no rule named a",
    'a ::= "x"': "no rule named root",
    'root ::= "b" |\n  ("a"': "line 2: ( is not closed",
    'root ::= "a")': "line 1: unexpected )",
    'root ::= | * "a"': "* has nothing to repeat",
    'root ::= "a"{3,2}': "{3,2} is no number of times",
    'root ::= "a"{}': "{} is no number of times",
    "root ::= [z-a]": "the range z-a is reversed",
    "root ::= []": "[] has no characters",
    'root ::= "\\ud800"': "is no Unicode character",
    'root ::= "\\q"': "unknown escape \\q",
    'root ::= "a"\nb ::= "a\n': "line 2: cannot read",
    'root ::= "a"\nroot ::= "b"': "line 2: root is defined twice",
    "root ::= " + "(" * 200 + '"a"' + ")" * 200: "more than 100 nested groups",
    "root ::= root": "no output",
}


@pytest.mark.parametrize("grammar", MISTAKES)
def test_mistakes_are_named(grammar: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(ParameterError) as caught:
        compiler.compile(grammar)
    assert MISTAKES[grammar] in str(caught.value)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "structured_outputs")


def test_recognised_by_its_shape() -> None:
    assert is_ebnf('# a comment ::=\n\n  root-1 ::= "a"') and is_ebnf("root\n::= [a]")
    assert not is_ebnf('start: a\na: "root ::= "') and not is_ebnf('// root ::=\nstart: "a"') and not is_ebnf("")
    assert not is_ebnf("#" * 200_000) and not is_ebnf(" " * 200_000 + "root")


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + '"a" | ' * 40_000 + '"a"',
        "root ::= r0\nr9000 ::= root\n" + "\n".join(f"r{i} ::= r{i + 1} [a-z]*" for i in range(9000)),
        "root ::= r0\nr9000 ::= [a]\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(9000)),
    ],
    ids=["choices", "recursive rules", "regular rules"],
)
def test_conversion_is_linear(text: str) -> None:
    """Four times the text takes about four times as long, here with a margin of five."""
    assert len(text) > 150_000
    begin = time.process_time()
    ebnf_to_lark(text)
    assert time.process_time() - begin < 5


def test_exploding_grammar_ends(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_S", 1.0)
    rules = "\n".join(f"a{i} ::= (a{i + 1} | [x] a{i + 1}){{1,1000}}" for i in range(12))
    with pytest.raises(ParameterError):
        compiler.compile(f"root ::= a0\n{rules}\na12 ::= [xy]*[x][xy]{{1,1000}}")


def test_over_a_socket(tmp_path: Path) -> None:
    """A grammar, a mistake in one, and a schema with an unknown format."""
    with (
        serving(tmp_path) as url,
        httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}, timeout=60) as client,
    ):

        def complete(**constraint: object) -> httpx.Response:
            body = {"prompt": "Hello", "max_tokens": 60, "structured_outputs": constraint}
            return client.post("/v1/completions", json=body)

        def text(**constraint: object) -> str:
            answer = complete(**constraint)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        assert text(grammar='root ::= greeting "!"{2}\ngreeting ::= "Hi" | "Hey"') in ("Hi!!", "Hey!!")
        refused = complete(grammar='root ::= "a"\n  | other')
        assert refused.status_code == 400
        assert "line 2: there is no rule named other" in refused.json()["error"]["message"]
        assert text(json={"type": "string", "format": "password", "maxLength": 3}).startswith('"')
    assert "format 'password'" in (tmp_path / "log").read_text()
