"""The wheel: what it holds, and that what it holds is enough to run.

It is installed into a new virtual environment, next to the dependencies of this one, and used in an empty folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import urllib.request
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import octavo
from tests.engine.models import make_talking_checkpoint

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    at_hand = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []  # else pip fetches it
    subprocess.run([*PIP, "wheel", "-q", "--no-deps", *at_hand, "-w", str(folder), str(ROOT)], check=True, timeout=240)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    python = home / "bin" / "python"
    install = [*PIP, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(ours))  # of which no .pth file is read, so not this repository
    return home / "bin"


@pytest.fixture
def run(programs: Path, tmp_path: Path) -> Run:
    def run(program: str, *arguments: str) -> str:
        command = [str(programs / program), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=120
        ).stdout

    return run


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"octavo-{octavo.__version__}.dist-info/METADATA").decode()
    package = ROOT / "src" / "octavo"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    info = {name for name in names if name.startswith("octavo-")}
    assert names - info == {name for name in files if "__pycache__" not in name}
    assert {
        "octavo/py.typed",
        "octavo/kernels/cpu/native.cpp",
        "octavo/kernels/cpu/chunks.h",
        "octavo/kernels/cpu/experts.h",
        "octavo/kernels/cpu/grouped.h",
        "octavo/kernels/cpu/step.h",
        "octavo/kernels/cpu/team.h",
        "octavo/view/static/index.html",
    } <= names
    assert any(name.endswith("/licenses/LICENSE") for name in info)
    description = metadata.split("\n\n", 1)[1]
    assert description.startswith("# Octavo") and not re.findall(r"\]\((?!https://)", description)


def test_it_runs_in_an_empty_folder(run: Run, programs: Path) -> None:
    where = Path(run("python", "-c", "import octavo; print(octavo.__file__)").strip())
    assert where.is_relative_to(programs.parent)
    assert octavo.__version__ in run("octavo", "--version")
    assert "smollm2-135m-instruct" in run("octavo", "models")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a tiny model that can chat."""
    folder = make_talking_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return str(folder)


def test_its_demo_answers_eight_questions(run: Run, model: str) -> None:
    printed = run("octavo", "demo", "--model", model, "--max-tokens", "4", "--num-gpu-blocks-override", "512")
    assert printed.count("?\n") == 6 and "Write one sentence about a lighthouse." in printed
    assert re.search(r"^blocks saved by sharing +[1-9]", printed, re.MULTILINE)


def test_it_generates_and_serves_its_page(run: Run, programs: Path, tmp_path: Path, model: str) -> None:
    options = ["--num-gpu-blocks-override", "128"]
    assert '"finish_reason"' in run("octavo", "generate", "--model", model, "-p", "Hello", "--json", *options)
    command = [str(programs / "octavo"), "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"serving on (http\S+)", line)))
            for path in ("/view/", "/view/static/main.mjs"):
                with urllib.request.urlopen(f"{url}{path}", timeout=20) as response:
                    assert response.status == 200 and response.read()
        finally:
            server.terminate()
            server.stderr.read()
        assert server.wait(60) == 0
