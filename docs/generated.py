"""Write generated pages, or compare them: what the `fill_*` scripts share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parent


def write_or_compare(pages: Mapping[Path, str], arguments: Sequence[str]) -> None:
    """Write the pages; with --check compare them and write nothing.

    Raises:
        SystemExit: With --check, if a page is stale; it names the command.
    """
    script = Path(sys.argv[0]).name
    stale = [
        path
        for path, text in pages.items()
        if not path.exists() or path.read_text() != text
    ]
    if list(arguments) == ["--check"]:
        if stale:
            names = ", ".join(str(path.relative_to(DOCS.parent)) for path in stale)
            raise SystemExit(f"{names}: stale, run: python docs/{script}")
        return
    for path in stale:
        path.write_text(pages[path])


def between(text: str, name: str, block: str) -> str:
    """Return a page with a fresh block between the markers of a name.

    Raises:
        SystemExit: If the page does not have these markers once.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the page has no single block {name!r}")
    before, after = text.split(begin, maxsplit=1)[0], text.split(end)[1]
    return f"{before}{begin}{block}{end}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown, an empty line behind it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def code(words: Iterable[object], separator: str = ", ") -> str:
    """Return words as code."""
    return separator.join(f"`{word}`" for word in words)


def arguments_of(docstring: str) -> dict[str, str]:
    """Return the entries of the section `Args:` of a Google docstring."""
    _, _, below = docstring.partition("Args:\n")
    below = re.split(r"^[A-Z]\w+:\s*$", below, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^ {4}(\w+):\s*(.*(?:\n {5,}.*)*)", below, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}
