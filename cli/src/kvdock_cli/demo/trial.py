"""Run the processes of the demo one after another, and damage what they stored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Dock, Scope
from kvdock.errors import KvdockError, PluginError
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock.testing import Oracle

PROMPT = "a prompt of 768 tokens"
WORKER_S = 120.0
DAMAGED = (("kv", 40), ("draft", 3))
"""Pools and pages whose bytes are changed in the store."""

_AT = 32
"""Which byte of them."""


@attrs.frozen(kw_only=True)
class Step:
    """The work of one process, and what was expected of it.

    Args:
        pages: How many pages it was to store or restore.
        pools: Pages of some pools that it was to move.
        turn: How many processes did the same before it.
    """

    phase: str
    found: Mapping[str, Any]
    pages: int
    pools: Mapping[str, int]
    turn: int = 0

    @property
    def ok(self) -> bool:
        """Return whether it did, and no byte was wrong."""
        moved = self.found["pools"]
        return (
            self.found["pages"] == self.pages
            and not self.found["wrong"]
            and all(moved.get(pool) == count for pool, count in self.pools.items())
        )


def choose(dock: Dock, wanted: str) -> tuple[str, str]:
    """Return a backend whose pages can be damaged, and its setting for a directory.

    Its distribution brings an oracle. One that is asked for may keep pages elsewhere;
    the setting is "" then.

    Raises:
        PluginError: If the one that is asked for does not do.
        KvdockError: If none is installed.
    """
    lasting = {
        name: backend.manifest.path_setting
        for name, backend in sorted(dock.backends.items())
        if backend.manifest.durability >= Scope.PROCESS
        and backend.plugin.candidate.oracle
    }
    if wanted in lasting:
        return wanted, lasting[wanted]
    if wanted:
        raise PluginError(
            f"backend {wanted!r} keeps no pages that could be damaged: they end with "
            "their process, or its distribution brings no oracle",
            fix=f"Backends that would do: {', '.join(lasting) or 'none is installed'}.",
        )
    fit = {name: path for name, path in lasting.items() if path}
    if not fit:
        raise KvdockError(
            "no backend is installed that keeps pages in a directory",
            fix="Install one, for example with: pip install kvdock-file",
        )
    return next(iter(fit.items()))


def run_trial(
    backend: str,
    settings: Mapping[str, object],
    directory: Path | None,
    oracle: Oracle,
) -> Iterator[Step]:
    """Store, restore, damage, restore what is left, repair, restore.

    `directory` is where it keeps pages; None if not in a directory.
    """
    work = partial(_process, {"backend": backend, "settings": dict(settings)})
    whole = {"kv": 48, "draft": 48}
    stored = work("store", 48, {**whole, "mamba": 6})
    _check_room(backend, directory, stored)
    yield stored
    yield work("restore", 48, {**whole, "mamba": 1})
    for pool, page in DAMAGED:
        damage(oracle, stored.found["keys"][pool][page])
    yield work("restore", 40, {"kv": 40, "draft": 39, "mamba": 1}, 1)
    yield work("store", 48, whole, 1)
    yield work("restore", 48, {**whole, "mamba": 1}, 2)
    if not directory:
        # It may be the user's own.
        work("clear", 0, {})


def _check_room(backend: str, directory: Path | None, stored: Step) -> None:
    if stored.found["pages"] == stored.pages:
        return
    what = f"only {stored.found['pages']} of {stored.pages} pages could be stored"
    fix = f"See `kvdock doctor {backend}`."
    if directory:
        free = format_bytes(shutil.disk_usage(directory).free)
        what += f" in {directory}, which has {free} free"
        fix = "Free some space there, or name another directory with --dir."
    raise KvdockError(what, fix=fix)


def _process(
    job: Mapping[str, object],
    phase: str,
    pages: int,
    pools: Mapping[str, int],
    turn: int = 0,
) -> Step:
    given = {**job, "phase": phase, "prompt": PROMPT}
    done = subprocess.run(  # noqa: S603 - this interpreter and module
        [sys.executable, "-m", "kvdock_cli.demo.worker", json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=WORKER_S,
        check=False,
    )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise KvdockError(
            f"the process to {phase} pages ended with status {done.returncode}: {last}"
        ) from None
    if "error" in found:
        raise KvdockError(found["error"], fix=found["fix"])
    return Step(phase=phase, found=found, pages=pages, pools=pools, turn=turn)


def damage(oracle: Oracle, key: str) -> None:
    """Change one bit of a stored object."""
    stored = oracle.peek(key)
    if stored is None:
        raise KvdockError(f"{key} is not stored", fix="Run `kvdock doctor`.")
    oracle.poke(key, _AT, bytes([stored[_AT] ^ 1]))
