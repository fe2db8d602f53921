"""The reference of `--json` against the commands that print it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvdock.plugin import list_entry_points

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/cli-json.md").read_text()
SCHEMA = re.compile(r"\"(kvdock\.[a-z-]+/\d+)\"")
SCHEMAS = sorted(
    {
        schema
        for path in (ROOT / "cli").rglob("src/**/*.py")
        for schema in SCHEMA.findall(path.read_text())
    }
)


def test_there_are_schemas_to_look_for() -> None:
    assert {"kvdock.list/1", "kvdock.demo-pages/1", "kvdock.config/2"} <= set(SCHEMAS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_is_described(schema: str) -> None:
    assert f"`{schema}`" in PAGE


@pytest.mark.parametrize(
    "command",
    # What is behind a point belongs to the command before it.
    sorted(
        {one.name.partition(".")[0] for one in list_entry_points("kvdock.commands")}
    ),
)
def test_every_command_has_a_section(command: str) -> None:
    assert re.search(rf"^## `kvdock {command}\b", PAGE, re.MULTILINE)
