"""The playground: the numbers of every lesson, random actions, and invalid histories."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo
from octavo.core.request import Status
from octavo.errors import ParameterError
from octavo.view.playground.history import MAX_POOLS, Playgrounds
from octavo.view.playground.lessons import LESSONS, LessonStep
from octavo.view.playground.phases import MAX_PHASES, MAX_WORK
from octavo.view.playground.picture import picture_of
from octavo.view.playground.pool import MAX_TOKENS, Pool, RefusedError
from octavo.view.playground.session import ACTIONS, MAX_HELD_TOKENS, Playground

BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
STEPS = [pytest.param(step, id=f"{lesson.id}-{i}") for lesson in LESSONS for i, step in enumerate(lesson.steps, 1)]


def tables(answer: dict[str, Any]) -> dict[str, list[int]]:
    names = answer["names"]
    return {names[str(s.uid)]: np.frombuffer(s.block_ids, "<i4").tolist() for s in answer["picture"].sequences}


@pytest.mark.parametrize("step", STEPS)
def test_lesson_numbers_match_the_core(step: LessonStep) -> None:
    answer = Playgrounds().answer(step.history, step.action)
    assert answer["done"] is (step.action is None)
    lengths = {answer["names"][str(s.uid)]: s.num_tokens for s in answer["picture"].sequences}
    found = {**answer["compare"], **answer["picture"].stats, "num_tokens": lengths, "tables": tables(answer)}
    assert step.expect
    for name, wanted in step.expect.items():
        got = {key: found[name].get(key) for key in wanted} if isinstance(wanted, dict) else found[name]
        assert got == wanted, name


def test_lesson_ids() -> None:
    ids = [lesson.id for lesson in LESSONS]
    first = ["fragmentation", "bytes", "block-tables", "virtual-memory", "copy-on-write", "parallel-samples"]
    assert ids == [
        *first,
        "beam-search",
        "prefix-caching",
        "preemption",
        "kernel",
        "block-size",
        "block-manager",
        "questions",
    ]
    assert all(step.text and step.look for lesson in LESSONS for step in lesson.steps)
    assert set(LESSONS[0].as_dict()) == {"id", "title", "text", "steps", "colour"}
    assert set(LESSONS[0].as_dict()["steps"][0]) == {"text", "history", "look"}


def test_five_questions_have_one_right_answer_each() -> None:
    steps = LESSONS[-1].steps
    assert len(steps) == 5
    for step in steps:
        assert 0 <= step.answer < len(step.choices) == len(set(step.choices))
        before = Playgrounds().answer(step.history.rpartition(";")[0])
        assert before["picture"].stats != Playgrounds().answer(step.history)["picture"].stats


def test_bytes_lesson() -> None:
    """A token of Llama 2 7B has 524,288 bytes, one of Llama 3.1 8B 131,072."""
    llama_2, llama_3 = 2 * 32 * 32 * 128 * 2, 2 * 32 * 8 * 128 * 2
    mib = 1 << 20
    assert (llama_2, llama_3) == (524_288, 131_072)
    assert [16 * llama_2, 16 * llama_3] == [8 * mib, 2 * mib]
    assert 4096 * llama_2 == 2048 * mib and 260 * 8 == 2080 and 1028 * 8 == 8224
    assert [1752 * llama_2, 3 * 64 * llama_2, 24 * llama_2] == [876 * mib, 96 * mib, 12 * mib]
    assert 2048 * llama_3 == 256 * mib


def test_kernel_lesson_computes_softmax() -> None:
    """The last running sum is the denominator of softmax over all scores."""
    steps = next(lesson for lesson in LESSONS if lesson.id == "kernel").steps[1:-1]
    scores = np.array([float(step.rows[1][0]) for step in steps])
    assert len(scores) == 9 and steps[-1].rows[1][1:] == ("4", f"{np.exp(scores - scores.max()).sum():.3f}")
    running, top = 0.0, -np.inf
    for step, score in zip(steps, scores, strict=True):
        new_top = max(top, score)
        running, top = running * np.exp(top - new_top) + np.exp(score - new_top), new_top
        assert step.rows[1][1:] == (f"{top:.0f}", f"{running:.3f}")


def test_block_size_lesson_counts_what_the_core_has() -> None:
    """Every row of the slider's table. The times are those of docs/view.md, which says where they were measured."""
    docs = (Path(octavo.__file__).parents[2] / "docs" / "view.md").read_text(encoding="utf-8")
    for step in next(lesson for lesson in LESSONS if lesson.id == "block-size").steps:
        assert step.history in step.stops and len(step.stops) == len(step.rows) - 1
        for size, history, (shown, empty, entries, time_ms) in zip(BLOCK_SIZES, step.stops, step.rows[1:], strict=True):
            answer = Playgrounds().answer(history)
            assert answer["picture"].block_size == int(shown) == size
            assert f"{answer['compare']['paged_waste_slots']:,}" == empty
            assert f"{sum(map(len, tables(answer).values())):,}" == entries
            assert f"| {size} | {time_ms} |" in docs


def test_fragmentation_lesson_wastes_96_percent() -> None:
    """80 tokens of 2,048: 1,968 slots, 96 %."""
    compare = Playgrounds().answer("128x16x2048;new,80")["compare"]
    assert compare["contiguous_waste_slots"] == 2048 - 80 and round(100 * 1968 / 2048) == 96


def test_copy_on_write_has_four_phases() -> None:
    answer = Playgrounds().answer("8x4;new,7;fork,A", "write,A")
    phases = [(p.kind, p.block_id, p.from_block_id) for p in answer["phases"]]
    assert phases == [
        ("allocate", 3, None),
        ("copy", 3, 2),
        ("decrement", 2, None),
        ("repoint", 3, 2),
        ("write", 3, None),
        ("seal", 3, None),
    ]
    assert answer["says"] == (
        "A shares block 2 with 1 other, so it writes into a copy, block 3: block 2 goes from 2 references to 1."
    )


@pytest.mark.parametrize(
    ("history", "text"),
    [
        ("8x4;new,8;fork,A", "A's last block 2 is full, so the token goes into a new block, 3. Nothing is copied."),
        ("8x4;new,7", "A writes into block 2 in place: it has 1 reference. Nothing is copied."),
    ],
)
def test_write_without_copy_is_explained(history: str, text: str) -> None:
    answer = Playgrounds().answer(history, "write,A")
    assert answer["says"] == text and answer["why"]
    assert "copy" not in [p.kind for p in answer["phases"]]


def test_history_restores_the_session() -> None:
    """Another server restores the same session from it, and so does this one after it dropped the pool."""
    here, there = Playgrounds(), Playgrounds()
    history = "16x4x16x8"
    for action in ("share,8,3", "share,8,1", "fork,A,2", "type,A,to%20be%20or%20not", "beam,B,3,2", "free,A", "fill"):
        answer = here.answer(history, action)
        assert answer["done"] and answer["before"] == history and answer["pool"] == "16x4x16x8"
        history = answer["history"]
        again = there.answer(history)
        assert again == answer
    for i in range(MAX_POOLS + 1):
        here.answer(f"{i + 1}x1")
    assert len(here._playgrounds) == MAX_POOLS and history not in here._playgrounds
    assert here.answer(history) == again


def test_refused_action_changes_nothing() -> None:
    play = Playgrounds()
    whole = play.answer("4x4;new,7;fork,A")
    for action in ("new,99", "beam,A,8,9", "append,A,60", "free,Z", "resume,A", "fork,A,64", "beam,A,2,90"):
        refused = play.answer("4x4;new,7;fork,A", action)
        assert not refused["done"] and refused["history"] == "4x4;new,7;fork,A"
        assert refused["picture"] == whole["picture"] and refused["says"] and refused["why"]
        assert [p.kind for p in refused["phases"]] == ["refuse"]
    assert "needs 24 blocks, 2 are free and 0 cached" in play.answer("4x4;new,7;fork,A", "new,96")["says"]


@pytest.mark.parametrize(
    ("history", "action", "match"),
    [
        ("", None, "begins with its pool"),
        ("64", None, "begins with its pool"),
        ("0x4", None, "not supported"),
        ("4096x256", None, "not supported"),
        ("4x4x17", None, "reserve 1 to 16"),
        ("4x4x16x5", None, "at most 4 host blocks"),
        ("4x4", "jump", "there is no action 'jump'"),
        ("4x4", "__init__,4x4", "there is no action"),
        ("4x4", "new", "does not take 0 arguments"),
        ("4x4", "new,1,2", "does not take 2 arguments"),
        ("4x4", "new,0", "not a number from 1"),
        ("4x4", "new,-1", "not a number"),
        ("4x4", "new,\u0663", "not a number"),
        ("4x4", "new,9999999", "not a number"),
        ("4x4", "text,", "1 to 512 words"),
        ("4x4", f"text,{'x' * 33}", "at most 32 characters"),
        ("4x4;new,1", "preempt,A,now", "swap or recompute"),
        ("4x4", "beam,A,1", "no sequence"),
        ("4x4;new,1", "beam,A,17", "at most 16 beams"),
        ("4x4", "new,1;new,1", "one action at a time"),
        ("4x4;new,99", None, "action 1 of the history, new,99, cannot be done"),
        ("4x4" + ";new,1;free,A" * 300, None, "at most 500 actions"),
        ("4x4;" + "x" * 20_000, None, "16384 characters"),
    ],
)
def test_invalid_history_is_refused(history: str, action: str | None, match: str) -> None:
    if "no sequence" in match:
        assert match in Playgrounds().answer(history, action)["says"]
        return
    with pytest.raises(ParameterError, match=match):
        Playgrounds().answer(history, action)


def test_swapped_in_blocks_are_found_again() -> None:
    answer = Playgrounds().answer("8x4;share,8,2;preempt,A,swap;resume,A;free,A")
    assert answer["picture"].stats["num_cached"] == 2
    found = Playgrounds().answer("8x4;share,8,2;preempt,A,swap;forget;resume,A;free,A", "share,8,1")
    assert found["picture"].stats["num_hits"] == 2


def test_tokens_of_a_history_are_bounded() -> None:
    play = Playgrounds()
    history = "4096x16" + f";new,{MAX_TOKENS // 2};free,A;new,{MAX_TOKENS // 2}"
    assert "65536 tokens, the limit" in play.answer(history, "append,B,1")["says"]


def check(play: Playground) -> None:
    """The invariants of the core, and that the reply matches the pool."""
    kv, answer = play.kv, picture_of(play)
    pool, stats = kv.pool, kv.stats()
    assert stats.num_used + stats.num_cached + stats.num_free == pool.num_blocks
    owners: Counter[int] = Counter()
    for name, sequence in play.sequences.items():
        running = sequence.request.status is Status.RUNNING
        if running:
            assert len(sequence.block_ids) == kv.blocks_for(len(sequence.token_ids)) > 0
            assert sequence.num_computed == len(sequence.token_ids)
            owners.update(sequence.block_ids)
        assert answer["tokens"][str(play.uids[sequence])] == [play.tokens.texts[t] for t in sequence.token_ids]
        assert (name in answer["contiguous"]["refused"] or name in play.contiguous.starts) is running
    assert list(pool.refs) == [owners[b] for b in range(pool.num_blocks + 1)]
    assert tables(answer) == {name: s.block_ids for name, s in play.sequences.items()}
    words = np.frombuffer(answer["picture"].words, "<u2")
    assert [int(w) & 0x7FFF for w in words] == list(pool.refs)[1:]
    pieces = sorted((p["start"], p["reserved"], p["filled"]) for p in answer["contiguous"]["pieces"])
    pieces.append((play.contiguous.num_slots, 0, 0))
    for (a, size, filled), (b, *_) in itertools.pairwise(pieces):
        assert a + size <= b and 0 <= filled <= size
    compare = answer["compare"]
    assert compare["paged_waste_slots"] <= len(play.sequences) * (kv.block_size - 1)
    assert compare["paged_blocks"] <= compare["unshared_blocks"] == sum(owners.values())


def random_action(rnd: random.Random, names: list[str]) -> str:
    name = rnd.choice(names) if names else "A"
    return rnd.choice(
        [
            f"new,{rnd.randint(1, 12)}",
            f"share,{rnd.randint(1, 9)},{rnd.randint(0, 4)}",
            f"text,{'%20'.join(rnd.choice('abc') for _ in range(rnd.randint(1, 8)))}",
            f"append,{name},{rnd.randint(1, 6)}",
            f"type,{name},{'%20'.join(rnd.choice('abc') for _ in range(rnd.randint(1, 4)))}",
            f"write,{name}",
            f"fork,{name},{rnd.randint(1, 3)}",
            f"beam,{name},{rnd.randint(2, 4)},{rnd.randint(1, 3)}",
            f"free,{name}",
            f"free,{name}",
            "fill" if rnd.random() < 0.2 else "write,A",
            f"preempt,{name},{rnd.choice(['swap', 'recompute'])}",
            f"resume,{name}",
            "forget",
        ]
    )


def test_random_actions_keep_the_invariants() -> None:
    verbs: Counter[tuple[str, bool]] = Counter()
    for seed in range(15):
        rnd = random.Random(seed)
        size = rnd.choice([1, 2, 3, 4])
        play, history = Playgrounds(), f"{rnd.randint(4, 24)}x{size}x{rnd.randint(1, 4 * size)}x{rnd.randint(0, 4)}"
        for _ in range(30):
            shown = play._playgrounds.get(history)
            action = random_action(rnd, list(shown.sequences) if shown else [])
            answer = play.answer(history, action)
            history = answer["history"]
            verbs[action.split(",")[0], answer["done"]] += 1
            check(play._playgrounds[history])
        assert Playgrounds().answer(history)["picture"] == play.answer(history)["picture"]
    verbs_done = {verb for verb, done in verbs if done}
    assert verbs_done == set(ACTIONS)
    assert {verb for verb, done in verbs if not done} >= {"new", "append", "fork", "beam", "preempt", "resume"}


@pytest.mark.parametrize(
    "history",
    [
        "4096x16;share,65536;fork,A,63;preempt,A,recompute;resume,A",
        "4096x16;share,65536" + ";preempt,A,recompute;resume,A" * 100,
        "4096x16;share,65000" + ";preempt,A,swap;resume,A" * 100,
        "4096x16;share,30000;fork,A,7" + ";preempt,A,swap;resume,A" * 200,
        "4096x16" + ";share,30000,0" * 60,
        "4096x1;new,4000;fork,A,15" + ";beam,A,16,6" * 100,
        "4096x1" + ";new,4" * 40 + ";beam,A,16,100" * 100,
        "4096x16" + ";fill" + ";forget" * 400,
    ],
)
def test_work_and_memory_of_a_history_are_bounded(history: str) -> None:
    """Links come from anywhere. Each of these took seconds, or hundreds of megabytes."""
    playground = Playground(Pool.parse(history.partition(";")[0]))
    with contextlib.suppress(RefusedError, ParameterError):
        for action in history.split(";")[1:]:
            playground.do(action)
    assert playground.phases._work <= MAX_WORK + MAX_TOKENS
    assert sum(len(sequence.token_ids) for sequence in playground.sequences.values()) <= MAX_HELD_TOKENS
    assert len(playground.phases.latest) <= MAX_PHASES
    with contextlib.suppress(ParameterError):
        assert Playgrounds().answer(history)["done"]
