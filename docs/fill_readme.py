"""Fill what the README shows of the backends from the installed manifests.

Usage: python docs/fill_readme.py [--check]

Writes between the markers <!-- backends:... -->. With --check nothing is written, and
the exit status says whether anything would be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_BEGIN, _END = "<!-- backends:begin -->\n", "<!-- backends:end -->"
NEEDS = {
    "file": "no",
    "hf3fs": "a mount of 3FS, or any shared file system",
    "hicache": "that of its class",
    "mooncake": "its master, and owners of memory",
    "nixl": "no",
    "s3": "a bucket",
}
TRIED = {
    "file": "SGLang, vLLM, LMCache; ext4, tmpfs",
    "hf3fs": "SGLang; a fake of USRBIO, no real 3FS yet",
    "hicache": "SGLang's and vLLM's pools, by classes of SGLang",
    "mooncake": "SGLang, vLLM; TCP of one host, no RDMA yet",
    "nixl": "SGLang, vLLM; POSIX files and UCX over TCP, no GPU yet",
    "s3": "SGLang, vLLM; moto, s3rver, Azurite",
}
"""What no manifest says: what runs beside it, and on what its tests have run."""

KVDOCK = str(Path(sys.executable).with_name("kvdock"))


def first_party() -> list[str]:
    """Return the names of the backends of this repository."""
    return sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))


def shown() -> str:
    """Return the table of the backends of this repository alone."""
    listed = subprocess.run(  # noqa: S603 - our own command
        [KVDOCK, "list", "--json"],
        env=os.environ
        | {"KVDOCK_PLUGINS": ",".join(first_party()), "KVDOCK_CONFIG": ""},
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    backends = json.loads(listed)["backends"]
    names = [one["name"] for one in backends]
    rows = {
        "what": [one["summary"] for one in backends],
        "needs a server": [NEEDS[name] for name in names],
        "tried on": [TRIED[name] for name in names],
        "zero copy": [one["zero_copy"] for one in backends],
        "durable": [one["durability"] for one in backends],
        "shared": [one["sharing"] for one in backends],
        "peers": [one["peers"] for one in backends],
        **{
            grade.replace("_", " "): [graded(one["kinds"], grade) for one in backends]
            for grade in ("draft", "split_heads", "multi_buffer")
        },
    }
    # What is the same for all helps no choice.
    lines = [[title, *cells] for title, cells in rows.items() if len({*cells}) > 1]
    head = [["", *(f"`{name}`" for name in names)], ["---"] * (1 + len(names))]
    return "".join(f"| {' | '.join(line)} |\n" for line in [*head, *lines])


def graded(kinds: Mapping[str, Mapping[str, str]], grade: str) -> str:
    """Spell a grade: one word if all kinds have it, else the kinds of each."""
    found: dict[str, list[str]] = {}
    for kind, support in kinds.items():
        found.setdefault(support[grade], []).append(kind)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{word} ({' '.join(of)})" for word, of in found.items())


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
