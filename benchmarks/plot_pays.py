"""Draw benchmarks/results/pays.json into docs/: first tokens over bandwidth.

Usage: python benchmarks/plot_pays.py [--check]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "pays.json"
PICTURE = HERE.parent / "docs" / "explanation" / "load-or-compute.svg"
LINES = {
    "compute": ("always compute", "c"),
    "wait_complete": ("always load", "a"),
    "kvdock": ("kvdock", "k"),
}
WIDTH, HEIGHT = 640, 340
LEFT, TOP, WIDE, TALL = 60, 60, 550, 220
STYLE = """.g{fill:#fff}.t{fill:#1b2a41}.l{stroke:#d5dbe5}path{fill:none;stroke-width:2}
.k{stroke:#1f5fbf;stroke-width:3}.c{stroke:#c77f1a}.a{stroke:#8a94a6}
@media (prefers-color-scheme: dark){.g{fill:#131416}.t{fill:#e8eef8}.l{stroke:#3a4252}
.k{stroke:#6fa8ff}.c{stroke:#e5a84b}.a{stroke:#98a2b3}}"""


def picture(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the picture."""
    shown = sorted(
        (row for row in rows if row["axis"] == "plain" and not row["latency_s"]),
        key=lambda row: float(row["bytes_per_s"]),
    )
    rates = [math.log10(row["bytes_per_s"]) for row in shown]
    times = [row[name] for row in shown for name in LINES]
    low, high = math.log10(min(times)) - 0.1, math.log10(max(times)) + 0.1

    def x(rate: float) -> float:
        return LEFT + WIDE * (rate - rates[0]) / (rates[-1] - rates[0])

    def y(seconds: float) -> float:
        return TOP + TALL * (high - math.log10(seconds)) / (high - low)

    title = "Time to the first token over the bandwidth of the store"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    yield f"<title>{title}</title>"
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="g" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    yield f'<text class="t" x="{LEFT}" y="24" font-size="14">{title} (ms)</text>'
    for at, (words, kind) in enumerate(LINES.values()):
        left = LEFT + at * 170
        yield f'<path class="{kind}" d="M{left} 42h22"/>'
        yield f'<text class="t" x="{left + 28}" y="46">{words}</text>'
    for seconds in (0.03, 0.1, 0.3, 1.0, 3.0):
        if low <= math.log10(seconds) <= high:
            line = y(seconds)
            yield f'<path class="l" d="M{LEFT} {line:.1f}h{WIDE}"/>'
            yield (
                f'<text class="t" x="{LEFT - 8}" y="{line + 4:.1f}" '
                f'text-anchor="end">{seconds * 1e3:.0f}</text>'
            )
    for row, rate in zip(shown, rates, strict=True):
        words = f"{row['bytes_per_s'] / 1e9:g} GB/s"
        yield (
            f'<text class="t" x="{x(rate):.1f}" y="{TOP + TALL + 20}" '
            f'text-anchor="middle">{words}</text>'
        )
    for name, (_, kind) in LINES.items():
        points = [
            f"{x(rate):.1f} {y(row[name]):.1f}"
            for row, rate in zip(shown, rates, strict=True)
        ]
        yield f'<path class="{kind}" d="M{" L".join(points)}"/>'
    yield "</svg>"


def main() -> None:
    """Write the picture, or compare it with the one that is there."""
    new = "\n".join(picture(json.loads(RESULT.read_text()))) + "\n"
    if "--check" in sys.argv:
        old = PICTURE.read_text() if PICTURE.exists() else ""
        raise SystemExit(old != new and "run: python benchmarks/plot_pays.py")
    PICTURE.write_text(new)


if __name__ == "__main__":
    main()
