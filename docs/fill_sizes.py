"""Fill the table of page sizes from the models that kvdock describes.

Usage: python docs/fill_sizes.py [--check]

Writes between the markers <!-- sizes:... -->. With --check nothing is written, and
the exit status says whether anything would be.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvdock.models import Deployment, assemble, load_model, shipped_models
from kvdock.units import format_bytes

PAGE = Path(__file__).parent / "how-to" / "sizing.md"
_TOKENS = 100_000


def rows() -> list[str]:
    """Return a row for each model, with a page of the target's pools together."""
    found = []
    for name in shipped_models():
        assembly = assemble(load_model(name), Deployment())
        shard = assembly.largest()
        sizes = {pool.name: pool.page_bytes(shard) for pool in assembly.pools}
        tokens = next(pool.page_tokens for pool in assembly.pools if pool.anchor)
        pools = ", ".join(
            f"{pool} {format_bytes(nbytes)}" for pool, nbytes in sizes.items() if nbytes
        )
        each = sum(sizes.values()) / tokens
        held = format_bytes(int(each * _TOKENS))
        found.append(f"| {name} | {tokens} | {pools} | {each / 1024:.1f} | {held} |")
    return found


def filled(text: str) -> str:
    """Return the page with a fresh table."""
    begin, end = "<!-- sizes:begin -->\n", "<!-- sizes:end -->"
    before, after = text.split(begin, maxsplit=1)[0], text.split(end)[1]
    head = (
        "| model | tokens of a page | bytes of a page, by pool | KiB per token | "
        "100 000 tokens |\n|---|---|---|---|---|\n"
    )
    table = head + "\n".join(rows()) + "\n"
    return f"{before}{begin}{table}{end}{after}"


def main(arguments: list[str]) -> None:
    """Write the table, or compare."""
    old = PAGE.read_text()
    new = filled(old)
    if arguments == ["--check"]:
        raise SystemExit(old != new and "run: python docs/fill_sizes.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main(sys.argv[1:])
