"""Prompts have the tokens that were asked for, and begin alike where they should."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.args import BenchArgs
from octavo.bench.samples import Count, Sample, SingleTokenWords, make_samples
from octavo.errors import OctavoError, ParameterError
from tests.serve.in_process_server import run


def counter(rule: Callable[[str], int]) -> Count:
    async def count(text: str) -> int:
        return rule(text)

    return count


def words_and_bos(text: str) -> int:
    """One token a word of up to five letters, two for a longer one; one before them all."""
    return 1 + sum(1 + (len(word) > 5) for word in text.split())


words = counter(words_and_bos)
letters = counter(lambda text: len(text.replace(" ", "__")))


def made(count: Count = words, **options: Any) -> list[Sample]:
    return run(make_samples(BenchArgs(**options), count))


def test_words_of_one_token_are_found() -> None:
    found = run(SingleTokenWords.find(words))
    assert found.num_special == 1 and " the" in found.words
    assert " people" not in found.words and all(len(p) <= 6 for p in found.words)


def test_letters_are_where_there_are_no_words() -> None:
    found = run(SingleTokenWords.find(letters))
    assert found.num_special == 0 and set(found.words) == set("abcdefghijklmnopqrstuvwxyz")


def test_a_tokenizer_that_merges_anything_is_refused() -> None:
    with pytest.raises(ParameterError, match="no single tokens"):
        run(SingleTokenWords.find(counter(lambda text: 1)))


def test_random_lengths_are_exact() -> None:
    samples = made(num_prompts=20, random_input_len=30, random_output_len=7, random_prefix_len=5)
    assert len(samples) == 20 and len({s.prompt for s in samples}) == 20
    assert {words_and_bos(s.prompt) for s in samples} == {35} == {s.num_prompt for s in samples}
    assert {s.num_output for s in samples} == {7} and {s.time_s for s in samples} == {None}
    assert len({tuple(s.prompt.split()[:5]) for s in samples}) == 1
    assert len({tuple(s.prompt.split()[:8]) for s in samples}) > 1
    assert samples == made(num_prompts=20, random_input_len=30, random_output_len=7, random_prefix_len=5)
    assert samples != made(num_prompts=20, random_input_len=30, random_output_len=7, random_prefix_len=5, seed=1)


def test_random_lengths_are_spread() -> None:
    samples = made(num_prompts=400, random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    assert {s.num_prompt for s in samples} == set(range(10, 31))
    assert {s.num_output for s in samples} == set(range(5, 16))
    assert all(words_and_bos(s.prompt) == s.num_prompt for s in samples)


def test_prefixes_are_repeated() -> None:
    given: dict[str, Any] = {"dataset_name": "prefix_repetition", "prefix_repetition_num_prefixes": 3}
    given |= {"prefix_repetition_prefix_len": 6, "prefix_repetition_suffix_len": 9, "num_prompts": 9}
    samples = made(**given)
    heads = [tuple(s.prompt.split()[:6]) for s in samples]
    assert sorted(heads.count(h) for h in set(heads)) == [3, 3, 3] and len({s.prompt for s in samples}) == 9
    assert {words_and_bos(s.prompt) for s in samples} == {15} == {s.num_prompt for s in samples}
    in_turn = [tuple(s.prompt.split()[:6]) for s in made(**given, disable_shuffle=True)]
    assert in_turn[:3] == in_turn[3:6] == in_turn[6:] and heads != in_turn


def trace(path: Path, *rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return str(path)


def test_a_trace_keeps_times_lengths_and_what_is_shared(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", (0, 1000, 20, [1, 2]), (4000, 1024, 10, [1, 3]), (9000, 512, 5, [2]))
    one, two, three = made(dataset_name="timed_trace", dataset_path=path)
    assert [s.time_s for s in (one, two, three)] == [0.0, 4.0, 9.0]
    assert [s.num_output for s in (one, two, three)] == [20, 10, 5]
    assert (
        [words_and_bos(s.prompt) for s in (one, two, three)]
        == [1001, 1025, 513]
        == [s.num_prompt for s in (one, two, three)]
    )
    a, b, c = (s.prompt.split() for s in (one, two, three))
    assert a[:512] == b[:512] and a[512:600] != b[512:600] and a[512:] == c[: 1000 - 512]
    (scaled,) = made(dataset_name="timed_trace", dataset_path=path, timed_trace_scale=1 / 64, num_prompts=1)
    assert (scaled.num_prompt, scaled.num_output) == (17, 1)
    faster = made(dataset_name="timed_trace", dataset_path=path, request_rate=4.0)
    assert [s.time_s for s in faster] == pytest.approx([0.0, 4 / 9 * 0.5, 0.5])


def conversations(path: Path, *pairs: tuple[str, str]) -> str:
    rows: list[Any] = [
        {"conversations": [{"from": "human", "value": p}, {"value": a}, {"value": "x"}]} for p, a in pairs
    ]
    path.write_text(json.dumps([*rows, {"conversations": [{"value": "alone"}]}, {"id": "none"}]))
    return str(path)


def test_sharegpt_takes_first_rounds_of_some_length(tmp_path: Path) -> None:
    path = conversations(
        tmp_path / "s.json",
        ("one two three", "a b c d e"),
        ("short", "a b c d e"),
        ("an answer too short", "no"),
        ("x " * 1100, "too long a prompt"),
        ("x " * 900, "y " * 1200),
        ("the last of those", "w " * 9),
    )
    given: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": path, "disable_shuffle": True}
    samples = made(**given, num_prompts=3)
    assert [(s.prompt, s.num_prompt, s.num_output) for s in samples] == [
        ("one two three", 4, 6),
        ("the last of those", 5, 10),
        ("one two three", 4, 6),  # the file had no more
    ]
    assert [s.num_output for s in made(**given, sharegpt_output_len=3, num_prompts=9)][:2] == [3, 3]
    assert sum("too short" in s.prompt for s in made(**given, sharegpt_output_len=3, num_prompts=4)) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sharegpt", "[{", "s: Expecting"),
        ("sharegpt", "{}", "no conversation of 4 to 2048 tokens"),
        ("sharegpt", "[3]", "no conversations"),
        ("timed_trace", '{"timestamp": 0}', ":1: no 'input_length'"),
        ("timed_trace", "", "has no requests"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / ("s" if name == "sharegpt" else "s.jsonl")
    path.write_text(text)
    with pytest.raises(OctavoError, match=re.escape(message)):
        made(dataset_name=name, dataset_path=str(path))
    with pytest.raises(ParameterError, match="no file"):
        made(dataset_name=name, dataset_path=str(tmp_path / "absent"))
