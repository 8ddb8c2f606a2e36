"""Tests third-party clients against a server with a tiny model, each client in its own virtual environment.

    python scripts/clients.py [NAME ...]      default: all clients
    python scripts/clients.py peers ...       other engines' own tests, see scripts/peers.py

Missing environments are created in .venv-clients/; PIP_ARGS holds further arguments for pip. The exit code is 1 if any
client's tests fail.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
PACKAGES = {
    "openai": ["openai>=2"],
    "langchain": ["langchain-openai"],
    "lm_eval": ["lm_eval[api]>=0.4.10", "transformers>=4.57"],  # transformers only for the tokenizer
    "guidellm": [
        "guidellm>=0.7",
        "torch>=2.11,<2.14",
    ],  # the range of this project, so one index of CPU builds serves both
    "curl": [],
    "schemathesis": ["schemathesis>=4"],
}
"""Client -> packages to install. Its tests are tests/clients/test_NAME.py."""


def make_environment(folder: Path, packages: list[str]) -> Path:
    """The Python of a virtual environment, made if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"== installing {folder.name}", flush=True)
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip_args = shlex.split(os.environ.get("PIP_ARGS", ""))
        subprocess.run([*command, *pip_args, "pytest>=8", *packages], check=True)
    return python


def python_of(name: str) -> Path:
    return make_environment(ENVIRONMENTS / name, PACKAGES[name])


def main(names: list[str]) -> int:
    if names[:1] == ["peers"]:
        import peers

        return peers.main(names[1:])
    sys.path.insert(0, str(ROOT))
    from tests.clients.tiny_server import serving

    failed = []
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory)) as url:
        for name in names or list(PACKAGES):
            print(f"== {name}", flush=True)
            tests = ["-m", "pytest", "-o", "addopts=", "-q", f"tests/clients/test_{name}.py"]
            environment = {**os.environ, "OCTAVO_TEST_SERVER": url, "OCTAVO_TEST_MODEL": str(Path(directory) / "model")}
            if subprocess.run([str(python_of(name)), *tests], cwd=ROOT, env=environment).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clients passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
