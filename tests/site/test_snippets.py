"""What the pages tell readers to type works as it stands there."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest
from snippets import (
    REASONS,
    ROOT,
    Block,
    Sandbox,
    blocks,
    commands,
    indented,
    pages,
    parse,
    read,
    words,
)

from kvdock import Dock
from kvdock.config import explain, load_configuration

LONG = bool(os.environ.get("TESTS_OF_KVDOCK_SITE_LONG"))

FOLLOWED = {
    "docs/tutorial.md": "tests/authors/test_first_hour.py",
    "docs/reference/model-descriptions.md": "tests/test_model_descriptions.py",
}
"""Pages that a test of their own follows from the first line to the last."""

MOST_NOT_RUN = {
    "server": 20,
    "gpu": 2,
    "cluster": 14,
    "engine": 21,
    "root": 6,
    "checkout": 12,
    "long": 8,
    "excerpt": 43,
}
"""Blocks that may be marked, by reason: more of them is a decision, not a habit."""

PAGES = [
    path
    for path in pages()
    if str(path.relative_to(ROOT)) not in FOLLOWED and blocks(path)
]
CODE = ("sh", "console", "python", "text")
DATA = ("toml", "json", "yaml", "ini")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runs(block: Block) -> bool:
    return not block.reason or (LONG and block.reason == "long")


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=named)
def test_the_blocks_of_a_page_run_in_their_order(path: Path, tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    found = [block for block in blocks(path) if runs(block)]
    python = [block for block in found if block.language == "python"]
    for block in found:
        match block.language:
            case "sh" | "console":
                sandbox.run(block)
            case "python" if block == python[-1]:
                sandbox.run_python(block, "\n".join(one.body for one in python))
            case "text":
                for line in filter(None, map(str.strip, block.body.splitlines())):
                    assert line in sandbox.output, f"{block}: {line}\n{sandbox.output}"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_block_can_be_run_or_read_or_says_why_not(path: Path) -> None:
    for block in blocks(path):
        assert block.language in (*CODE, *DATA), f"{block} has no language that is run"
        assert block.reason in ("", *REASONS), f"{block}: {block.reason!r} is no reason"
        if block.language in DATA and block.reason != "excerpt":
            read(block)
        if block.reason:
            parse(block)


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_settings_on_a_page_are_those_that_there_are(
    path: Path, tmp_path: Path
) -> None:
    schemas = {
        f"backends.{name}": backend.manifest.settings
        for name, backend in Dock.load().backends.items()
        if backend.manifest.settings
    }
    for block in blocks(path):
        if block.language != "toml" or block.reason:
            continue
        found = read(block)
        assert isinstance(found, dict)
        if {"core", "backends", "observers"} & {*found}:
            file = tmp_path / "kvdock.toml"
            # A certificate has to be there.
            here = re.sub(r'(ca_bundle = )".*"', rf'\1"{__file__}"', block.body)
            file.write_text(here)
            given = load_configuration(file=file, environ={})
            given = given.without(f"observers.{one}" for one in given.observers)
            assert explain(given, schemas, environ={}), str(block)


def test_no_page_has_code_without_a_fence() -> None:
    assert not [where for path in pages() for where in indented(path)]


def options() -> dict[tuple[str, ...], set[str]]:
    """Return the options of each command, by its words."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        fill_commands = import_module("fill_commands")
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return {
        tuple(name.split()): {
            fill_commands.option(one)
            for one in fill_commands.parameters(function)
            if not fill_commands.is_argument(one)
        }
        for name, function in fill_commands.commands()
    }


def test_every_command_of_kvdock_on_a_page_is_one_with_these_options() -> None:
    known = options()
    groups = {name[:1] for name in known if len(name) > 1}
    wrong = []
    for path in pages():
        for where, line in commands(path):
            first, second = (*words(line)[1:3], "", "")[:2]
            if (
                not first
                or first.startswith("-")
                or first.isupper()
                or first == "greet"
            ):
                continue
            name = (first, second) if (first,) in groups else (first,)
            if (first,) in groups and (not second or second.isupper()):
                continue
            # What follows "--" belongs to another command.
            own = takewhile(lambda word: word != "--", words(line))
            given = {one.partition("=")[0] for one in own if one[:2] == "--"}
            spare = given - known.get(name, set()) - {"--help", "--json", "--"}
            if name not in known or spare:
                wrong.append(f"{where}: {line} {sorted(spare)}")
    assert not wrong, "\n".join(wrong)


def test_few_blocks_are_marked_and_their_number_is_shown() -> None:
    every = [block for path in PAGES for block in blocks(path)]
    marked = Counter(block.reason for block in every if block.reason)
    run = sum(not block.reason for block in every)
    sys.stdout.write(f"{run} blocks are run or read; not run: {dict(marked)}\n")
    assert set(marked) <= set(REASONS)
    assert {one: n for one, n in marked.items() if n > MOST_NOT_RUN[one]} == {}


@pytest.mark.parametrize(("page", "test"), FOLLOWED.items())
def test_a_page_that_is_left_out_is_followed_by_its_own_test(
    page: str, test: str
) -> None:
    assert Path(page).name in (ROOT / test).read_text()
