"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
ENGINES = sorted(path.parent for path in ROOT.glob("engines/*/pyproject.toml"))
SOURCES = sorted(
    path
    for folder in ("core", "segments", "cli", "plugins/*", "engines/*")
    for path in ROOT.glob(f"{folder}/src/**/*.py")
)
CORE = [
    path
    for path in SOURCES
    if path.is_relative_to(ROOT / "core") or path.is_relative_to(ROOT / "segments")
]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_no_backend_is_named_outside_of_its_own_plugin(path: Path) -> None:
    """What a backend can do is asked from its manifest, never from its name."""
    names = {
        plugin.name: plugin for plugin in PLUGINS if not path.is_relative_to(plugin)
    }
    found = [
        f"{short(path)}:{line} names {value!r}"
        for value, line in strings(ast.parse(path.read_text()))
        if value in names
    ]
    assert not found


@pytest.mark.parametrize("folder", PLUGINS + ENGINES, ids=short)
def test_one_word_everywhere(folder: Path) -> None:
    word = folder.name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"kvdock-{word}"
    assert (folder / "src" / f"kvdock_{word}" / "py.typed").exists()
    if folder in PLUGINS:
        assert list(project["entry-points"]["kvdock.backends"]) == [word]


@pytest.mark.parametrize("folder", PLUGINS, ids=short)
def test_a_manifest_carries_the_name_of_its_folder(folder: Path) -> None:
    from kvdock import Dock

    dock = Dock.load(require=[folder.name])
    assert dock.backends[folder.name].manifest.name == folder.name


@pytest.mark.parametrize(
    "folder",
    [ROOT / "core", ROOT / "segments", ROOT / "cli", *PLUGINS, *ENGINES],
    ids=short,
)
def test_every_distribution_carries_its_licence_and_says_what_it_is(
    folder: Path,
) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "README.md").read_text().startswith(f"# {project['name']}\n")


def test_importing_kvdock_loads_nothing_heavy() -> None:
    code = "import sys, json, kvdock; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", code])))
    heavy = {"numpy", "torch", "typer", "click", "rich", "pydantic", "pytest", "cattrs"}
    assert not loaded & heavy


def test_importing_the_segments_loads_no_numpy_before_a_store_is_opened() -> None:
    code = "import sys; import kvdock_segments; print('numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"


def test_loading_every_backend_imports_no_client_library_and_no_numpy() -> None:
    code = (
        "import sys, json, kvdock; kvdock.Dock.load(); "
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", code])))
    heavy = {"numpy", "torch", "typer", "rich", "pydantic", "mooncake", "nixl"}
    assert not loaded & heavy


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return True
    if isinstance(value, ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in {"dict", "list", "set", "bytearray", "defaultdict"}
    )


@pytest.mark.parametrize("path", CORE, ids=short)
def test_the_core_has_no_mutable_state_in_its_modules(path: Path) -> None:
    """A dock is a value; what is loaded hangs on no module."""
    tree = ast.parse(path.read_text())
    found = [
        f"{short(path)}:{node.lineno} keeps something mutable in the module"
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and mutable(node.value)
        and "__all__" not in ast.unparse(node)
    ]
    found += [
        f"{short(path)}:{node.lineno} rebinds a module's name"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert not found


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_no_instance_check_asks_for_the_class_of_a_plugin(path: Path) -> None:
    tree = ast.parse(path.read_text())
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        for plugin in PLUGINS
        if node.module.split(".")[0] == f"kvdock_{plugin.name}"
        and not path.is_relative_to(plugin)
    }
    assert not foreign, "only a plugin itself imports its modules"


def test_no_module_is_a_drawer_for_leftovers() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert not [short(path) for path in SOURCES if path.stem in drawers]


def test_the_installed_workspace_is_this_one() -> None:
    """Guards the other tests: a stale installation would prove nothing."""
    for folder in [ROOT / "core", *PLUGINS]:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert metadata.version(project["name"]) == project["version"]


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_no_default_is_a_value_of_the_environment(path: Path) -> None:
    """Documentation, tracebacks and debuggers show the values of defaults."""
    found = [
        f"{short(path)}:{default.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for default in (*node.args.defaults, *node.args.kw_defaults)
        if default is not None and "os.environ" in ast.unparse(default)
    ]
    assert not found


def test_no_variable_of_development_is_taken_for_a_setting() -> None:
    """An engine does not start with a KVDOCK_ variable that is not a setting."""
    taken = re.compile(
        r"(?<![A-Z_])KVDOCK_(?!CONFIG\b|PLUGINS\b|DENY\b|PURE\b|TIERS\b|IMPORT_S\b"
        # The last one is only for what builds the core.
        r"|[A-Z0-9_]*__|WHEEL_PLATFORM\b)\w+"
    )
    files = [ROOT / "Makefile", *ROOT.glob(".ci/*"), *SOURCES]
    files += [*ROOT.glob("benchmarks/*.*"), *ROOT.glob("tests/**/*.py")]
    files += [
        *ROOT.glob("plugins/*/tests/**/*.py"),
        *ROOT.glob("engines/*/tests/**/*.py"),
    ]
    found = {
        f"{short(path)}: {name.group()}"
        for path in files
        for name in taken.finditer(path.read_text())
        if path != Path(__file__)
    }
    assert not found
