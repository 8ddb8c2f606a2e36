"""The core's lines on the page: they are those of its files, and the lit ones are those that ran."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo.core
from octavo.view.playground.core_lines import FUNCTIONS, LINES, LineTrace, lines_of
from octavo.view.playground.history import Playgrounds
from octavo.view.playground.lessons import LESSONS

FILES = [Path(octavo.core.__file__).parent / name for name in ("block_pool.py", "kv_cache_manager.py")]


def in_the_file(name: str) -> tuple[list[str], set[int]]:
    """The lines of a method's file, and the numbers of those that change no block."""
    of_class, method = name.split(".")
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == of_class]
        for node in (each for found in classes for each in found.body):
            if not isinstance(node, ast.FunctionDef) or node.name != method:
                continue
            idle: set[int] = set()
            for each in ast.walk(node):
                source = ast.get_source_segment(text, each) or ""
                if isinstance(each, ast.stmt) and source.startswith(('"""', "assert ", "if self.events.blocks:")):
                    idle.update(range(each.lineno, (each.end_lineno or 0) + 1))
            return text.splitlines(), idle
    raise AssertionError(name)


@pytest.mark.parametrize("function", FUNCTIONS, ids=[function.__qualname__ for function in FUNCTIONS])
def test_shown_lines_are_those_of_the_files(function: Any) -> None:
    lines, idle = in_the_file(function.__qualname__)
    shown = dict(lines_of(function))
    assert all(lines[number - 1] == f"    {line}" for number, line in shown.items())
    assert lines[min(shown) - 1].startswith(f"    def {function.__name__}(")
    left_out = set(range(min(shown), max(shown) + 1)) - set(shown)
    assert left_out and left_out <= idle and not idle & set(shown)
    assert lines[max(shown)] == "" or max(shown) + 1 in idle, "the function's last line is shown"


def test_the_lesson_shows_the_lines() -> None:
    lesson = next(lesson for lesson in LESSONS if lesson.id == "block-manager")
    assert lesson.code == tuple(LINES) == tuple(line for each in FUNCTIONS for _, line in lines_of(each))
    assert len(LINES) > 40 and not any(step.lines for step in lesson.steps)


@pytest.mark.parametrize(
    ("step", "ran", "idle"),
    [
        (1, "block = self._untouched", "block = self._freed.pop()"),
        (2, "if num_new > 0:", "return block"),
        (3, "self.refs[block] += 1", "self._unlink(block)"),
        (4, "self._copy_on_write(sequence, group, block_ids, tail, plan)", "self.num_free += 1"),
        (4, "return", "self._link(block)"),
        (5, "self._freed.append(block)", "self._link(block)"),
        (6, "block = self._freed.pop()", "block = self._untouched"),
        (7, "self._link(block)", "return"),
        (8, 'self._evict(block, "room")', "self._link(block)"),
    ],
)
def test_each_step_runs_the_line_that_it_is_about(step: int, ran: str, idle: str) -> None:
    lesson = next(lesson for lesson in LESSONS if lesson.id == "block-manager")
    history, _, action = lesson.steps[step - 1].history.rpartition(";")
    phases = Playgrounds().answer(history, action)["phases"]
    lit = {LINES[line].strip() for phase in phases for line in phase.lines}
    assert ran in lit and idle not in lit and idle in {line.strip() for line in LINES}


def test_each_phase_has_its_own_lines() -> None:
    phases = {p.kind: p for p in Playgrounds().answer("4x4;new,7;fork,A", "write,A")["phases"]}
    first = {kind: LINES[min(phase.lines)].strip().split("(")[0] for kind, phase in phases.items() if phase.lines}
    assert first["allocate"] == "def grow" and first["copy"] == "plan.copies.append"
    assert first["decrement"] == "self.pool.release"
    assert LINES[max(phases["allocate"].lines)].strip() == "return block"
    assert LINES[max(phases["decrement"].lines)].strip() == "return"


def test_the_trace_ends_with_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = sys.gettrace()
    with LineTrace():
        assert sys.gettrace() is not outer
    assert sys.gettrace() is outer
    nums = []
    for limit in (10_000, 20):
        monkeypatch.setattr("octavo.view.playground.core_lines.MAX_TRACED", limit)
        phases = Playgrounds().answer("64x4", "new,200")["phases"]
        nums.append(sum(len(phase.lines) for phase in phases))
    assert nums[0] > 50 * 7 and 10 < nums[1] <= 20
