"""Write down what an engine moves, in whatever process it does so.

Set TESTS_OF_KVDOCK_TRACE to a folder. Each process adds lines to `moves.jsonl`, and
keeps what is needed to open the same namespaces again from outside.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = "TESTS_OF_KVDOCK_TRACE"
"""Environment variable that names the folder."""

BEGUN = "begun"
"""What a move is called until it has ended."""

_ONE_LINE = threading.Lock()


def traced(module: Any) -> None:
    """Wrap the pools of `kvdock_sglang.attachments`, which every page passes."""
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    pool, attachments = module.AttachedHostPool, module.Attachments
    for what in ("read", "write"):
        setattr(pool, what, _moves(folder, what, getattr(pool, what)))
    attachments._attach = _attaches(folder, attachments._attach)


def _moves(folder: Path, what: str, move: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Any, hashes: Any, pages: Any, deadline_s: float) -> Any:
        _say(folder, {"what": f"{BEGUN} {what}"})
        ok = [False] * len(hashes)
        try:
            outcomes = move(self, hashes, pages, deadline_s)
            ok = [int(one) == 0 for one in outcomes]
        finally:
            name = self.spec.name
            line = {"what": what, "pool": name, "hashes": list(hashes), "ok": ok}
            _say(folder, line)
        return outcomes

    return moved


def _say(folder: Path, line: dict[str, Any]) -> None:
    with _ONE_LINE, (folder / "moves.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def _attaches(folder: Path, attach: Callable[..., Any]) -> Callable[..., Any]:
    def attached(self: Any, pools: Any, space: Any) -> Any:
        plan = attach(self, pools, space)
        kept = (plan, space, self._settings_for(plan))
        name = "-".join(pool.name for pool in pools)
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(kept))
        return plan

    return attached


def moves(folder: Path) -> list[dict[str, Any]]:
    """Read back what was moved, in order."""
    return [line for line in _lines(folder) if not line["what"].startswith(BEGUN)]


def settle(folder: Path, quiet_s: float = 1.0, timeout_s: float = 30.0) -> None:
    """Wait until all moves that were begun have ended, and no other begins."""
    deadline = time.monotonic() + timeout_s
    seen, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        found = _lines(folder)
        begun = sum(line["what"].startswith(BEGUN) for line in found)
        if len(found) != seen or len(found) != 2 * begun:
            seen, since = len(found), time.monotonic()
        if seen and time.monotonic() - since > quiet_s:
            return
        time.sleep(0.05)


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "moves.jsonl"
    if not path.exists():
        return []
    # The last line may still be under way.
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
