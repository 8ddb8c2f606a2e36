"""`octavo blocks`: sessions over the real core."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from octavo.cli.commands.blocks import Session
from octavo.errors import UsageError
from tests.cli.conftest import Call


@pytest.fixture
def session() -> Session:
    return Session(num_blocks=8, block_size=4)


def test_prompt_of_seven_tokens_takes_two_blocks(session: Session) -> None:
    assert session.run("allocate A Four score and seven years ago our") == ["A: 7 tokens in blocks 1 2"]
    assert session.run("show A") == [
        "A, 7 tokens",
        "  logical  physical  filled  refs  tokens",
        "  0        1         4/4     1     Four score and seven",
        "  1        2         3/4     1     years ago our",
    ]
    assert session.run("generate A fathers") == ["A: 8 tokens in blocks 1 2"]
    assert session.run("generate A brought") == ["A: allocates block 3", "A: 9 tokens in blocks 1 2 3"]


def test_stats_lines(session: Session) -> None:
    assert session.run("stats")[:3] == ["Hits: 0", "Misses: 0", "Hit Rate: 0.0%"]
    session.run("allocate A a b c d e f g h i")
    session.run("allocate B a b c d e f g h j")
    session.run("free A")
    assert session.run("stats") == [
        "Hits: 2",
        "Misses: 4",
        "Hit Rate: 33.3%",
        "Free Blocks: 5/8 (0 of them cached)",
        "Allocated Blocks: 3",
        "Saved by Sharing: 0 blocks",
        "Unfilled Slots: 3",
    ]


def test_equal_prefixes_are_shared(session: Session) -> None:
    session.run("allocate A a b c d e")
    assert session.run("allocate B a b c d x") == ["B: 5 tokens in blocks 1 3, 1 of them cached"]
    assert "2     a b c d" in session.run("show B")[2]


def test_every_word_is_a_token(session: Session) -> None:
    session.run("allocate A 1 23 4 5 6")
    assert session.run("allocate B 12 3 4 5 6") == ["B: 5 tokens in blocks 3 4"]


def test_write_to_a_shared_tail_copies_it_once(session: Session) -> None:
    session.run("allocate A a b c d e f")
    assert session.run("fork A B") == ["B: shares blocks 1 2 with A"]
    assert session.run("stats")[-2] == "Saved by Sharing: 2 blocks"
    assert session.run("generate A x") == ["A: block 2 is shared, copied to 3", "A: 7 tokens in blocks 1 3"]
    assert session.run("generate B y") == ["B: 7 tokens in blocks 1 2"]
    assert session.run("show B")[-1].endswith("1     e f y")
    assert session.run("show A")[-1].endswith("1     e f x")


def test_full_blocks_stay_cached_after_free(session: Session) -> None:
    session.run("allocate A a b c d e")
    assert session.run("free A") == ["A: 1 block free again, 1 kept in the prefix cache, 0 still in use"]
    assert session.run("allocate B a b c d e")[0].endswith("1 of them cached")


def test_name_can_be_reused_after_free(session: Session) -> None:
    session.run("allocate A a b")
    session.run("free A")
    assert session.run("show") == ["no sequences; allocate one"]
    with pytest.raises(UsageError, match="no sequence 'A'; there is none"):
        session.run("free A")
    assert session.run("allocate A c") == ["A: 1 token in blocks 1"]


def test_fork_keeps_its_blocks_after_free(session: Session) -> None:
    session.run("allocate A a b c d e")
    session.run("fork A B")
    assert session.run("free A") == ["A: 0 blocks free again, 0 kept in the prefix cache, 2 still in use"]
    assert [line.split()[1] for line in session.run("show B")[2:]] == ["1", "2"]


def test_no_room_is_reported_and_changes_nothing(session: Session) -> None:
    session.run("allocate A " + " ".join(f"t{i}" for i in range(28)))  # 7 of 8 blocks
    assert session.run("allocate B u v w x y") == ["no room: needs 2 blocks, 1 free, 0 cached; free a sequence"]
    assert session.run("show").count("A, 28 tokens") == 1
    assert session.run("generate A p q r s t") == [
        "A: allocates block 8",
        "no room: needs 1 block, 0 free, 0 cached; free a sequence",
    ]
    assert session.run("show A")[0] == "A, 32 tokens"
    assert session.run("stats")[4] == "Allocated Blocks: 8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("jump", "no command 'jump'; the commands are allocate,"),
        ("generate Z a", "no sequence 'Z'; there is A"),
        ("free Z", "no sequence 'Z'"),
        ("fork A A", "'A' exists"),
        ("allocate A b", "'A' exists"),
        ("allocate B", "usage: allocate NAME WORD..."),
        ("fork A", "usage: fork NAME NEW"),
        ("stats now", "usage: stats"),
        ("allocate B 'x", "No closing quotation"),
    ],
)
def test_invalid_line_is_refused_and_changes_nothing(session: Session, line: str, message: str) -> None:
    session.run("allocate A a")
    before = session.kv.stats()
    with pytest.raises(UsageError) as caught:
        session.run(line)
    assert message in str(caught.value)
    assert session.kv.stats() == before


def test_script_continues_after_an_invalid_line(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "session"
    script.write_text("# the first lesson\n\nallocate A a b c\nfree B\nstats\nexit\nfree A\n")
    done = call("blocks", "--script", str(script), "--num-blocks", "2", "--block-size", "2")
    assert done.code == 1, "an invalid line sets the exit status"
    assert done.lines[:5] == [
        "blocks> # the first lesson",
        "blocks> allocate A a b c",
        "A: 3 tokens in blocks 1 2",
        "blocks> free B",
        "error: no sequence 'B'; there is A",
    ]
    assert "Allocated Blocks: 2" in done.lines
    assert "blocks> free A" not in done.lines


def test_missing_script(call: Call, tmp_path: Path) -> None:
    done = call("blocks", "--script", str(tmp_path / "absent"))
    assert done.code == 2
    assert "No such file" in done.err


def test_script_must_be_utf_8(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "session"
    script.write_bytes("allocate A café\n".encode("latin-1"))
    done = call("blocks", "--script", str(script))
    assert done.code == 2
    assert f"cannot read {script}: " in done.err and "save it as UTF-8" in done.err


def test_stdin_must_be_utf_8(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in ((), ("--script", "-")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"allocate A \xe9\n"), encoding="utf-8"))
        done = call("blocks", *args)
        assert done.code == 2 and "save it as UTF-8" in done.err
