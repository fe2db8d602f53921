"""Draw docs/explanation/packages.svg from the layers that import-linter holds.

Usage: python docs/fill_packages.py [--check]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator

from generated import DOCS, write_or_compare

PICTURE = DOCS / "explanation" / "packages.svg"
ABOUT = {
    "testing": "conformance kit",
    "stores": "what kvdock store needs",
    "peers": "pages straight to another process",
    "dock": "loaded plugins of one process",
    "routing": "which backend, and why",
    "resilience": "deadlines, breaker, executor",
    "plugin": "hooks, manifest, discovery",
    "pools": "what a page consists of",
    "batch": "keys, addresses, outcomes",
    "config": "settings of core and plugins",
}
"""A few words about packages that have the room for them."""

WIDTH, LEFT, HIGH, GAP, MOST = 760, 20, 40, 8, 7
STYLE = (
    ".g{fill:#fff}.b{fill:#eef3fb;stroke:#4a6fa5}.o{fill:#f6f1e6;stroke:#a5834a}"
    ".t{fill:#1b2a41}@media (prefers-color-scheme: dark){.g{fill:#131416}"
    ".b{fill:#22304a;stroke:#8fb0e0}.o{fill:#3b3322;stroke:#d7b878}.t{fill:#e8eef8}}"
)


def layers() -> list[list[str]]:
    """Return the packages of the core, layer by layer, outermost first."""
    tool = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["tool"]
    (found,) = (
        one["layers"]
        for one in tool["importlinter"]["contracts"]
        if one["type"] == "layers" and one["containers"] == ["kvdock"]
    )
    return [[word.strip() for word in line.split("|")] for line in found]


def boxes(names: list[str], y: int, kind: str) -> Iterator[str]:
    """Draw a row of boxes of equal width."""
    wide = (WIDTH - 2 * LEFT - GAP * (len(names) - 1)) / len(names)
    for at, name in enumerate(names):
        x = LEFT + at * (wide + GAP)
        about = ABOUT.get(name, "")
        # A letter takes some 7 columns.
        text = f"{name}: {about}" if about and len(name + about) * 7 < wide else name
        yield (
            f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{wide:.0f}" '
            f'height="{HIGH}" rx="6"/>\n<text class="t" x="{x + wide / 2:.0f}" '
            f'y="{y + 25}" text-anchor="middle">{text}</text>\n'
        )


def picture() -> str:
    """Return the picture, in SVG."""
    y, parts = 20, list[str]()
    outer = ["kvdock-cli", "engines: sglang, vllm, transformers", "plugins; segments"]
    parts += boxes(outer, y, "o")
    y += HIGH + 26
    parts.append(
        f'<text class="t" x="{LEFT}" y="{y}">core, outermost first; a layer imports '
        "only what stands below it</text>\n"
    )
    y += 12
    for names in layers():
        rows = -(-len(names) // MOST)
        for row in range(rows):
            parts += boxes(names[row::rows], y, "b")
            y += HIGH + GAP
    height = y + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">\n'
        "<title>The packages of kvdock, outermost first</title>\n"
        "<desc>Command line and engines stand on plugins and the core. Inside the core "
        "are layers of packages; each imports only layers below it.</desc>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="g" width="{WIDTH}" height="{height}" rx="8"/>\n'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    write_or_compare({PICTURE: picture()}, sys.argv[1:])
