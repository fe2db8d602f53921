"""What every table owes to a terminal, whatever its width."""

from __future__ import annotations

import re

WIDTHS = (60, 100, 160)

_ANNOUNCED = re.compile(r"Too narrow for ([^:]*): --json has all\.")
_CHANGES = re.compile(r"\d+")
_BAR = re.compile("[\u2588-\u258f]+")
"""A bar is as long as there is room for it."""

_LONGEST_PREFIX = 24
"""Columns that may stand before a word that no line holds."""


def check_fits(whole: str, shown: str, width: int) -> None:
    """Compare a report at a width with the same report in a pipe.

    No line is longer than the terminal, unless it is for one word that a person
    copies, as a path. No word is missing, unless its column is named.
    """
    for line in shown.splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line) <= width or longest > width - _LONGEST_PREFIX, line
    announced = " ".join(_ANNOUNCED.findall(" ".join(shown.split())))
    cut = tuple(re.findall(r"(\S+)\.\.\. \(--json has all of it\)", shown))
    text = " ".join(one for one in whole.split() if not (cut and one.startswith(cut)))
    # In a list the first cell of a row is its title.
    titles = re.findall(r"^ *([A-Z]+) [A-Z ]+$", whole, re.MULTILINE)
    missing = _words(text) - _words(shown) - _words(" ".join(titles))
    if not announced:
        assert not missing, missing
        return
    tops = _words(" ".join(line for line in whole.splitlines() if line.isupper()))
    headings = missing & tops
    assert not headings - _words(announced.replace(",", "")), headings


def _words(text: str) -> set[str]:
    # Figures differ from one look to the next; a list has its headings in lower case.
    return set(_CHANGES.sub("0", _BAR.sub(" ", text)).lower().split())
