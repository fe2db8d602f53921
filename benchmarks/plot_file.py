"""Draw benchmarks/results/file.json into docs/, as a picture in light and dark.

Usage: python benchmarks/plot_file.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "file.json"
PICTURE = HERE.parent / "docs" / "explanation" / "file-throughput.svg"
SIDES = {
    "kvdock": ("kvdock, every page verified", "k"),
    "raw 2 threads": ("two threads of raw I/O", "r"),
    "file per page": ("one file per page", "f"),
    "HiCacheFile": ("SGLang's HiCacheFile", "h"),
}
WIDTH, HEIGHT = 760, 360
LEFT, TOP, PANEL, TALL = 50, 70, 320, 210
"""Of the first panel, in pixels; the second stands 30 further right."""
STYLE = """.g{fill:#fff}.t{fill:#1b2a41}.l{stroke:#d5dbe5}.k{fill:#1f5fbf}
.r{fill:#8a94a6}.f{fill:#c77f1a}.h{fill:#2e8b57}
@media (prefers-color-scheme: dark){.g{fill:#131416}.t{fill:#e8eef8}.l{stroke:#3a4252}
.k{fill:#6fa8ff}.r{fill:#98a2b3}.f{fill:#e5a84b}.h{fill:#63c08d}}"""


def picture(found: Mapping[str, Any]) -> str:
    """Return the picture: bars in GB/s by size of a page, for put and for get."""
    tables, machine = found["gb_per_s"], found["machine"]
    most = max(
        _speed(side, operation)
        for table in tables.values()
        for side in (table[name] for name in SIDES if name in table)
        for operation in ("put", "get")
    )
    top = 2 * (int(most / 2) + 1)
    where = (
        f"{machine['date']}, {machine['file_system']}, {machine['cpu']}, "
        f"{machine['cores']} cores, batches of 128 pages"
    )
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12">'
        ),
        "<title>Pages stored and loaded per second, by size of a page</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="g" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        (
            f'<text class="t" x="{LEFT}" y="24" font-size="14" font-weight="600">'
            "The file backend beside its peers and raw I/O (GB/s)</text>"
        ),
        *_legend(),
        *_panel("put", tables, LEFT, top),
        *_panel("get", tables, LEFT + PANEL + 30, top),
        f'<text class="t" x="{LEFT}" y="{HEIGHT - 16}">{where}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _speed(side: Mapping[str, float], operation: str) -> float:
    return (side[f"{operation} sequential"] + side[f"{operation} random"]) / 2


def _legend() -> Iterator[str]:
    for x, (label, kind) in zip((50, 250, 430, 570), SIDES.values(), strict=True):
        yield f'<rect class="{kind}" x="{x}" y="36" width="11" height="11" rx="2"/>'
        yield f'<text class="t" x="{x + 16}" y="46">{label}</text>'


def _panel(
    operation: str, tables: Mapping[str, Any], left: int, top: int
) -> Iterator[str]:
    bottom = TOP + TALL
    for mark in range(0, top + 1, 2):
        y = bottom - TALL * mark / top
        yield f'<path class="l" d="M{left} {y:.1f}h{PANEL}"/>'
        yield f'<text class="t" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark}</text>'  # noqa: E501 - one element
    group = PANEL / len(tables)
    wide = group / (len(SIDES) + 1.4)
    for at, (size, table) in enumerate(tables.items()):
        begin = left + at * group + 0.7 * wide
        for place, (name, (_, kind)) in enumerate(SIDES.items()):
            if name not in table:
                continue
            tall = TALL * _speed(table[name], operation) / top
            yield (
                f'<rect class="{kind}" x="{begin + place * wide:.1f}" '
                f'y="{bottom - tall:.1f}" width="{wide - 2:.1f}" height="{tall:.1f}"/>'
            )
        yield (
            f'<text class="t" x="{left + (at + 0.5) * group:.1f}" y="{bottom + 18}" '
            f'text-anchor="middle">{size}</text>'
        )
    yield (
        f'<text class="t" x="{left + PANEL / 2}" y="{bottom + 38}" '
        f'text-anchor="middle" font-weight="600">{operation}, pages of</text>'
    )


def main(arguments: list[str]) -> None:
    """Draw, or with --check compare.

    Raises:
        SystemExit: With --check, if the picture is stale.
    """
    text = picture(json.loads(RESULT.read_text()))
    if arguments == ["--check"]:
        if PICTURE.read_text() != text:
            raise SystemExit("stale, run: python benchmarks/plot_file.py")
        return
    PICTURE.write_text(text)
    print(PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
