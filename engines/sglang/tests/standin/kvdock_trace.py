"""Write down what an engine moves, in whatever process it does so.

Set TESTS_OF_KVDOCK_TRACE to a folder. Each process adds lines to `moves.jsonl`, and
keeps what is needed to open the same namespaces again from outside.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = "TESTS_OF_KVDOCK_TRACE"
"""Environment variable that names the folder."""

_ONE_LINE = threading.Lock()


def traced(module: Any) -> None:
    """Wrap the lanes of `kvdock_sglang.tier`, which every page passes."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    lane, tier = module.Lane, module.Tier
    for what in ("read", "write"):
        setattr(lane, what, _moves(folder, what, getattr(lane, what)))
    tier._attach = _attaches(folder, tier._attach)


def _moves(folder: Path, what: str, move: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Any, hashes: Any, pages: Any, deadline_s: float) -> Any:
        outcomes = move(self, hashes, pages, deadline_s)
        line = {
            "what": what,
            "pool": self.spec.name,
            "hashes": list(hashes),
            "ok": [int(one) == 0 for one in outcomes],
        }
        with _ONE_LINE, (folder / "moves.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
        return outcomes

    return moved


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
    path = folder / "moves.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
