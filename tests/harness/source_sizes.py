"""How much source a package has, in counts that denser lines do not lower."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "segments", "cli", "plugins/*", "engines/*")
KIT = "core/src/kvdock/testing"
VAGUE = frozenset(
    ["one", "found", "at", "given", "own", "mine", "there", "wanted", "kept"]
)
"""Nouns that say nothing of what a variable holds."""

KINDS = ("statements", "functions", "classes", "vague_names", "packed_calls")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr)


def packages(root: Path = ROOT) -> Iterator[tuple[str, list[Path]]]:
    """Yield the name of each package, the kit apart from the core, and its files."""
    for pattern in FOLDERS:
        for source in sorted(root.glob(f"{pattern}/src")):
            folder = source.parent.relative_to(root).as_posix()
            files = sorted(source.glob("**/*.py"))
            kit = [path for path in files if path.is_relative_to(root / KIT)]
            if kit:
                yield f"{folder}/testing", kit
            yield folder, [path for path in files if path not in kit]


def sizes(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Return of each package how many there are of each of `KINDS`."""
    return {
        package: sum((size(path.read_text()) for path in files), Counter())
        for package, files in packages(root)
    }


def size(source: str) -> Counter[str]:
    """Count what one file has.

    - statements: without imports and docstrings;
    - vague names: each time that one of `VAGUE` is assigned, a loop's included;
    - packed calls: those that unpack a tuple which their own function has made, as in
      `where = (a, b)` and `f(*where)`.
    """
    counts: Counter[str] = Counter()
    tuples: set[tuple[ast.AST, str]] = set()
    unpacked: list[tuple[tuple[ast.AST, ...], ast.Call]] = []
    for node, scopes in _walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            docstring = isinstance(node, ast.Expr) and isinstance(
                node.value, ast.Constant
            )
            imports = isinstance(node, ast.Import | ast.ImportFrom)
            counts["statements"] += not (docstring or imports)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                counts["functions"] += 1
            case ast.ClassDef():
                counts["classes"] += 1
            case ast.Name(ctx=ast.Store()):
                counts["vague_names"] += node.id in VAGUE
            case ast.Call() if any(isinstance(arg, ast.Starred) for arg in node.args):
                unpacked.append((scopes, node))
            case ast.Assign(targets=targets, value=value) if _is_tuple(value):
                tuples |= {(scopes[-1], ast.unparse(target)) for target in targets}
            case ast.AnnAssign(target=target, value=value) if _is_tuple(value):
                tuples.add((scopes[-1], ast.unparse(target)))
    counts["packed_calls"] = sum(
        any(
            _is_tuple(argument.value)
            or not tuples.isdisjoint((it, ast.unparse(argument.value)) for it in scopes)
            for argument in call.args
            if isinstance(argument, ast.Starred)
        )
        for scopes, call in unpacked
    )
    return counts


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield all nodes, each with the module and the functions around it."""
    rest: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while rest:
        node, scopes = rest.pop()
        yield node, scopes
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            scopes += (node,)
        rest += [(child, scopes) for child in ast.iter_child_nodes(node)]


def _is_tuple(value: ast.expr | None) -> bool:
    match value:
        case ast.Tuple():
            return True
        case ast.IfExp(body=body, orelse=other):
            return _is_tuple(body) or _is_tuple(other)
        case ast.BinOp(left=left, right=right):
            return _is_tuple(left) or _is_tuple(right)
    return False
