"""An engine process with a real model and a minimal step duration, that of a larger model.

python tests/proof/paced_engine.py '{"pace_s": 0.02}' FD
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from octavo.frontend import engine_main as engine_process


def build(options: dict[str, Any], enter: Callable[[str], None]) -> Any:
    pace_s: float = json.loads(sys.argv[1])["pace_s"]
    engine, text, summary = engine_process.build(options, enter)
    submit, due = engine.executor.submit, 0.0

    def paced(plan: Any) -> Any:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + pace_s
        return submit(plan)

    engine.executor.submit = paced  # type: ignore[method-assign]
    return engine, text, summary


if __name__ == "__main__":
    engine_process.run(build)
