"""Tiny distributions, made on the spot, that tests install on a path."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import settings

# A busy machine must not turn a slow example into a failure. `.ci/run` tries more
# examples than who waits for `make test`.
settings.register_profile(
    "house",
    deadline=None,
    max_examples=int(os.environ.get("TESTS_OF_KVDOCK_EXAMPLES", "40")),
)
settings.load_profile("house")

BACKEND = """
from types import SimpleNamespace

from kvdock import API_VERSION, KindSupport, Manifest, hookimpl
from kvdock.keys import key_suffixes


@hookimpl
def kvdock_manifest():
    return Manifest(
        name="NAME", api=API_VERSION, summary="a backend", kinds={"mha": KindSupport()}
    )


@hookimpl
def kvdock_register_pool(pool, region, config):
    return SimpleNamespace(close=list)


@hookimpl
def kvdock_key_suffix(pool, shard):
    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(store, batch):
    return None
"""
"""A whole backend; NAME is to be replaced."""


class Shelf:
    """A directory of tiny distributions, each one module with entry points."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        name: str,
        source: str,
        *,
        group: str = "kvdock.backends",
        attribute: str = "",
        module: str = "",
        distribution: str = "",
        oracle: str = "",
    ) -> str:
        """Put a distribution of one module on the shelf; return its name."""
        distribution = distribution or f"kvdock-{name}"
        module = module or distribution.replace("-", "_")
        (self.root / f"{module}.py").write_text(source)
        info = self.root / f"{distribution.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n"
        )
        value = f"{module}:{attribute}" if attribute else module
        points = f"[{group}]\n{name} = {value}\n"
        if oracle:
            points += f"[kvdock.oracles]\n{name} = {oracle}\n"
        (info / "entry_points.txt").write_text(points)
        importlib.invalidate_caches()
        return distribution

    def add_backend(self, name: str, *edits: tuple[str, str]) -> str:
        """Put a whole backend on the shelf, changed here and there."""
        source = BACKEND
        for old, new in edits:
            assert old in source
            source = source.replace(old, new)
        return self.add(name, source.replace("NAME", name))

    def kvdock(
        self, *arguments: str, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the real command in a process of its own."""
        return subprocess.run(
            [Path(sys.executable).with_name("kvdock"), *arguments],
            env=os.environ
            | {"PYTHONPATH": str(self.root), "COLUMNS": "80", "PYTHONWARNINGS": "error"}
            | environ,
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
