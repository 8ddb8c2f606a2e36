"""Rules of the project: allowed imports, sizes of folders, and agreement between its files."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import octavo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "octavo"


def modules_in(folder: str) -> list[str]:
    """The full names of all modules in a folder of the package."""
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    names = [".".join(("octavo", *p.relative_to(PACKAGE).with_suffix("").parts)) for p in paths]
    return [name.removesuffix(".__init__") for name in names]


def loaded_by(code: str) -> set[str]:
    """The modules that `code` loads in a fresh interpreter, beyond those loaded at its start.

    -S skips site-packages' start-up files, which load modules before any code runs; the path is passed instead.
    """
    probe = f"import sys; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before), sep='\\n')"
    path = os.pathsep.join([str(PACKAGE.parent), *(p for p in sys.path if p.endswith("site-packages"))])
    done = subprocess.run(
        [sys.executable, "-S", "-c", probe], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("folder", ["core", "params"])
def test_folder_imports_only_the_standard_library(folder: str) -> None:
    names = modules_in(folder)
    assert {"core": "octavo.core.scheduler", "params": "octavo.params.sampling_params"}[folder] in names
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    allowed = {"octavo", "octavo.errors", "octavo.integers", "octavo.core", "octavo.params"}
    assert not {
        name
        for name in loaded
        if name not in allowed
        and not name.startswith(("octavo.core.", "octavo.params."))
        and name.split(".")[0] not in sys.stdlib_module_names
    }


@pytest.mark.parametrize("folder", ["core", "params", "checkpoint", "engine", "text", "view", "cli", "simulate"])
def test_folders_without_tensors_import_no_torch(folder: str) -> None:
    loaded = loaded_by("\n".join(f"import {name}" for name in modules_in(folder)))
    assert f"octavo.{folder}" in loaded
    assert not {"torch", "transformers", "triton"} & loaded


@pytest.mark.parametrize(
    "module",
    [
        "octavo",
        "octavo.config",
        "octavo.checkpoint.catalog",
        "octavo.checkpoint.resolve",
        "octavo.bench.core",
        "octavo.bench.report",
        "octavo.doctor",
    ],
)
def test_modules_import_no_torch(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.fail(f"{module} is gone; take it out of this list, or put it back")
    assert "torch" not in loaded_by(f"import {module}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["bench", "--help"],
        ["bench", "serve", "--help"],
        ["doctor", "--help"],
        ["--version"],
        ["models"],
    ],
)
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    loaded = loaded_by(f"from octavo.cli.main import run\nassert run({arguments!r}) == 0")
    assert "octavo.cli.app" in loaded
    assert not {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub"} & loaded


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == octavo.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert octavo.__version__ in re.findall(r"^## \[?([\w.]+)\]?", changes, re.MULTILINE)


def test_makefile_and_project_require_the_same_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(d for d in project["dependencies"] if d.startswith("torch"))
    assert f"TORCH    ?= {wanted}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("target", ["demo", "quick"])
def test_make_says_what_it_does_before_pip_is_quiet_for_minutes(target: str, tmp_path: Path) -> None:
    command = ["make", "-n", target, f"VENV={tmp_path / 'venv'}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    pip = next(i for i, line in enumerate(lines) if "pip install" in line)
    assert lines[pip - 1].startswith("echo 'installing Octavo") and "minutes" in lines[pip - 1]


MAX_FILES = 14
ONE_FILE_EACH = {
    "cli/commands": "one file per command",
    "models/families": "one file per family",
    "simulate/experiments": "one file per figure",
    "engine": "14 files, and arg_utils for scripts that import vLLM's module of that name",
}


def test_folders_are_small() -> None:
    """At most 14 Python files besides __init__: a larger folder holds more than one subject."""
    counts = Counter(
        path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"
    )
    assert ONE_FILE_EACH.keys() <= counts.keys()
    assert not {folder: n for folder, n in counts.items() if n > MAX_FILES and folder not in ONE_FILE_EACH}


COVERED_BY = {
    "metadata.py": "reference/test_attention.py",
    "row_state.py": "triton/sampling/test_step_inputs.py",
    "reference/step.py": "triton/sampling/test_step_inputs.py",
    "cpu/ops.py": "reference/test_norms.py",
    "cpu/sampling.py": "reference/test_sampling.py",
    "triton/launch.py": "triton/test_precompile.py",
    "group_form.py": "cpu/test_grouped_linear.py",
    "groups.py": "cpu/test_grouped_linear.py",
    "reference/groups.py": "cpu/test_grouped_linear.py",
    "triton/rope.py": "triton/kv/test_write.py",
    "triton/linear/grouped_kernels.py": "triton/linear/test_grouped.py",
    "triton/linear/tuning.py": "triton/linear/test_skinny_hopper.py",
    "triton/experts/tuning.py": "triton/experts/test_assign.py",
    "triton/recurrent/layout.py": "triton/recurrent/test_delta_rule.py",
    "triton/attention/kv_tile.py": "triton/attention/test_paged_attention.py",
    "triton/attention/softmax.py": "triton/attention/test_paged_attention.py",
    "triton/attention/prefill_tuning.py": "triton/attention/test_prefill_hopper.py",
}
"""Kernel files without a test file of their own -> the test file that covers them."""


def test_kernel_tests_and_benchmarks_have_guessable_paths() -> None:
    """kernels/a/b.py is tested by tests/kernels/a/test_b.py; tests and benchmarks are named after kernel files."""
    kernels = {p.relative_to(PACKAGE / "kernels") for p in (PACKAGE / "kernels").rglob("*.py")}
    kernels = {path for path in kernels if path.name != "__init__.py"}
    folder = ROOT / "tests" / "kernels"
    tests = {p.relative_to(folder).as_posix().replace("_compiled.py", ".py") for p in folder.rglob("test_*.py")}
    missing = {str(path) for path in kernels if (path.parent / f"test_{path.name}").as_posix() not in tests}
    assert missing == COVERED_BY.keys() and set(COVERED_BY.values()) <= tests
    names = {path.name for path in kernels} | {
        "interpreter.py",
        "float8.py",
    }  # checks of Triton's interpreter, and of K and V
    assert {Path(test).name.removeprefix("test_") for test in tests} <= names
    benchmarks = (ROOT / "benchmarks" / "kernels").glob("bench_*.py")
    assert {path.name.removeprefix("bench_") for path in benchmarks} <= names


def private_accesses(source: str) -> list[str]:
    """Private attributes of other objects and private names of other modules that a file uses, and methods it replaces.

    `_replace` and `_asdict` are the public methods of a named tuple.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_|replace$|asdict$)", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found += [name.name for name in node.names if name.name.startswith("_")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "vars"):
            found.append(ast.unparse(node))
    return found


def test_the_view_uses_public_names_of_the_core() -> None:
    paths = sorted((PACKAGE / "view").rglob("*.py"))
    assert len(paths) > 15
    assert {str(path): found for path in paths if (found := private_accesses(path.read_text()))} == {}
    planted = "from a import _b\nsetattr(scheduler, 'add', f)\nself._c = scheduler._counted + self._pool._freed"
    assert len(private_accesses(planted)) == 4


def test_blocks_are_called_blocks() -> None:
    """Neither "page" nor "slab", the words of other systems."""
    wrong = re.compile(r"\b(pages?|slabs?)\b|_(page|slab)s?\b|\b(page|slab)s?_", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for folder in ("core", "engine", "kernels", "models", "runner", "cli")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path != PACKAGE / "cli" / "commands" / "view.py"  # it has web pages
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if wrong.search(line)
    ]
    assert not found


# -- scripts/size.py -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def size() -> ModuleType:
    spec = importlib.util.spec_from_file_location("size", ROOT / "scripts" / "size.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_folder_has_a_size_budget(size: ModuleType) -> None:
    """And no budget names a folder that does not exist."""
    assert set(size.BUDGETS) == set(size.sizes(PACKAGE))


SOURCE = '''"""A docstring
of two lines."""

# a comment
TEXT = """no
docstring"""  # and a comment


class A:
    """Docstring."""

    x = 1
    """Description of x."""

    def f(self) -> int:
        return (
            self.x
        )
'''


def test_size_counts_code_without_comments_and_docstrings(size: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text(SOURCE)
    (tmp_path / "top.py").write_text("x = 1\n")
    assert size.sizes(tmp_path) == {"core": (8, 18), "(top)": (1, 1)}


@pytest.mark.parametrize(("over", "code"), [(0, 0), (1, 1)])
def test_size_fails_above_a_budget(
    size: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], over: int, code: int
) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("x = 1\n" * (size.BUDGETS["core"] + over))
    assert size.main(tmp_path) == code
    assert ("core is 1 lines over its budget of" in capsys.readouterr().err) == bool(code)


def test_size_of_an_empty_folder_is_an_error(size: ModuleType, tmp_path: Path) -> None:
    assert size.main(tmp_path) == 1
