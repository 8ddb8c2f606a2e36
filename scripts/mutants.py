"""Mutation test: plant every known bug, one at a time, and check that a test fails.

    python scripts/mutants.py [--only TEXT] [--seconds 20] [--jobs 2]

The run copies the project and plants one bug of `tests/proof/mutants.py` at a time. The directed tests of `tests/core`
run on the copy first, then the state machine, then random workloads for `--seconds`; the first failure kills it. Those
of `tests/proof/runner_mutants.py` get a few tests of `tests/runner` instead.
The exit code is 1 if a mutant survives that is not marked equivalent, if an equivalent one is killed, or if the code no
longer contains what a mutant replaces.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.proof.mutants import MUTANTS  # noqa: E402
from tests.proof.planting import Code, Mutant  # noqa: E402
from tests.proof.runner_mutants import RUNNER_MUTANTS  # noqa: E402

# Ordered by speed and sensitivity. `hunt` covers the rest of tests/core, random workloads and small worlds.
FILES = {
    "": "block_pool kv_cache_manager",
    "cache/": "prefix_index swapping",
    "scheduling/": "scheduler_state admission planning step_draft preemption results failures",
    "./": "checkpoints scheduler corrupt_blocks fairness policy pins paper_figures requests speculation plan events "
    "snapshot",
}
DIRECTED = [f"tests/core/{folder}test_{name}.py" for folder, names in FILES.items() for name in names.split()]
MACHINE = ["-p", "_hypothesis_pytestplugin", "--hypothesis-profile=unshrunk", "tests/core/test_state_machine.py"]
RUNNER = [f"tests/runner/test_{name}.py" for name in ("model_runner", "device_work", "executor", "out_of_memory")]
RUNNER += [
    "tests/engine/test_executor_bytes.py",
    "tests/engine/test_structured_output.py::test_first_column_that_arrives_in_parts",
    "tests/runner/test_recorded_graphs.py",
    "tests/runner/test_drafter.py",
    "tests/runner/test_input_buffers.py",
    "tests/runner/ranks/test_plan_ring.py",
    "tests/runner/test_stub_platform.py::test_samples_from_a_slice[plain-plain-eager]",
    "tests/differential/test_speculation.py::test_drafts_change_no_output[llama-graphs-mixed]",
    "tests/differential/test_draft_model.py::test_a_model_that_drafts_for_itself_is_always_right",
    "tests/differential/test_speculation.py::test_grammars_get_the_same_tokens_in_fewer_passes",
    "tests/runner/test_oracle_workloads.py::test_random_workloads_with_drafts_give_the_same_tokens",
]
TEST_TIMEOUT_S = 240
"""A mutant that makes the tests hang counts as killed."""


class Verdict(NamedTuple):
    mutant: Mutant
    killer: str
    """The first failing test, or the workload's seed and its error; "" for a survivor."""
    time_s: float

    @property
    def as_declared(self) -> bool:
        return bool(self.killer) != bool(self.mutant.equivalent)


def stale(mutants: list[Mutant]) -> list[str]:
    """Return the errors of the table: code that is missing, occurs twice or does not compile, and repeated names."""
    code, errors = Code(ROOT), []
    for mutant in mutants:
        try:
            code.check(mutant)
        except (LookupError, SyntaxError) as error:
            errors.append(f"{mutant.name}: {error}")
    names = [m.name for m in mutants]
    return errors + [f"{name}: more than once in the table" for name in {n for n in names if names.count(n) > 1}]


class Copy:
    """A copy of the package and its tests, to plant bugs in."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading all plugins takes longer than most of these tests
        }
        self._mtime = time.time()

    def write(self, path: Path, text: str) -> None:
        """Write a file with a later mtime than any before, which invalidates Python's compiled files."""
        path.write_text(text)
        self._mtime += 2
        os.utime(path, (self._mtime, self._mtime))

    def python(self, *args: str, timeout_s: float) -> tuple[int, str]:
        try:
            done = subprocess.run(
                [sys.executable, *args], cwd=self.root, env=self.env, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return -1, "timeout"
        return done.returncode, done.stdout + done.stderr

    def first_failure(self, mutant: Mutant, seconds: float) -> str:
        """Return the first failing test or workload for this mutant, "" if none fails."""
        is_runners = mutant in RUNNER_MUTANTS
        for tests in (RUNNER,) if is_runners else (DIRECTED, MACHINE):
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no", *tests]
            code, output = self.python("-m", "pytest", *options, timeout_s=TEST_TIMEOUT_S)
            if code:
                found = re.search(r"^(?:FAILED|ERROR) (?:tests/(?:core|runner)/)?(\S+)", output, re.MULTILINE)
                return found[1] if found else output.strip().splitlines()[-1][:80]
        if is_runners:
            return ""
        hunt = f"from tests.proof.workloads import hunt; print(hunt({seconds}))"
        code, output = self.python("-c", hunt, timeout_s=seconds + TEST_TIMEOUT_S)
        return output.strip().splitlines()[-1][:80] if code or output.strip() else ""

    def judge(self, mutant: Mutant, seconds: float) -> Verdict:
        begin = time.monotonic()
        path, planted = Code(self.root).plant(mutant)
        text = path.read_text()
        self.write(path, planted)
        try:
            return Verdict(mutant, self.first_failure(mutant, seconds), time.monotonic() - begin)
        finally:
            self.write(path, text)


def judge_all(mutants: list[Mutant], seconds: float, num_jobs: int) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-") as folder, ThreadPoolExecutor(num_jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for i in range(num_jobs):
            copies.put(Copy(Path(folder) / str(i)))
        copy = copies.get()
        for table in (MUTANTS, RUNNER_MUTANTS):
            if not {*table}.isdisjoint(mutants) and (killer := copy.first_failure(table[0], 1)):
                sys.exit(f"error: the tests fail without a planted bug: {killer}; fix that first")
        copies.put(copy)
        num_done = 0

        def judge(mutant: Mutant) -> Verdict:
            nonlocal num_done
            copy = copies.get()
            try:
                verdict = copy.judge(mutant, seconds)
            finally:
                copies.put(copy)
            num_done += 1
            print(f"[{num_done:>3}/{len(mutants)}] {line(verdict)}", flush=True)
            return verdict

        return list(pool.map(judge, mutants))


def line(verdict: Verdict) -> str:
    result = verdict.killer or ("survives, as declared" if verdict.mutant.equivalent else "SURVIVES")
    if verdict.killer and verdict.mutant.equivalent:
        result = f"KILLED THOUGH EQUIVALENT: {result}"
    return f"{verdict.mutant.name:<60.60} {verdict.time_s:>6.1f} s  {result}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="run only mutants whose name contains TEXT")
    parser.add_argument(
        "--seconds", type=float, default=20, help="duration of random workloads for mutants that the tests miss"
    )
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if errors := stale(MUTANTS + RUNNER_MUTANTS):
        print("error: the tables of tests/proof do not match the code; update them", *errors, sep="\n", file=sys.stderr)
        return 1
    mutants = [m for m in MUTANTS + RUNNER_MUTANTS if args.only in m.name]
    begin = time.monotonic()
    verdicts = judge_all(mutants, args.seconds, args.jobs)
    print(f"\n{'mutant':<60} {'time':>8}  killed by")
    for verdict in verdicts:
        print(line(verdict))
    survivors = [v for v in verdicts if not v.killer]
    if survivors:
        print("\nsurvivors")
        for verdict in survivors:
            print(f"  {verdict.mutant.name}: {verdict.mutant.equivalent or 'NOT DECLARED EQUIVALENT'}")
    bad = [v for v in verdicts if not v.as_declared]
    num_killed = len(verdicts) - len(survivors)
    print(
        f"\n{num_killed} of {len(verdicts)} killed, {len(survivors)} survive, {len(bad)} not as declared; "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
