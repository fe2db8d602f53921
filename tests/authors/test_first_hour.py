"""The author's first hour, followed step by step in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock import (
    AttachConfig,
    Batch,
    BatchResult,
    Capability,
    Capacity,
    Finding,
    KindSupport,
    Manifest,
    Operation,
    Outcome,
    Region,
    Scope,
    Shard,
    Support,
    Verdict,
)

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
EXAMPLE = ROOT / "examples" / "minimal-plugin"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Run = Callable[[str], subprocess.CompletedProcess[str]]


def blocks() -> Iterator[tuple[str, str]]:
    for match in BLOCK.finditer(TUTORIAL.read_text()):
        yield match[1], match[2]


def changed(text: str, hunk: list[str]) -> str:
    """Apply a hunk that is found by its words, not by line numbers."""
    old = [line[1:] for line in hunk if line[:1] in (" ", "-")]
    new = [line[1:] for line in hunk if line[:1] in (" ", "+")]
    before, after = "\n".join(old), "\n".join(new)
    assert text.count(before) == 1, f"{text.count(before)} places for:\n{before}"
    return text.replace(before, after)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run commands where this repository is installed and nothing can be fetched."""
    folder = tmp_path_factory.mktemp("author")
    home = folder / "venv"
    venv.create(home, with_pip=True)
    (site,) = home.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    # As if everything were installed here, editable installations among it.
    lines = [f"import site; site.addsitedir({path!r})" for path in ours]
    (site / "everything.pth").write_text("\n".join(lines) + "\n")
    kvdock = home / "bin" / "kvdock"
    kvdock.write_text(
        f"#!{home}/bin/python\nfrom kvdock_cli.main import main\nmain()\n"
    )
    kvdock.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{home}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "false",  # pip's way of saying "no isolation"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": "",
    }
    environment.pop("KVDOCK_PLUGINS", None)

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    run.folder = folder  # type: ignore[attr-defined] # where the tutorial writes
    return run


def said(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.args[-1]}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_the_tutorial_works_from_the_first_line_to_the_last(shell: Run) -> None:
    folder: Path = shell.folder  # type: ignore[attr-defined] # set by the fixture
    last = ""
    commands = 0
    for kind, body in blocks():
        lines = body.splitlines()
        if kind == "diff":
            path = folder / lines[0].strip()
            path.write_text(changed(path.read_text(), lines[1:]))
        elif kind == "console":
            for line in lines:
                done = shell(line.removeprefix("$ "))
                assert not done.returncode, said(done)
                last = done.stdout
                commands += 1
        elif kind == "text":
            for line in filter(None, lines):
                assert line in last, f"{line!r} is not in:\n{last}"
    assert commands >= 8


@pytest.mark.slow
def test_the_minimal_plugin_keeps_what_it_declares(shell: Run) -> None:
    done = shell(f"pip install --quiet {EXAMPLE}")
    assert not done.returncode, said(done)
    done = shell("kvdock check minimal --json")
    assert not done.returncode, said(done)
    report: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["counts"]["passed"] > 50
    assert any(test["reason"].startswith("UNDECLARED") for test in report["tests"])


def test_the_minimal_plugin_stays_under_40_lines() -> None:
    (source,) = EXAMPLE.glob("src/*/*.py")
    assert len(source.read_text().splitlines()) < 40


HOOKS = ROOT / "docs" / "reference" / "hooks.md"


def listed(heading: str) -> dict[str, str]:
    """Return the entries below a heading of the page of the hooks."""
    _, _, below = HOOKS.read_text().partition(f"\n{heading}\n")
    part, _, _ = below.partition("\n#")
    return dict(re.findall(r"^- `(\w+)`: (.*)$", part, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "members"),
    [
        ("## What a batch asks for", Operation),
        ("## What became of a key", Outcome),
        ("## How well a backend does something", Support),
        ("## How far something reaches", Scope),
        ("## What a pool may need", Capability),
    ],
)
def test_the_page_of_the_hooks_has_every_word_with_a_meaning_of_its_own(
    heading: str, members: type[Enum]
) -> None:
    found = listed(heading)
    assert [*found] == [member.name for member in members]
    assert len({*found.values()}) == len(found)


def test_the_page_of_the_hooks_gives_each_word_its_own_meaning() -> None:
    assert listed("## What a batch asks for")["EXISTS"].startswith("Say which keys")
    assert listed("## What became of a key")["OK"].startswith("Done")


@pytest.mark.parametrize(
    "record",
    [
        *(Manifest, KindSupport, AttachConfig, Shard, Region),
        *(Batch, BatchResult, Verdict, Finding, Capacity),
    ],
)
def test_the_page_of_the_hooks_has_every_field_of_what_they_take_and_return(
    record: type[attrs.AttrsInstance],
) -> None:
    fields = [field.name for field in attrs.fields(record) if field.init]
    assert [*listed(f"### `{record.__name__}`")][: len(fields)] == fields


@pytest.mark.parametrize(
    "method",
    ["object_bytes", "remaining_s()", "of(batch, outcomes)", "all(batch, outcome)"],
)
def test_the_page_of_the_hooks_has_the_methods_that_a_plugin_calls(method: str) -> None:
    assert f"- `{method}`: " in HOOKS.read_text()


def test_the_page_of_the_hooks_is_what_their_docstrings_say() -> None:
    code = "import fill_hooks, sys; sys.stdout.write(fill_hooks.page())"
    page = subprocess.check_output(
        [sys.executable, "-c", code], cwd=ROOT / "docs", text=True
    )
    assert HOOKS.read_text() == page, "run: python docs/fill_hooks.py"
