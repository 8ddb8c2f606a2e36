"""`octavo demo`: eight questions in one batch, and the table of statistics."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console, RenderableType
from rich.live import Live

from octavo.cli.commands import demo
from octavo.core.kv_cache_manager import KVCacheManager
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM


def test_eight_questions_are_answered_in_one_batch(call: Call, fake: type[FakeLLM]) -> None:
    done = call("demo", "--max-tokens", "3", "--block-size", "8")
    assert done.code == 0, done.err
    ((prompts, params),) = fake.made[0].requests  # one call: one continuous batch
    assert fake.made[0].engine == {"block_size": 8}
    assert len(prompts) == 8
    assert (params.max_tokens, params.greedy) == (3, True)
    for _, question in demo.QUESTIONS:
        assert done.lines.count(question) == 1
    assert "blue? sky the ..." in done.lines  # marked as cut short
    assert "24 in " in next(line for line in done.lines if line.startswith("tokens generated"))


def test_failed_question_is_reported(call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if all questions fail, and there is nothing to measure."""
    for questions in ((*demo.QUESTIONS[:-1], (None, "FAIL")), ((None, "FAIL"),)):
        monkeypatch.setattr(demo, "QUESTIONS", questions)
        done = call("demo", "--max-tokens", "3")
        assert done.code == 1 and "failed: " in done.err and "bug" not in done.err
        assert "tokens generated" not in done.out


def test_terminal_shows_unfinished_answers_on_one_line_each(
    call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    frames: list[str] = []

    def update(live: Live, lines: RenderableType) -> None:
        console = Console(width=80)
        with console.capture() as seen:
            console.print(lines)
        frames.append(seen.get())

    monkeypatch.setattr(Live, "update", update)
    assert call("demo", "--max-tokens", "2").code == 0
    assert frames[7].count("?") >= 8  # all eight have started before the first finishes
    assert len(frames[7].splitlines()) == 8
    assert frames[-1].strip() == ""  # finished answers leave the live table


def test_three_questions_share_a_system_prompt_of_several_blocks() -> None:
    shared = [system for system, _ in demo.QUESTIONS if system]
    assert len(demo.QUESTIONS) == 8
    assert len(shared) == 3
    assert len(set(shared)) == 1
    assert len(shared[0].split()) > 5 * 16


def test_summary_table() -> None:
    stats = dataclasses.replace(
        KVCacheManager(100, 16).stats(), num_used=40, num_saved_by_sharing=14, num_unfilled_slots=61, hit_rate=0.25
    )
    now = dataclasses.replace(stats, num_used=0, num_cached=33)
    console = Console(width=100, record=True, file=None, quiet=True)
    console.quiet = False
    with console.capture() as seen:
        console.print(demo.report(demo.Measurements(448, 900, 224, 8.0, [0.5, 0.75], stats, now)))
    rows = {line[:25].strip(): line[25:].strip() for line in seen.get().splitlines()}
    assert rows == {
        "tokens generated": "448 in 8.0 s",
        "tokens/s": "56.0",
        "time to first token": "0.50 s, the last of eight 0.75 s",
        "blocks used at peak": "40 of 100, 16 tokens each",
        "blocks saved by sharing": "14, at that peak",
        "prefix-cache hit rate": "25.0% of blocks; 224 of 900 prompt tokens were not computed",
        "unfilled slots": "61 of 640, at that peak",
        "blocks used now": "0, 33 kept in the cache",
    }
