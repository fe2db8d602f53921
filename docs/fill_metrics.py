"""Fill the table of metrics from `kvdock.observers.metrics`.

Usage: python docs/fill_metrics.py [--check]
"""

from __future__ import annotations

import sys

from generated import DOCS, between, table, write_or_compare

from kvdock.observers.metrics import METRICS, SECONDS

PAGE = DOCS / "reference" / "metrics.md"


def page() -> str:
    """Return the page with a fresh table."""
    rows = (
        (f"`{one.name}`", str(one.kind), ", ".join(one.own), one.about)
        for one in METRICS
    )
    text = PAGE.read_text()
    text = between(text, "metrics", table(("name", "kind", "labels", "what"), rows))
    ends = ", ".join(f"{end:g}" for end in SECONDS)
    return between(text, "buckets", f"Buckets of the histogram end at {ends} s.\n")


if __name__ == "__main__":
    write_or_compare({PAGE: page()}, sys.argv[1:])
