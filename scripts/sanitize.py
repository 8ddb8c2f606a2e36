"""The kernel tests under NVIDIA's compute-sanitizer, in several processes at once: `make sanitize`, on a GPU machine.

    python scripts/sanitize.py [--tool memcheck|racecheck|synccheck|initcheck] [--processes N] [--timeout S] [-k WORD]

Says which tests passed without a finding, which had one, and which were not reached within the time; exits with 1 if
there was a finding or a failure, with 2 if something was not reached. What was found is in sanitize-TOOL-N.log of the
folder that --logs names.
"""

from __future__ import annotations

import argparse
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
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
FINDING = re.compile(r"^========= (?:Invalid|Error:|Uninitialized|Barrier error)", re.MULTILINE)


def collect(word: str) -> list[str]:
    command = [*PYTEST, "--collect-only", "-q", TESTS, *(("-k", word) if word else ())]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(TESTS + "::")]


def num_findings(log: str) -> int:
    """As the tool counts them; where it was cut short, as they stand there."""
    counted = SUMMARY.findall(log)
    return sum(int(a or b) for a, b in counted) if counted else len(FINDING.findall(log))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "synccheck", "initcheck"])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S")
    parser.add_argument("--logs", type=Path, default=Path("."), metavar="FOLDER")
    parser.add_argument("-k", dest="word", default="", metavar="WORD", help="only tests whose names have it")
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not here: it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    tests = collect(args.word)
    if not tests:
        print(f"no tests: {TESTS} needs a GPU, and -k a word that occurs", file=sys.stderr)
        return 1
    args.logs.mkdir(parents=True, exist_ok=True)
    sanitizer = ["compute-sanitizer", "--tool", args.tool, "--print-limit", "20", "--error-exitcode", "99"]
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
    passed = sum(len(re.findall(r"::.* PASSED", text)) for text in texts)
    skipped = sum(len(re.findall(r"::.* SKIPPED", text)) for text in texts)
    failed = [line for text in texts for line in re.findall(r"^(tests/\S+) FAILED", text, re.MULTILINE)]
    found = sum(map(num_findings, texts))
    missing = len(tests) - passed - skipped - len(failed)
    print(
        f"{args.tool}: {len(tests)} tests, {passed} passed, {skipped} skipped, {len(failed)} failed, "
        f"{missing} not reached; {found} findings"
    )
    for test in failed:
        print(test)
    return 1 if found or failed else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
