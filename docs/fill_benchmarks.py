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
BUSY = 1.0
"""Load average above which the machine was not measured alone."""
STORES = {
    "file": "a file a page",
    "file_checked": "a file a page, with XXH3",
    "sqlite": "SQLite",
    "lmdb": "LMDB",
    "rocksdb": "RocksDB",
    "kvdock_backend": "kvdock's backend alone",
}
SERVING = {
    "bench_serving": "SGLang: `sglang.bench_serving`, before and after a restart",
    "multi_turn": "vLLM: its benchmark of conversations",
    "agent_sim": "vLLM: cache-pressure's agent-sim",
}
OPERATIONS = {
    "put_new": "Storing pages that are new",
    "get_known": "Loading pages that are stored",
    "put_known": "Storing pages that are stored already",
    "get_unknown": "Loading pages that are not stored",
}
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
    "vllm_http_together": "The same conversations, which return to a server at once, "
    "with empty caches and 101 MiB of host memory, a quarter of what they need "
    '(`make bench-vllm-http ARGS="--together 2"`)',
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
            f"### {name}\n\n{about}, {_where(machine)}.\n\n",
            "<details><summary>all figures</summary>\n\n",
            table(("figure", "value"), rows),
            "\n</details>\n\n",
        ]
    return "".join(parts)


def outside_block() -> str:
    """Return what was measured beside the stores and interfaces of others."""
    found = json.loads((RESULTS / "outside.json").read_text())
    machine, figures = found["machine"], found["figures"]
    text = f"M{_where(machine)[1:]}; {found['turns']} turns.\n{_busy(machine)}"
    if found["quick"]:
        text += "**A quick run: pages of 64K alone, an eighth of the bytes.**\n"
    parts = [text]
    stores = figures["stores"]["seconds_over_kvdock"]
    for operation, about in OPERATIONS.items():
        cells = stores[operation]
        where = list(cells["file"])
        rows = [
            (
                said,
                *(
                    f"{cells[name][one]['wall']:g} ({cells[name][one]['processor']:g})"
                    for one in where
                ),
            )
            for name, said in STORES.items()
        ]
        speeds = figures["stores"]["kvdock_gb_s"].get(operation)
        if speeds:
            rows.append(("kvdock, GB/s", *(f"{speeds[one]:g}" for one in where)))
        parts += [f"### {about}\n", table(("", *where), rows), _quicker(cells)]
    for name, title, peer in (
        ("mlperf", "MLPerf Storage's interface", "NumPy files"),
        ("mooncake", "Mooncake's interface", "one file of slots"),
    ):
        parts += [f"### {title}\n", _through(figures[name], peer)]
    rows = [
        (policy, share, *(f"{rate:.4f}" for rate in rates.values()))
        for policy, shares in figures["hit_rates"].items()
        for share, rates in shares.items()
    ]
    head = ("policy", "room", "kvdock's benchmark", "kvcache-simulator")
    parts += ["### Hit rates by another's simulator\n", table(head, rows)]
    return "\n".join(parts)


def serving_block() -> str:
    """Return what clients of others measured of servers, store by store."""
    found = json.loads((RESULTS / "serving.json").read_text())
    machine = found["machine"]
    text = f"M{_where(machine)[1:]}.\n{_busy(machine)}"
    if found["quick"]:
        text += "**A quick run: half of the requests.**\n"
    parts = [text]
    for name, title in SERVING.items():
        stores = found["figures"].get(name)
        if not stores:
            parts.append(f"### {title}\n\nNot run this time.\n")
            continue
        head = [one.replace("_", " ") for one in next(iter(stores.values()))]
        rows = [
            (store, *(f"{value:g}" for value in figures.values()))
            for store, figures in stores.items()
        ]
        parts.append(f"### {title}\n\n{table(('', *head), rows)}")
    return "\n".join(parts)


def _quicker(cells: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Say where others are faster, or take less processor time."""
    lines = []
    for name in ("file", "file_checked", "sqlite", "lmdb", "rocksdb"):
        wall, processor = (
            [where for where, one in cells[name].items() if one[kind] < 1]
            for kind in ("wall", "processor")
        )
        some = f"{len(wall)} of {len(cells[name])} cells by the clock"
        if name == "file_checked" and wall:
            some += f" ({', '.join(wall)})"
        lines.append(f"{STORES[name]} in {some}, in {len(processor)} by processor time")
    return "Ahead of kvdock: " + "; ".join(lines) + ".\n"


def _through(figures: Mapping[str, Any], peer: str) -> str:
    ratios = figures["seconds_over_kvdock"]
    rows = [
        (what, *_latencies(figures, what), f"{ratios[what]:g}")
        for what in ("read", "write")
    ]
    rows.append(("processor time", "", "", f"{ratios['processor']:g}"))
    columns = (f"{peer}, ms p50 / p95", "kvdock, ms p50 / p95", "seconds over kvdock's")
    return table(("", *columns), rows)


def _latencies(figures: Mapping[str, Any], what: str) -> Iterator[str]:
    for name in ("peer", "kvdock"):
        times = figures[name][f"{what}_ms"]
        yield f"{times['p50']:g} / {times['p95']:g}"


def _flat(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for key, value in figures.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        elif isinstance(value, int | float):
            yield name, value


def _busy(machine: Mapping[str, Any]) -> str:
    if machine["load_average"] <= BUSY:
        return ""
    return "**The machine was busy: these figures are provisional.**\n"


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
    text = between(PAGE.read_text(), "outside", outside_block())
    text = between(text, "serving", serving_block())
    text = between(text, "benchmarks", block())
    write_or_compare({PAGE: text}, sys.argv[1:])
