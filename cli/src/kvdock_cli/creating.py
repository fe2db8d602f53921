"""The command `kvdock new`: write a plugin project that passes its tests."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

from kvdock.discovery import installed
from kvdock.manifest import API_VERSION
from kvdock_cli.output import UsageProblem, emit

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def new(name: str, /, *, into: str = "", json: bool = False) -> int:
    """Write a plugin project: hooks, a simple store, tests.

    Args:
        name: The backend's one name: a-z, 0-9 and _.
        into: The folder to write; kvdock-NAME where none is given.
        json: Print one line of JSON.
    """
    folder = Path(into or f"kvdock-{name}")
    files = project(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageProblem(
            f"{folder} is there already and not empty", fix="Choose --into another."
        )
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    steps = [f"pip install -e '{folder}[test]'", f"kvdock check {name}"]
    lines = [
        f"wrote {folder}:",
        *(f"  {path}" for path in files),
        "",
        "next:",
        *(f"  {step}" for step in steps),
    ]
    data = {
        "schema": "kvdock.new/1",
        "ok": True,
        "folder": str(folder),
        "files": list(files),
        "next": steps,
    }
    return emit("\n".join(lines), data, as_json=json)


def project(name: str) -> dict[str, str]:
    """Return the files of a new project: path to content.

    Raises:
        UsageProblem: If the name cannot be one, or is taken.
    """
    if not _NAME.fullmatch(name):
        raise UsageProblem(
            f"{name!r} is not a valid backend name",
            fix="Use a-z, 0-9 and _, beginning with a letter.",
        )
    for candidate in installed():
        if candidate.name == name:
            raise UsageProblem(
                f"the name {name!r} is taken by {candidate.distribution}",
                fix="Choose another: two backends of one name disable each other.",
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
    }
    folder = resources.files("kvdock_cli") / "templates"
    files = {
        path: Template((folder / f"{source}.tmpl").read_text()).substitute(words)
        for path, source in places.items()
    }
    files[f"{package}/__init__.py"] = f'"""kvdock backend: {name}."""\n'
    files[f"{package}/py.typed"] = ""
    return files
