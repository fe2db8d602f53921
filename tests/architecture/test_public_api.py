"""What stands on the core uses its public modules, and their names are known."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("public-modules.txt")
PUBLIC = tuple(
    line for line in LIST.read_text().splitlines() if not line.startswith("#")
)
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
) + sorted(
    path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts
)
USERS = sorted(
    path
    for folder in (
        "cli/src",
        "plugins/*/src",
        "engines/*/src",
        "benchmarks",
        "examples",
    )
    for suffix in ("py", "tmpl")
    for path in ROOT.glob(f"{folder}/**/*.{suffix}")
)
# Benchmarks that time one part alone, or replay the policy without a store.
ALLOWED = {
    ("sessions.py", "kvdock.resilience.executor"),
    ("direct.py", "kvdock.geometry.matching"),
    ("eviction_policies.py", "kvdock_segments.reuse"),
    ("hosts.py", "kvdock_segments.reuse"),
    ("hosts.py", "kvdock.tiers.uses"),
}
SNAPSHOT = Path(__file__).with_name("public-api.txt")


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Return the modules of the core that a file imports."""
    if path.suffix != ".py":
        return set(
            re.findall(r"^ *from (kvdock[\w.]*) import", path.read_text(), re.MULTILINE)
        )
    return {
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    } | {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }


@pytest.mark.parametrize("path", [*USERS, *PAGES], ids=short)
def test_only_public_modules_are_imported(path: Path) -> None:
    private = {
        module
        for module in imported(path)
        if module.split(".")[0] in {"kvdock", "kvdock_segments"}
        and module not in PUBLIC
        and (path.name, module) not in ALLOWED
    }
    assert not private, f"{short(path)} imports {private}: see {short(LIST)}"


def test_the_reference_describes_what_is_public_and_nothing_else() -> None:
    found = {
        module
        for page in (ROOT / "docs/reference").rglob("*.md")
        for module in re.findall(r"automodule:: ([\w.]+)", page.read_text())
    }
    assert found == set(PUBLIC)


def signature(value: object) -> str:
    """Return how a public name is called, or its members."""
    if inspect.isclass(value):
        own = sorted(
            name
            for name in vars(value)
            if not name.startswith("_") and not name.startswith("mro")
        )
        return f"class: {', '.join(own)}"
    if callable(value):
        found = inspect.signature(value)
        return str(
            found.replace(
                parameters=[
                    # What a default is depends on the machine; that there is one, not.
                    one
                    if one.default is inspect.Parameter.empty
                    else one.replace(default=...)
                    for one in found.parameters.values()
                ]
            )
        ).replace("Ellipsis", "...")
    return type(value).__name__


def public_api() -> str:
    """Return every public name of the packages, a line each."""
    lines = []
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            # Addresses of objects would differ from run to run.
            text = re.sub(r" at 0x[0-9a-f]+", "", signature(value))
            lines.append(f"{package}.{name} {text}")
    return "\n".join(lines) + "\n"


def test_every_change_of_the_public_api_shows_in_review() -> None:
    """To accept a change: python tests/architecture/test_public_api.py."""
    assert public_api() == SNAPSHOT.read_text(), (
        test_every_change_of_the_public_api_shows_in_review.__doc__
    )


def undocumented(module: str) -> Iterator[str]:
    """Yield the public names of a module, and of its classes, without a docstring."""
    namespace = importlib.import_module(module)
    if not namespace.__doc__:
        yield module
    names = getattr(namespace, "__all__", None) or [
        name
        for name, value in vars(namespace).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
    for name in names:
        value = getattr(namespace, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            if not inspect.getdoc(value):
                yield f"{module}.{name}"
            for member in vars(value) if inspect.isclass(value) else ():
                attribute = inspect.getattr_static(value, member)
                # A test's name is its sentence.
                public = not member.startswith(("_", "test_"))
                called = inspect.isroutine(attribute) or isinstance(attribute, property)
                if public and called and not inspect.getdoc(getattr(value, member)):
                    yield f"{module}.{name}.{member}"


@pytest.mark.parametrize("module", PUBLIC)
def test_what_is_public_has_a_docstring(module: str) -> None:
    """The linter asks for none: a private name often says it all."""
    assert not list(undocumented(module))


def test_a_public_name_without_a_docstring_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_api.py").write_text(
        '"""A module."""\n\n\n'
        "def call(): ...\n\n\n"
        "def _private(): ...\n\n\n"
        'class Kind:\n    """A class."""\n\n    def asked(self): ...\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert list(undocumented("planted_api")) == [
        "planted_api.call",
        "planted_api.Kind.asked",
    ]


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api())
