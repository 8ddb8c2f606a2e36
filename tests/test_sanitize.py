"""Parsing of compute-sanitizer's log for `make sanitize`; the log itself needs a GPU."""

from __future__ import annotations

import ast

import pytest
from scripts.sanitize import KERNELS, num_findings, num_ignored_races, outcomes

KERNEL, FILE = "_qkv_hopper", "qkv_hopper.py"


def lines_of(name: str, call: str) -> tuple[int, int]:
    """Lines of a kernel's `def` and of its first call of that name."""
    tree = ast.parse(next(KERNELS.rglob(FILE)).read_text())
    kernel = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    calls = [node for node in ast.walk(kernel) if isinstance(node, ast.Call) and ast.unparse(node.func) == call]
    return kernel.lineno, min(node.lineno for node in calls)


BEGIN, PARTS = lines_of(KERNEL, "gl.warp_specialize")
_, RING = lines_of(KERNEL, "make_ring")


def race(read: int, *written: int, file: str = FILE, name: str = KERNEL) -> str:
    report = f"========= Error: Race reported between Read access at {name}+0x100 in {file}:{read}\n"
    return report + "".join(
        f"=========     and Write access at {name}+0x1ba0 in {file}:{w} [117 hazards]\n" for w in written
    )


@pytest.mark.parametrize(
    ("report", "is_ignored"),
    [
        (race(BEGIN, BEGIN, PARTS), True),
        (race(BEGIN, BEGIN), True),
        (race(BEGIN, BEGIN, RING), False),
        (race(RING, BEGIN), False),
        (race(BEGIN, BEGIN, name="_finish"), False),
        (race(BEGIN, BEGIN, file="elsewhere.py"), False),
        (race(3, 3, file="norms.py", name="_rms_norm"), False),
        ("========= Error: Potential out-of-memory\n", False),
    ],
)
def test_races_of_warp_specialization_are_recognised(report: str, is_ignored: bool) -> None:
    assert num_ignored_races("tests/x.py::test_a " + report) == is_ignored
    assert num_findings("tests/x.py::test_a " + report) == 1


def test_log_is_counted() -> None:
    log = (
        f"tests/x.py::test_a[1] {race(BEGIN, BEGIN)}========= \n{race(RING, RING)}========= \nPASSED [ 14%]\n"
        "tests/x.py::test_b PASSED                    [ 28%]\n"
        f"tests/x.py::test_c {race(BEGIN, PARTS)}FAILED [100%]\n"
        "FAILED tests/x.py::test_c - assert 1 == 2\n"
    )
    assert [outcomes(log, word) for word in ("PASSED", "SKIPPED", "FAILED")] == [2, 0, 1]
    assert (num_findings(log), num_ignored_races(log)) == (3, 2)
    assert num_findings(log + "========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)\n") == 4
