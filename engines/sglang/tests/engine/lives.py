"""Lives of an engine: started one after the other, over one store."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import environment
import kvdock_trace
import numpy as np
import tiny_models

from kvdock.batches import Batch, Operation
from kvdock.dock import Dock
from kvdock.hookspecs import AttachConfig
from kvdock.keys import build_keys, namespace_digest, namespace_record
from kvdock.regions import Region
from kvdock.sessions import Attachment

RUN = Path(__file__).with_name("engine_run.py")
PROMPTS = [
    [(7 * n + 3) % 500 + 4 for n in range(122)],
    [(11 * n + 5) % 500 + 4 for n in range(118)],
]
NEW_TOKENS = 8


@attrs.frozen(kw_only=True)
class World:
    """One model, one store, and a place for what its engines leave behind.

    Args:
        tiny: The model.
        model: Its checkpoint.
        folder: Scratch space of this world.
        storage: What the operator gives SGLang besides the class.
    """

    tiny: tiny_models.Tiny
    model: Path
    folder: Path
    storage: dict[str, Any]

    def live(
        self,
        life: str,
        rounds: list[Any],
        *,
        environ: dict[str, str] | None = None,
        **more: Any,
    ) -> list[list[dict[str, Any]]]:
        """Start an engine, let it answer, end it; return its answers."""
        out = self.folder / f"{life}.json"
        task = {
            "model": str(self.model),
            "engine": self.tiny.engine,
            "rounds": rounds,
            "new_tokens": NEW_TOKENS,
            "out": str(out),
            "storage": {
                "backend_name": "kvdock",
                "module_path": "kvdock_sglang",
                "class_name": "KvdockStorage",
                "prefetch_threshold": 16,
                **self.storage,
            },
            **more,
        }
        path = self.folder / f"{life}.task.json"
        path.write_text(json.dumps(task))
        log = self.folder / f"{life}.log"
        with log.open("w") as err:
            ended = subprocess.run(
                [sys.executable, str(RUN), str(path)],
                stdout=err,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=240,
                env={
                    **os.environ,
                    **environment.CPU,
                    **self.tiny.environ,
                    kvdock_trace.FOLDER: str(self.trace(life)),
                    **(environ or {}),
                },
            )
        assert out.exists(), f"rc {ended.returncode}\n{log.read_text()[-4000:]}"
        answers: list[list[dict[str, Any]]] = json.loads(out.read_text())
        assert len(answers) == len(rounds), log.read_text()[-4000:]
        return answers

    def trace(self, life: str) -> Path:
        """Where a life writes down what it moved."""
        return self.folder / f"{life}.trace"

    def moves(self, life: str) -> list[dict[str, Any]]:
        """What a life moved."""
        return kvdock_trace.moves(self.trace(life))

    def alter(self, life: str) -> int:
        """Replace every page that a life stored, so that nothing shows it.

        Goes through the plugin as an engine would, with valid checksums; only
        the numbers are others. Returns how many pages were replaced.
        """
        replaced = 0
        for kept in self.trace(life).glob("*.pickle"):
            plan, space, settings = pickle.loads(kept.read_bytes())  # noqa: S301 - our own file
            stored = {
                (line["pool"], page)
                for line in self.moves(life)
                if line["what"] == "write"
                for page, ok in zip(line["hashes"], line["ok"], strict=True)
                if ok
            }
            replaced += _replace(plan, space, settings, stored)
        return replaced


def _replace(plan: Any, space: Any, settings: Any, stored: set[Any]) -> int:
    dock = Dock.load()
    scratch = {
        route.pool.name: np.zeros(route.pool.page_bytes(plan.shard), np.uint8)
        for route in plan.accepted
    }
    regions = {
        route.pool.name: Region.of(
            route.pool, plan.shard, [scratch[route.pool.name]], 1
        )
        for route in plan.accepted
    }
    record = namespace_record(space, [route.pool for route in plan.routes])
    digest = namespace_digest(record)
    replaced = 0
    with Attachment.open(dock, plan, space, regions, settings) as attachment:
        for route in plan.accepted:
            name, backend = route.pool.name, dock.backends[str(route.backend)]
            handle = backend.register_pool(
                route.pool,
                regions[name],
                AttachConfig(
                    settings=backend.settings(settings.get(backend.name)),
                    namespace=digest,
                    namespace_record=record,
                    shard=plan.shard,
                ),
            )
            suffixes = backend.key_suffix(route.pool, plan.shard)
            for pool, page in stored:
                if pool != name or attachment.read(name, [page], [0])[0]:
                    continue
                # The sign bit of every number, whatever its width.
                scratch[name][3::4] ^= 0x80
                keys = build_keys(digest, [page], suffixes)
                backend.batch_io(handle, Batch(Operation.DELETE, keys))
                assert attachment.write(name, [page], [0])[0] == 0
                replaced += 1
            backend.release(handle)
    return replaced
