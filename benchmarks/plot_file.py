"""Draw benchmarks/results/file.json into docs/.

Usage: python benchmarks/plot_file.py

Needs matplotlib (benchmarks/requirements.txt).
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
RESULT = HERE / "results" / "file.json"
PICTURE = HERE.parent / "docs" / "explanation" / "file-throughput.svg"
STYLES = {
    "raw": ("one thread of raw I/O", "0.25", "--"),
    "raw 2 threads": ("two threads of raw I/O", "0.6", "--"),
    "kvdock": ("kvdock, every page verified", "C0", "-"),
    "HiCacheFile": ("SGLang HiCacheFile", "C1", "-"),
    "file per page": ("one file per page", "C2", "-"),
}


def main() -> None:
    """Draw put and get against the size of a page."""
    found = json.loads(RESULT.read_text())
    tables = found["gb_per_s"]
    machine = found["machine"]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, operation in zip(panels, ("put", "get"), strict=True):
        for name, (label, colour, line) in STYLES.items():
            speeds = [
                (
                    table[name][f"{operation} sequential"]
                    + table[name][f"{operation} random"]
                )
                / 2
                for table in tables.values()
                if name in table
            ]
            if speeds:
                sizes = list(tables)[: len(speeds)]
                panel.plot(
                    sizes, speeds, line, color=colour, marker="o", ms=4, label=label
                )
        panel.set_title(operation)
        panel.set_xlabel("page size")
        panel.grid(visible=True, alpha=0.3)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("GB/s")
    panels[1].legend(fontsize=8)
    figure.suptitle(
        f"batches of 128 pages, {machine['file_system']}, {machine['cpu']}, "
        f"{machine['cores']} cores",
        fontsize=9,
    )
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
