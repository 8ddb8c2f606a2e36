"""What a type checker says about calls of `LLM`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = """from octavo import LLM
LLM("model", max_model_len=5, dtype="half")
LLM(model="model", swap_space=1)
LLM("model", max_model_length=5)
LLM("model", dtype="float8")
LLM("model", pipeline_parallel_size=1)
LLM()
"""


@pytest.mark.proof  # a minute without mypy's cache
def test_arguments_of_llm_are_checked(tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    errors = re.findall(r"calls\.py:(\d): error: .*\[([a-z-]+)\]", done.stdout)
    assert errors == [("4", "call-arg"), ("5", "arg-type"), ("6", "call-arg"), ("7", "call-arg")], done.stdout
    assert 'did you mean "max_model_len"?' in done.stdout
