"""Fill the page of benchmarks from what they last measured.

Usage: python docs/fill_benchmarks.py [--check]

Writes between the markers <!-- benchmarks:... -->. With --check nothing is written, and
the exit status says whether anything would be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generated import between, table, write_or_compare

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "benchmarks.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
ABOUT = {
    "file": "The file backend beside its peers and raw I/O (`make bench-file`)",
    "mooncake": "The mooncake backend beside its library alone (`make bench-mooncake`)",
    "nixl": "The nixl backend beside file and NIXL alone (`make bench-nixl`)",
    "hf3fs": "The hf3fs backend above USRBIO's calls (`make bench-hf3fs`)",
    "direct": "Pages sent straight to another process (`make bench-direct`)",
    "sglang": "SGLang with kvdock, beside its own file store (`make bench-sglang`)",
    "vllm": "vLLM with kvdock, beside its own file tier (`make bench-vllm`)",
    "vllm_http": "20 conversations with `vllm serve`: host memory for a quarter of "
    "them alone, with its own file tier, with kvdock (`make bench-vllm-http`)",
    "lmcache": "LMCache's second level on kvdock's file, beside its own file adapter "
    "(`make bench-lmcache`)",
    "sessions": "What the core adds to a batch (`make bench`)",
    "safe": "Paths for engines that cannot hold pages back (`make bench`)",
    "startup": "Starting and listing (`make bench`)",
}


def block() -> str:
    """Return a section for each record, with its date and machine."""
    parts = []
    for name, about in ABOUT.items():
        found = json.loads((RESULTS / f"{name}.json").read_text())
        machine = found.pop("machine")
        figures = found.get("figures", found)
        figures.pop("gb_per_s", None)
        rows = [(f"`{key}`", f"{value:g}") for key, value in _flat(figures)]
        parts += [
            f"## {name}\n\n{about}, {_where(machine)}.\n\n",
            "<details><summary>all figures</summary>\n\n",
            table(("figure", "value"), rows),
            "\n</details>\n\n",
        ]
    return "".join(parts)


def _flat(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for key, value in figures.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        elif isinstance(value, int | float):
            yield name, value


def _where(machine: Mapping[str, Any]) -> str:
    if "summary" in machine:
        return f"measured on {machine['date']}: {machine['summary']}"
    what = [f"measured on {machine['date']}", machine["cpu"]]
    if "cores" in machine:
        what.append(f"{machine['cores']} cores")
    if "file_system" in machine:
        what.append(str(machine["file_system"]))
    if "load_average" in machine:
        what.append(f"load average {machine['load_average']}")
    return ", ".join(what)


if __name__ == "__main__":
    text = between(PAGE.read_text(), "benchmarks", block())
    write_or_compare({PAGE: text}, sys.argv[1:])
