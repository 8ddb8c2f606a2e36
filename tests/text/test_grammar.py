"""Grammars: exact bitmasks, error messages, and compilations that cannot harm the server."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLParserLimits
from tokenizers import decoders, models

from octavo.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, request_failed_error
from octavo.errors import EngineError, ParameterError, RequestFailedError
from octavo.integers import cdiv
from octavo.serve.openai import errors
from octavo.text import grammar as grammar_module
from octavo.text import grammar_sandbox
from octavo.text.grammar import (
    Grammar,
    GrammarCompiler,
    Matcher,
    choice_grammar,
    compute_bitmasks,
    json_grammar,
    regex_grammar,
)
from octavo.text.helper_process import HelperPool
from octavo.text.tokenizer import Tokenizer
from tests.text.samples import make_sentencepiece, train_byte_level

PADDING = 40
"""Tokens that the model has logits for, and the tokenizer no text."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_byte_level())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)
    yield made
    made.close()


def allowed(matcher: Matcher) -> set[int]:
    octets = compute_bitmasks([matcher])[0].view(np.uint8)
    return {i for i in range(8 * len(octets)) if octets[i // 8] >> i % 8 & 1}


def check_masks(tokenizer: Tokenizer, matcher: Matcher, texts: list[bytes], prefix: bytes = b"") -> int:
    """Compare the mask at every reachable state with the texts themselves; returns the number of states."""
    going_on = [t for t in texts if t.startswith(prefix)]
    expected = {
        i
        for i in range(tokenizer.vocab_size)
        if i not in tokenizer.special_ids
        and (piece := tokenizer.token_bytes(i))
        and any(t.startswith(prefix + piece) for t in going_on)
    }
    assert allowed(matcher) == expected, prefix
    assert matcher.is_accepting == (prefix in texts) and not matcher.error
    places = 1
    for token in sorted(expected):
        fork = matcher.fork()
        fork.accept_tokens([token])
        places += check_masks(tokenizer, fork, texts, prefix + tokenizer.token_bytes(token))
    assert allowed(matcher) == expected, "its forks went on without it"
    return places


def test_bitmask_has_exactly_the_allowed_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    texts = ["the dog", "the dogs", "then", 'a"b\\c\n/', "漢é", "漢", "<|im_end|>x"]
    made = compiler.compile(choice_grammar(texts))
    assert compute_bitmasks([made.start()]).shape == (1, cdiv(tokenizer.vocab_size + PADDING, 32) + 1)
    assert check_masks(tokenizer, made.start(), [t.encode() for t in texts]) > 70


def test_bitmasks_of_many_matchers(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Matchers of several grammars, ended and failed ones included, get the same mask as alone."""
    texts = [regex_grammar("[ab]{4}"), choice_grammar(["cat", "car", "dog"]), json_grammar('{"type": "integer"}')]
    made = [compiler.compile(text) for text in texts]
    matchers = [made[i % 3].start() for i in range(12)]
    texts = ["ab", "ca", "-1", "abba", "dog", "7", "x", "do", "1", "a", "", ""]
    for matcher, text in zip(matchers, texts, strict=True):
        matcher.accept_tokens(tokenizer.encode(text))
    alone = [compute_bitmasks([matcher.fork()])[0].tolist() for matcher in matchers]
    assert made[1].bitmasks(matchers).tolist() == alone and len({str(mask) for mask in alone}) > 6
    assert not any(alone[3]) and not any(alone[6]) and matchers[6].error and not matchers[3].error


def test_sentencepiece_tokenizer(compiler: GrammarCompiler) -> None:
    tokenizer = Tokenizer(make_sentencepiece())
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    texts = [" the", "and a", "é</s>"]
    assert check_masks(tokenizer, made.compile(choice_grammar(texts)).start(), [t.encode() for t in texts]) > 30
    made.close()


def test_special_tokens_are_never_allowed(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(regex_grammar(r"(.|\n)*")).start()
    unseen = tokenizer.special_ids | set(range(tokenizer.vocab_size, tokenizer.vocab_size + PADDING + 32))
    assert allowed(matcher) == set(range(tokenizer.vocab_size)) - unseen - {
        i for i in range(tokenizer.vocab_size) if not is_start_of_utf8(tokenizer.token_bytes(i))
    }
    named = compiler.compile('start: "a" <|im_start|> "b"').start()
    named.accept_tokens(tokenizer.encode("a"))
    assert allowed(named) == {tokenizer.backend.token_to_id("<|im_start|>")}


def is_start_of_utf8(piece: bytes) -> bool:
    """True if some text starts with these bytes."""
    for tail in (b"", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80"):
        try:
            (piece + tail).decode()
        except UnicodeDecodeError:
            continue
        return True
    return False


REGEXES = [
    r"[a-f]{3,9}", r"(the|dog)( (fox|naïve)){0,3}\.", r"\d{1,3}(\.\d{2})?", r"[^a-y]{4}", r"(?i)quick|lazy", r"^a+b?$",
    r"a/b\\c\"d", r"(🙂|漢){2}x?", r"[\s\S]{5}", r"x{3}|y{2,}z", r"-?[1-9][0-9]{0,4}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", REGEXES)
def test_text_that_follows_a_regex_matches_it(pattern: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    made = compiler.compile(regex_grammar(pattern))
    texts = {walk(tokenizer, made, random.Random(seed)) for seed in range(25)}
    for text in texts:
        assert re.fullmatch(pattern, text), text
    assert len(texts) > 1 or pattern.startswith(("^", "a/"))


def walk(tokenizer: Tokenizer, made: Grammar, rng: random.Random) -> str:
    matcher, ids = made.start(), list[int]()
    while True:
        choices = sorted(allowed(matcher))
        if not choices or (matcher.is_accepting and rng.random() < 0.3):
            assert matcher.is_accepting
            return b"".join(map(tokenizer.token_bytes, ids)).decode()
        ids.append(rng.choice(choices))
        matcher.accept_tokens(ids[-1:])


def test_disallowed_token_is_a_permanent_error(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(regex_grammar("abc")).start()
    matcher.accept_tokens(tokenizer.encode("x"))
    assert matcher.error and not compute_bitmasks([matcher]).any() and not matcher.is_accepting


def test_grammar_that_becomes_too_complex_later_is_an_error(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """It compiles, since states are computed lazily, and the probe in the sandbox ends before."""
    matcher = compiler.compile(regex_grammar("b{40}" + "(" * 30 + "a" + "{1,9})" * 30)).start()
    for _ in range(40):
        matcher.accept_tokens(tokenizer.encode("b"))
    begin = time.perf_counter()
    for _ in range(100):
        mask = compute_bitmasks([matcher])
        if matcher.error:
            break
        matcher.accept_tokens(tokenizer.encode("a"))
    assert "too many expressions" in matcher.error and "\n" not in matcher.error
    assert not mask.any() and time.perf_counter() - begin < 40


# -- what cannot be compiled -------------------------------------------------------------------------------------------


AMBIGUOUS = "start: e\ne: e e e | e e | A\nA: /[a-z ]/"


def test_a_bitmask_of_an_ambiguous_grammar_is_bounded(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Its parses multiply with every token. All requests wait for a bitmask."""
    matcher = compiler.compile(LLMatcher.grammar_from_lark(AMBIGUOUS)).start()
    for token in tokenizer.encode(" ".join("abcdefghijklmnopqrstuvwxyz" * 12), False):
        if matcher.error:
            break
        compute_bitmasks([matcher])
        matcher.accept_tokens([token])
    assert matcher.error.startswith("grammar_too_complex: ")


def chain(length: int) -> str:
    """A schema in which each definition refers to the next."""
    defs: dict[str, Any] = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return json_grammar(json.dumps({"$defs": defs | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}))


def nested(depth: int) -> str:
    return json_grammar('{"items":' * depth + "{}" + "}" * depth)


REFUSED = {
    "no group end": (regex_grammar("(a"), "unclosed group"),
    "look-ahead": (regex_grammar("(?=a)b"), "look-around"),
    "back reference": (regex_grammar(r"(a)\1"), "backreferences"),
    "deep regex": (regex_grammar("(" * 20_000 + "a" + ")" * 20_000), "invalid regex"),
    "no start": ("begin: 'a'", ""),
    "no rule": ("", "no start rule"),
    "a rule of nothing but itself": ("start: start", "no output"),
    "a rule that never ends": ('start: a\na: a "x" a', "no output"),
    "deep grammar": ("start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "deeply nested"),
    "a file": ("%import .secret.KEY\nstart: KEY", "Unknown common regex"),
    "remote": (json_grammar('{"$ref": "http://localhost/x.json"}'), "not present in a registry"),
    "a file of the machine": (json_grammar('{"$ref": "file:///etc/passwd"}'), "not present in a registry"),
    "reference to nothing": (json_grammar('{"$ref": "#/$defs/a"}'), "does not exist"),
    "reference to itself": (json_grammar('{"$ref": "#"}'), "no output"),
    "unknown keyword": (json_grammar('{"if": {}, "then": {}}'), "Unimplemented keys"),
    "unknown type": (json_grammar('{"type": "strong"}'), "Invalid type"),
    "deep schema": (nested(200), "recursion limit"),
    "a chain of references": (chain(10_000), "to compile"),
    "a chain that only a long stack holds": (chain(400), "to compile"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_grammars_are_rejected(name: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_S", 30.0)  # no case depends on the time limit, on a busy machine too
    source, text = REFUSED[name]
    with pytest.raises(ParameterError) as caught:
        compiler.compile(source, "invalid_it_is")
    message = str(caught.value)
    assert text in message and message.startswith("structured_outputs: ") and "\n" not in message
    assert len(message) < grammar_module.MAX_MESSAGE_CHARS + 40
    assert (caught.value.code, caught.value.param) == ("invalid_it_is", "structured_outputs")


FINE = {
    "left recursion": 'start: start "a" | "a"',
    "ambiguous": 'start: e\ne: e e | "a" | "b" | e "+" e',
    "a thousand thousand": regex_grammar("(a{1000}){1000}"),
    "far choices": regex_grammar("(a|b)*a(a|b){200}"),
    "a tree": json_grammar('{"properties": {"c": {"items": {"$ref": "#"}}}, "type": "object"}'),
    "a long array": json_grammar('{"items": {"type": "string"}, "minItems": 1000000, "type": "array"}'),
    "doubled rules": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(30)) + '\na30: "x"',
}


@pytest.mark.parametrize("name", FINE)
def test_large_but_harmless_grammars_compile(name: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(FINE[name]).start()
    rng = random.Random(name)
    begin = time.perf_counter()
    for _ in range(40):
        if not (choices := sorted(allowed(matcher))):
            break
        matcher.accept_tokens([rng.choice(choices)])
    assert not matcher.error and time.perf_counter() - begin < 40


def test_exploding_grammar_does_not_delay_others(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one keeps the compiler busy for minutes."""
    monkeypatch.setattr(grammar_module, "COMPILE_S", 3.0)
    for warm in [compiler.submit(regex_grammar(f"warm{i}")) for i in range(4)]:
        warm.result()  # starts all processes
    explosion = compiler.submit(json_grammar('{"type": "integer", "multipleOf": 99999989}'))
    begin, num_turns = time.perf_counter(), 0
    others = [compiler.submit(regex_grammar(f"other{i}")) for i in range(4)]
    while not explosion.done():
        time.sleep(0.001)
        num_turns += 1
    assert all(o.done() and not o.exception() for o in others)
    assert 2.9 < time.perf_counter() - begin < 60 and num_turns > 100
    with pytest.raises(ParameterError, match=r"takes more than 3 s to compile"):
        explosion.result()
    compiler.compile(regex_grammar("afterwards"))


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_grammars_are_cached_and_evicted(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "NUM_CACHED", 3)
    first = compiler.compile(regex_grammar("one"))
    assert compiler.compile(regex_grammar("one")) is first
    compiler.compile(regex_grammar("two"))
    compiler.compile(regex_grammar("three"))
    assert compiler.compile(regex_grammar("one")) is first  # recently used
    compiler.compile(regex_grammar("four"))  # evicts "two"
    assert compiler.compile(regex_grammar("one")) is first
    compiler.compile(regex_grammar("five"))
    compiler.compile(regex_grammar("six"))
    compiler.compile(regex_grammar("seven"))
    assert compiler.compile(regex_grammar("one")) is not first
    large = compiler.compile(json_grammar(json.dumps({"enum": [f"{i:09}" for i in range(4000)]})))  # a large one
    assert compiler.num_cached_bytes > 1 << 20
    monkeypatch.setattr(grammar_module, "MAX_CACHED_BYTES", 1 << 20)
    compiler.compile(regex_grammar("eight"))  # evicts it
    assert compiler.num_cached_bytes < 1 << 20
    assert compiler.compile(json_grammar(json.dumps({"enum": [f"{i:09}" for i in range(4000)]}))) is not large
    assert compiler.num_cached_bytes > 1 << 20  # a single one may take more


def test_grammars_whose_callers_leave_evict_no_other(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "NUM_CACHED", 3)
    monkeypatch.setattr(compiler._threads, "submit", lambda call: None)  # the first ones are still compiling
    kept = compiler.submit(regex_grammar("kept"))
    for i in range(9):
        compiler.withdraw(compiler.submit(regex_grammar(f"left {i}")))
    assert compiler.submit(regex_grammar("kept")) is kept
    monkeypatch.undo()
    compiler._compile_next()
    assert kept.result()


def test_failure_is_not_cached(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been overloaded."""
    source = regex_grammar("a grammar without luck")
    with monkeypatch.context() as patch:
        patch.setattr(HelperPool, "call", lambda *args: json.dumps({"error": "no time", "num_bytes": 0}))
        with pytest.raises(ParameterError, match="no time"):
            compiler.compile(source)
    assert compute_bitmasks([compiler.compile(source).start()]).any()


def test_without_a_sandbox_process_the_request_fails(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process cannot be started, another ends at once."""
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(RequestFailedError, match=r"cannot start a process .*/no/such/python") as caught:
            made.compile(regex_grammar("a"))
        assert caught.value.code == "grammar_unavailable"
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RequestFailedError, match=r"cannot start a process .* exit code 1"):
            made.compile(regex_grammar("a"))
    made.compile(regex_grammar("a"))
    made.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_sandbox_processes_end_with_the_compiler(tokenizer: Tokenizer, forgotten: bool) -> None:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    made.compile(regex_grammar("a"))
    (helper,) = made.sandboxes.idle
    assert helper.process.poll() is None
    if forgotten:
        del made
        gc.collect()
    else:
        made.close()
        made.close()
        with pytest.raises(EngineError, match="closed"):
            made.submit(regex_grammar("b"))
    assert helper.process.poll() is not None


def test_resource_limits_of_sandbox_processes(compiler: GrammarCompiler) -> None:
    """The CPU limit ends a process whose parent is gone."""
    compiler.compile(regex_grammar("limited"))
    limits = Path(f"/proc/{compiler.sandboxes.idle[-1].process.pid}/limits")
    if not limits.exists():
        pytest.skip("only Linux shows the limits of another process")
    soft = {line[:25].strip(): line.split()[-3] for line in limits.read_text().splitlines()[1:] if "  " in line}
    assert soft["Max address space"] == str(grammar_sandbox.MEMORY_BYTES) and soft["Max core file size"] == "0"
    assert soft["Max stack size"] == str(grammar_sandbox.STACK_BYTES)
    assert grammar_sandbox.MAX_CPU_S <= int(soft["Max cpu time"]) < grammar_sandbox.MAX_CPU_S + 60


def test_dead_sandbox_process_is_replaced(compiler: GrammarCompiler) -> None:
    """The next grammar compiles all the same."""
    compiler.compile(regex_grammar("a"))
    for helper in compiler.sandboxes.idle:
        helper.process.kill()
        helper.process.wait()
    for i in range(6):
        compiler.compile(regex_grammar(f"b{i}"))


def test_a_grammar_whose_sandbox_is_stopped_is_compiled_by_another(compiler: GrammarCompiler) -> None:
    compiler.compile(regex_grammar("a{2}"))
    for helper in (stopped := list(compiler.sandboxes.idle)):
        os.kill(helper.process.pid, signal.SIGSTOP)
    compiler.compile(regex_grammar("a{3}"))
    assert any(helper.process.poll() is not None for helper in stopped), "it is replaced"


def test_sandbox_stack_is_shorter_than_a_thread_stack() -> None:
    """Without a limit (`ulimit -s unlimited`) threads get 2 MB: a grammar that exceeds them there ends the server."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_grammar; test_grammar.compile_alone(400)"
    run = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], timeout=120)
    assert run.returncode == 0


def compile_alone(length: int) -> None:
    """Compiles or rejects the grammar."""
    threading.stack_size(2 << 20)
    tokenizer = Tokenizer(train_byte_level())
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with contextlib.suppress(ParameterError):
        made.compile(chain(length))
    made.close()


def test_concurrent_compilation(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Threads submit equal and different grammars, and start matchers meanwhile."""
    texts: list[str] = []

    def work(seed: int) -> None:
        made = compiler.compile(regex_grammar(f"[a-c]{{{1 + seed % 3}}}"))
        texts.extend(walk(tokenizer, made, random.Random(n)) for n in range(20))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 160 and all(re.fullmatch("[a-c]{1,3}", text) for text in texts)


def test_tokenizer_without_token_bytes_is_rejected() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ParameterError, match="bytes of their own"):
        GrammarCompiler(Tokenizer(backend), 2)


def test_unknown_format_of_a_schema_is_an_annotation(
    tokenizer: Tokenizer, compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    """Pydantic writes such formats. A property may be named format, and a constant may contain one."""
    grammar_module._logged_formats.clear()
    fields = {
        "format": {"type": "string", "format": "password"},
        "enum": {"items": {"type": "string", "format": "binary"}, "maxItems": 1, "type": "array"},
        "const": {"const": {"format": "path"}},
        "day": {"format": "date", "type": "string"},
        "size": {"$ref": "#/$defs/size"},
    }
    definitions = {"size": {"anyOf": [{"type": "integer", "format": "int64"}]}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    with caplog.at_level("INFO", "octavo.text.grammar"):
        for _ in range(2):
            text = json_grammar(json.dumps(schema | {"$defs": definitions}))
    assert sorted(record.args[0] for record in caplog.records) == ["binary", "int64", "password"]  # type: ignore[index]
    written = {"format": "x", "enum": ["a"], "const": {"format": "path"}, "day": "2026-01-31", "size": 7}
    for value, is_right in ((written, True), (written | {"day": "x"}, False), (written | {"const": {}}, False)):
        matcher = compiler.compile(text).start()
        matcher.accept_tokens(tokenizer.encode(json.dumps(value)))
        assert (matcher.is_accepting, not matcher.error) == (is_right, is_right)


@pytest.mark.parametrize("name", sorted(grammar_module.FORMATS))
def test_known_formats_compile(name: str, compiler: GrammarCompiler) -> None:
    text = json_grammar(json.dumps({"type": "string", "format": name}))
    assert name in text and compiler.compile(text)


def test_growing_automaton_is_reported_as_too_complex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar compiles; its automaton grows with the output."""
    vocabulary = grammar_sandbox.GuidanceTokenizer([bytes([i]) for i in range(256)], [])
    limits = LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr(grammar_sandbox, "LIMITS", limits)
    text = grammar_module.regex_grammar("[ab]*a[ab]{16}c")
    matcher = grammar_module.Matcher(grammar_sandbox.compile_grammar(vocabulary.compiler_tokenizer(), text), 8, None)
    assert not matcher.error
    chance = random.Random(0)
    while not matcher.error:
        matcher.accept_tokens([chance.choice(b"ab")])
        grammar_module.compute_bitmasks([matcher])
    assert matcher.error.startswith("grammar_too_complex: ")
    failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason=matcher.error)
    problem = errors.to_api_error(
        request_failed_error(RequestOutput("a", None, [1], [failed], True, RequestMetrics(0.0))), "a"
    )
    assert (problem.status, problem.code, problem.param) == (400, "grammar_too_complex", "structured_outputs")


def test_schema_with_too_many_choices_is_reported_as_too_complex(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """If any of its properties may come next, the parser exceeds its item limit. The sandbox finds out first: giving up
    takes the parser tens of milliseconds, which would delay a step."""
    properties = {f"p{i}": {"type": "string"} for i in range(1200)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    with pytest.raises(ParameterError, match="items") as caught:
        compiler.compile(json_grammar(json.dumps(schema)))
    assert caught.value.code == "grammar_too_complex"
