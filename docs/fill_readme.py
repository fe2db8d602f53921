"""Fill what the README shows of `kvdock list` from the installed manifests.

Usage: python docs/fill_readme.py [--check]

Writes between the markers <!-- list:... --> and <!-- backends:... -->. With
--check nothing is written, and the exit status says whether anything would be.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
KVDOCK = str(Path(sys.executable).with_name("kvdock"))


def first_party() -> list[str]:
    """Return the names of the backends of this repository."""
    return sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))


def shown(*arguments: str) -> str:
    """Run `kvdock list` with the backends of this repository alone."""
    return subprocess.run(  # noqa: S603 - our own command
        [KVDOCK, "list", *arguments],
        env=os.environ | {"KVDOCK_PLUGINS": ",".join(first_party())},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def filled(text: str) -> str:
    """Return the README with fresh blocks."""
    blocks = {
        "list": (
            f"<!-- not run: excerpt -->\n```text\n{_without_hidden(shown())}\n```\n"
        ),
        "backends": shown("--markdown"),
    }
    for name, block in blocks.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"README has no single block {name!r}")
        before, after = text.split(begin, maxsplit=1)[0], text.split(end)[1]
        text = f"{before}{begin}{block}{end}{after}"
    return text


def _without_hidden(text: str) -> str:
    """Leave out what else happens to be installed here."""
    return re.sub(r"\n\nNot in KVDOCK_PLUGINS: .*", "", text.rstrip("\n"))


def main(arguments: list[str]) -> None:
    """Write the README, or compare."""
    old = README.read_text()
    new = filled(old)
    if arguments == ["--check"]:
        raise SystemExit(old != new and "run: python docs/fill_readme.py")
    README.write_text(new)


if __name__ == "__main__":
    main(sys.argv[1:])
