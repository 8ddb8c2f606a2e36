"""`octavo serve` with an engine on the oracle: no device computes, and every step checks all of memory.

    python tests/proof/oracle_server.py '{"step_s": 0.01}' serve MODEL --port 0 ...

The first argument goes to `oracle_engine.py`, or with `pace_s` to `paced_engine.py`, which has a real model. The limit
of open files starts at a shell's usual one; the server has to raise it. With `-dp`, each engine is such a one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import sys
from pathlib import Path

from octavo.cli.main import run as command
from octavo.frontend.process_transport import process_client
from octavo.frontend.replicas import replicas_client
from octavo.serve import launcher

PROGRAM = "paced_engine.py" if "pace_s" in json.loads(sys.argv[1]) else "oracle_engine.py"
ENGINE_COMMAND = (sys.executable, str(Path(__file__).with_name(PROGRAM)), sys.argv[1])
USUAL_FILES = 1024

if __name__ == "__main__":
    with contextlib.suppress(ValueError):  # the hard limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    launcher.process_client = functools.partial(process_client, command=ENGINE_COMMAND)
    launcher.replicas_client = functools.partial(replicas_client, command=ENGINE_COMMAND)
    sys.exit(command(sys.argv[2:]))
