"""The command `kvdock new`: write a plugin project that passes its tests."""

from __future__ import annotations

import re
from importlib import metadata, resources
from string import Template

from kvdock import API_VERSION
from kvdock.config import as_path
from kvdock.plugin import list_entry_points
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports._report import Report

# As the core's, but what a distribution is called may not end in "_".
_NAME = re.compile(r"[a-z](?:[a-z0-9_]{0,30}[a-z0-9])?")


def new(name: str, /, *, into: str | None = None, json: bool = False) -> int:
    """Write a plugin project: hooks, a simple store, tests.

    Args:
        name: The backend's one name: a-z, 0-9 and _.
        into: The folder to write; NAME where none is given.
        json: Print one line of JSON.
    """
    files = project(name)
    folder = as_path(name if into is None else into)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageProblem(
            f"{folder} is there already and not empty", fix="Choose --into another."
        )
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise UsageProblem(
            f"{folder} cannot be written: {error.strerror or error} ({error.filename})",
            fix="Choose --into another.",
        ) from error
    steps = [f"pip install -e '{folder}[test]'", f"kvdock check {name}"]
    lines = [
        f"wrote {folder}:",
        *(f"  {path}" for path in files),
        "",
        "next:",
        *(f"  {step}" for step in steps),
    ]
    data = {"folder": folder, "files": list(files), "next": steps}
    return emit(Report("kvdock.new/1", data, lines), as_json=json)


def project(name: str) -> dict[str, str]:
    """Return the files of a new project: path to content.

    Raises:
        UsageProblem: If the name cannot be one, or is taken.
    """
    if not _NAME.fullmatch(name):
        raise UsageProblem(
            f"{name!r} is not a valid backend name",
            fix="Use a-z, 0-9 and _, a letter first and no _ at the end.",
        )
    taken = _taken(name)
    if taken:
        raise UsageProblem(
            f"the name {name!r} is taken by {taken}",
            fix="Choose another: two of one name disable or replace each other.",
        )
    words = {
        "name": name,
        "title": name.title().replace("_", ""),
        "api": str(API_VERSION),
    }
    package = f"src/kvdock_{name}"
    places = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/plugin.py": "plugin.py",
        f"{package}/store.py": "store.py",
        "tests/test_contract.py": "test_contract.py",
        ".github/workflows/contract.yml": "contract.yml",
    }
    folder = resources.files("kvdock_cli") / "templates"
    files = {
        path: Template((folder / f"{source}.tmpl").read_text()).substitute(words)
        for path, source in places.items()
    }
    files[f"{package}/__init__.py"] = f'"""kvdock backend: {name}."""\n'
    files[f"{package}/py.typed"] = ""
    return files


def _taken(name: str) -> str:
    """Return which distribution has a name already, or ""."""
    for candidate in list_entry_points():
        if candidate.name == name:
            return candidate.distribution
    wanted = f"kvdock-{name}"
    ours = (resources.files("kvdock_cli") / "first_party.txt").read_text().split()
    if name in ours:
        return wanted
    try:
        return str(metadata.distribution(wanted).metadata["Name"])
    except metadata.PackageNotFoundError:
        return ""
