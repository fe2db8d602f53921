"""Fill what the README shows of `kvdock list` from the installed manifests.

Usage: python docs/fill_readme.py [--check]

Writes between the markers <!-- backends:... -->. With --check nothing is written, and
the exit status says whether anything would be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_BEGIN, _END = "<!-- backends:begin -->\n", "<!-- backends:end -->"
KVDOCK = str(Path(sys.executable).with_name("kvdock"))


def first_party() -> list[str]:
    """Return the names of the backends of this repository."""
    return sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))


def shown() -> str:
    """Return the table of the backends of this repository alone."""
    return subprocess.run(  # noqa: S603 - our own command
        [KVDOCK, "list", "--markdown"],
        env=os.environ | {"KVDOCK_PLUGINS": ",".join(first_party())},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def filled(text: str) -> str:
    """Return the README with a fresh table."""
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise SystemExit("README has no single block for the backends")
    before, after = text.split(_BEGIN, maxsplit=1)[0], text.split(_END)[1]
    return f"{before}{_BEGIN}{shown()}{_END}{after}"


def main(arguments: list[str]) -> None:
    """Write the README, or compare."""
    old = README.read_text()
    new = filled(old)
    if arguments == ["--check"]:
        raise SystemExit(old != new and "run: python docs/fill_readme.py")
    README.write_text(new)


if __name__ == "__main__":
    main(sys.argv[1:])
