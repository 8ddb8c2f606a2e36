"""No input is executed: neither pickles, nor text as code, nor code shipped with a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "octavo"
RUNS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path", "runpy.run_module"}
UNPICKLES = {"torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load"}
HARMLESS = {"multiprocessing.connection.wait", "multiprocessing.get_context"}
"""Of these processes, each is the program's own, and so is what it gets."""
METHODS = {"recv_pyobj", "send_pyobj", "read_pickle"}
"""Methods of any object: sockets of ZeroMQ and pandas unpickle in these."""
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
FETCHES = {"requests", "httpx", "aiohttp", "urllib3", "ftplib", "http.client", "urllib.request", "huggingface_hub"}
IMPORTS_BY_NAME = {
    "__init__.py",
    "kernels/triton/precompile.py",
    "models/registry.py",
    "simulate/experiments/__init__.py",
}
"""Files that import modules of Octavo by name, from fixed lists."""


def dotted(node: ast.expr) -> str:
    """The dotted name of an expression, such as a.b.c."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def is_of(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in sorted(imported(node)):
            if is_of(name, PICKLES) and name not in HARMLESS:
                yield node.lineno, f"imports {name}"  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if called.removeprefix("builtins.") in RUNS_CODE or called in UNPICKLES or called.split(".")[-1] in METHODS:
            yield node.lineno, f"calls {called}"
        if called.split(".")[-1] == "import_module":
            yield node.lineno, "imports by name"
        keywords = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else "?" for k in node.keywords if k.arg}
        if keywords.get("trust_remote_code", False) is not False or keywords.get("shell", False) is not False:
            yield node.lineno, f"{called} runs what it is given"
        if called in ("np.load", "numpy.load") and keywords.get("allow_pickle", False) is not False:
            yield node.lineno, f"{called} unpickles"


def test_no_input_is_executed() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 100
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {what}"
        for path in paths
        for line, what in dangers(ast.parse(path.read_text()))
        if not (what == "imports by name" and str(path.relative_to(SOURCE)) in IMPORTS_BY_NAME)
    ]
    assert not found


def test_server_modules_import_no_http_client() -> None:
    """A request cannot make the server fetch a URL."""
    found = [
        f"{path.name}: {name}"
        for path in sorted((SOURCE / "serve").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for name in sorted(imported(node))
        if is_of(name, FETCHES)
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.pool",
        "eval(x)",
        "builtins.exec(x)",
        "torch.load(path, weights_only=True)",
        "socket.recv_pyobj()",
        "importlib.import_module(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(line, shell=flag)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_dangerous_code_is_found(code: str) -> None:
    assert list(dangers(ast.parse(f"def f():\n    {code}")))


@pytest.mark.parametrize("code", ["re.compile(x)", "np.load(path, allow_pickle=False)", "model.eval()", "import json"])
def test_harmless_code_is_not_reported(code: str) -> None:
    assert not list(dangers(ast.parse(code)))
