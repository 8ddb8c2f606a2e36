"""Planting bugs: each is a change of a syntax tree, so only the names and the code that it speaks of matter to it.

`Mutant("a release frees a shared block", "BlockPool.release", "if refs: ...")` drops this statement from the method,
in whatever file and format.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILES = (
    "src/octavo/core/**/*.py",
    "src/octavo/params/*.py",
    "src/octavo/engine/engine.py",
    "src/octavo/engine/executor.py",
    "src/octavo/engine/structured_output.py",
    "src/octavo/runner/*.py",
    "src/octavo/runner/drafts/*.py",
    "src/octavo/runner/passes/*.py",
    "src/octavo/runner/ranks/*.py",
    "src/octavo/runner/sampling/*.py",
    "tests/proof/oracle.py",
)
"""Where bugs are planted."""


class Mutant(NamedTuple):
    name: str
    where: str
    """The function, class or constant to change: `BlockPool.release`. A module's name may precede it."""
    old: str
    """An expression or statements that occur there once. `...` is any expression or, in a list, any number of items."""
    new: str = ""
    """What replaces it; nothing drops it. Each `...` stands for what the `...` of the same rank in `old` matched."""
    equivalent: str = ""
    """Why no test can notice it. The run fails if one does."""


class Code:
    """The trees of the files below `root`, with their functions, classes and constants by name."""

    def __init__(self, root: Path) -> None:
        self._modules = {path: ast.parse(path.read_text()) for glob in FILES for path in sorted(root.glob(glob))}
        self._defined = [
            (f".{path.stem}.{name}", path, node)
            for path, module in self._modules.items()
            for name, node in _definitions(module.body)
        ]

    def check(self, mutant: Mutant) -> None:
        """Raise LookupError if the mutant's place is missing or ambiguous, SyntaxError if its code does not compile."""
        scope = copy.deepcopy(self._find(mutant.where)[1])
        change(scope, mutant.old, mutant.new)
        compile(ast.unparse(scope), mutant.name, "exec")

    def plant(self, mutant: Mutant) -> tuple[Path, str]:
        """Change the tree for good. Return the path of its file, and the text of the file with the bug."""
        path, scope = self._find(mutant.where)
        change(scope, mutant.old, mutant.new)
        return path, ast.unparse(self._modules[path])

    def _find(self, where: str) -> tuple[Path, ast.stmt]:
        found = [(path, node) for name, path, node in self._defined if name.endswith(f".{where}")]
        if len(found) != 1:
            raise LookupError(f"{where} must be defined once in {', '.join(FILES)} and is defined {len(found)} times")
        return found[0]


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield name, node
                yield from ((f"{name}.{inner}", child) for inner, child in _definitions(node.body))
            case (
                ast.FunctionDef(name=name)
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
            ):
                yield name, node


def change(scope: ast.stmt, old: str, new: str) -> None:
    """Replace `old` by `new` in its one place in `scope`. Raise LookupError if there are none or several."""
    olds, news = ast.parse(old).body, ast.parse(new).body
    values = [node.value for node in (*olds, *news) if isinstance(node, ast.Expr)]
    of_expression = len(olds) == 1 and len(news) <= 1 and len(values) == 1 + len(news)
    places = [p for p in _places(scope, values[:1]) if news or p.run] if of_expression else []
    if not (of_expression and news):
        places += _places(scope, olds)
    if len(places) != 1:
        raise LookupError(f"what it replaces must occur once and occurs {len(places)} times:\n{old}")
    places[0].put(values[1:] if of_expression else news)


class _Place(NamedTuple):
    parent: ast.AST
    field: str
    run: slice | None
    """The nodes that match, in a field that is a list."""
    gaps: list[Any]
    """What each `...` matched: a node, or a list of nodes."""

    def put(self, nodes: list[Any]) -> None:
        filler = _Filler(self.gaps)
        if self.run is None:
            setattr(self.parent, self.field, filler.visit(ast.Return(*nodes)).value)
            return
        items = getattr(self.parent, self.field)
        items[self.run] = filler.visit(ast.List(nodes)).elts
        if self.field == "body" and not items:
            items.append(ast.Pass())


class _Filler(ast.NodeTransformer):
    """Puts what the gaps of the old code matched into those of the new."""

    def __init__(self, gaps: list[Any]) -> None:
        self._gaps = gaps

    def visit(self, node: ast.AST) -> Any:
        return self._gaps.pop(0) if _is_gap(node) else super().visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        singles = [field for field, value in ast.iter_fields(node) if isinstance(value, ast.AST)]
        super().generic_visit(node)
        if any(isinstance(getattr(node, field), list) for field in singles):
            raise LookupError("a `...` that matched several items stands where one has room")
        return node


def _places(scope: ast.stmt, pattern: list[Any]) -> Iterator[_Place]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for start, end in itertools.combinations(range(len(value) + 1), 2):
                    if (gaps := _match_items(pattern, value[start:end])) is not None:
                        yield _Place(parent, field, slice(start, end), gaps)
            elif len(pattern) == 1 and (gaps := _match(pattern[0], value)) is not None:
                yield _Place(parent, field, None, gaps)


def _is_gap(node: Any) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is ...


def _match(pattern: Any, node: Any) -> list[Any] | None:
    """Return what the gaps of the pattern match, None if the node does not match."""
    if _is_gap(pattern) and isinstance(node, ast.expr):
        return [node]
    if type(pattern) is not type(node):
        return None
    if isinstance(pattern, list):
        return _match_items(pattern, node)
    if not isinstance(pattern, ast.AST):
        return [] if pattern == node else None
    fields = [f for f in pattern._fields if f != "ctx"]  # a name is a name, read or written
    found = [_match(getattr(pattern, f), getattr(node, f)) for f in fields]
    return None if None in found else [gap for gaps in found for gap in gaps or ()]


def _match_items(patterns: list[Any], nodes: list[Any]) -> list[Any] | None:
    if not patterns:
        return None if nodes else []
    first, *others = patterns
    if not _is_gap(first):
        found = _match(first, nodes[0]) if nodes else None
        rest = None if found is None else _match_items(others, nodes[1:])
        return None if rest is None else [*(found or ()), *rest]
    tails = ((num, _match_items(others, nodes[num:])) for num in range(len(nodes) + 1))
    return next(([nodes[0] if num == 1 else nodes[:num], *tail] for num, tail in tails if tail is not None), None)
