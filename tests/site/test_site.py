"""The site builds without a warning, and its links lead somewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.targets: set[str] = {""}
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets |= {given.get(name) or "" for name in ("id", "name")}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if tag in {"img", "script", "iframe", "object"} and given.get("src"):
            self.loaded.append(given["src"] or "")
        if tag == "link" and given.get("rel") not in {"canonical", "author"}:
            self.loaded.append(given.get("href") or "")


@cache
def _page(path: Path) -> Page:
    return Page(path.read_text())


def _broken(site: Path, path: Path) -> Iterator[str]:
    """Yield links of a page, and files that it loads, that lead nowhere."""
    page = _page(path)
    for link in [*page.links, *page.loaded]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not _leads_to(site, there, unquote(parts.fragment)):
            yield link


def _leads_to(site: Path, there: Path, anchor: str) -> bool:
    if not there.is_relative_to(site) or not there.is_file():
        return False
    return there.suffix != ".html" or anchor in _page(there).targets


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    broken = {
        f"{path.relative_to(site)}: {link}"
        for path in pages
        for link in _broken(site, path)
    }
    assert not broken
    assert len(pages) > len(list((ROOT / "docs" / "decisions").glob("0*.md")))


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    foreign = {
        link
        for path in site.rglob("*.html")
        for link in _page(path).loaded
        if urlsplit(link).netloc
    }
    assert not foreign


def test_the_search_knows_split_heads(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert '"split"' in index
    assert '"head"' in index


def test_nothing_of_the_builders_machine_is_published(site: Path, planted: str) -> None:
    telling = [planted, "BUILDER_TOKEN", str(ROOT), str(Path.home()) + "/"]
    shown = {
        f"{path.relative_to(site)}: {one}"
        for path in site.rglob("*")
        if path.is_file()
        for one in telling
        if one.encode() in path.read_bytes()
    }
    assert not shown


def test_what_sphinx_keeps_for_itself_is_not_in_the_folder_to_publish() -> None:
    made = subprocess.run(
        ["make", "--dry-run", "docs"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    assert "-d build/doctrees docs build/site" in made.stdout
