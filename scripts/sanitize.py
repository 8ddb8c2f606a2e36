"""Runs the kernel tests under NVIDIA's compute-sanitizer in several processes: `make sanitize`, on a GPU machine.

    python scripts/sanitize.py [--tool memcheck|racecheck|synccheck|initcheck] [--processes N] [--timeout S] [-k WORD]

Prints how many tests passed, failed and were not reached in time, and the number of findings. Exits with 1 for a
finding or a failure, with 2 if a test was not reached. Findings are in sanitize-TOOL-N.log in the folder --logs. Races
that Gluon itself causes at the start and end of a warp-specialized kernel are counted separately, and are no failure
(docs/gpu-kernels.md).
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests/gpu/test_triton.py"
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
KERNELS = ROOT / "src/octavo/kernels/triton"
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
FINDING = re.compile(r"========= (?:Invalid|Error:|Uninitialized|Barrier error)")
RACE = re.compile(r"========= Error: (Race reported between .*\n(?:========= +and .*\n)*)")
ACCESS = re.compile(r" access at (\w+)\+0x[0-9a-f]+ in (\w+\.py):(\d+)")


def collect(word: str) -> list[str]:
    command = [*PYTEST, "--collect-only", "-q", TESTS, *(("-k", word) if word else ())]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(TESTS + "::")]


def num_findings(log: str) -> int:
    """The number of findings in the tool's summary; if the log is cut short, the findings printed so far."""
    counted = SUMMARY.findall(log)
    return sum(int(a or b) for a, b in counted) if counted else len(FINDING.findall(log))


def num_ignored_races(log: str) -> int:
    """Number of races whose accesses are all code that Gluon adds to a warp-specialized kernel. It passes arguments to
    the partitions through shared memory; the log attributes this to the kernel's first line and the line of
    `warp_specialize`."""
    races = [ACCESS.findall(race) for race in RACE.findall(log)]
    return sum(
        bool(race) and all(is_warp_specialize_line(file, name, int(line)) for name, file, line in race)
        for race in races
    )


@functools.cache
def is_warp_specialize_line(file: str, name: str, line: int) -> bool:
    path = next(KERNELS.rglob(file), None)  # file names are unique among the kernels
    for kernel in ast.walk(ast.parse(path.read_text(encoding="utf-8") if path else "")):
        if isinstance(kernel, ast.FunctionDef) and kernel.name == name:
            calls = [node for node in ast.walk(kernel) if isinstance(node, ast.Call)]
            parts = [call.lineno for call in calls if ast.unparse(call.func) == "gl.warp_specialize"]
            return bool(parts) and line in (kernel.lineno, *parts)
    return False


def outcomes(log: str, word: str) -> int:
    """Number of tests with the outcome, which follows the test's name or stands on a line of its own after findings."""
    return len(re.findall(rf"\b{word} +\[ *\d+%\]", log))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "synccheck", "initcheck"])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S")
    parser.add_argument("--logs", type=Path, default=Path("."), metavar="FOLDER")
    parser.add_argument("-k", dest="word", default="", metavar="WORD", help="only tests whose names contain it")
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer not found: install the CUDA toolkit", file=sys.stderr)
        return 1
    tests = collect(args.word)
    if not tests:
        print(f"no tests: {TESTS} needs a GPU, and -k a word that occurs in a test's name", file=sys.stderr)
        return 1
    args.logs.mkdir(parents=True, exist_ok=True)
    sanitizer = ["compute-sanitizer", "--tool", args.tool, "--print-limit", "100000", "--error-exitcode", "99"]
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    for i in range(args.processes):
        if share := tests[i :: args.processes]:
            log = args.logs / f"sanitize-{args.tool}-{i}.log"
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            command = [*sanitizer, *PYTEST, "-v", *share]
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            running.append((process, log))
    end = time.monotonic() + args.timeout
    for process, _ in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    texts = [log.read_text(errors="replace") for _, log in running]
    passed, skipped, failed = (sum(outcomes(text, word) for text in texts) for word in ("PASSED", "SKIPPED", "FAILED"))
    num_ignored = sum(map(num_ignored_races, texts))
    found = sum(map(num_findings, texts)) - num_ignored
    missing = len(tests) - passed - skipped - failed
    print(
        f"{args.tool}: {len(tests)} tests, {passed} passed, {skipped} skipped, {failed} failed, {missing} not reached; "
        f"{found} findings" + (f", and {num_ignored} ignored races of Gluon's" if num_ignored else "")
    )
    for line in sorted({line for text in texts for line in re.findall(r"^FAILED tests/.*", text, re.MULTILINE)}):
        print(line)
    return 1 if found or failed else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
