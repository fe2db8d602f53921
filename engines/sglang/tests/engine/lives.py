"""Lives of an engine: started one after the other, over one store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import environment
import warm_python

import kvdock_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    import tiny_models

RUN = Path(__file__).with_name("engine_run.py")
PROMPTS = [
    [(7 * n + 3) % 500 + 4 for n in range(122)],
    [(11 * n + 5) % 500 + 4 for n in range(118)],
]
NEW_TOKENS = 8
IMPORTED = (
    "sgl_kernel",  # the stand-in comes before SGLang
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
READ_LATE = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE",
}
"""Variables that SGLang reads when it makes a storage, and not while it is imported."""
LONGEST_S = 600.0
"""How long an engine may take."""


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
        rounds: list[dict[str, Any]],
        *,
        environ: dict[str, str] | None = None,
        new_tokens: int = NEW_TOKENS,
        kill_when: Callable[[], bool] | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Start an engine, let it answer, end it; return its answers.

        With `kill_when` all of its processes are killed as soon as that is true, and
        it answers nothing.
        """
        out = self.folder / f"{life}.json"
        task = {
            "model": str(self.model),
            "engine": self.tiny.engine,
            "rounds": rounds,
            "new_tokens": new_tokens,
            "out": str(out),
            "storage": {
                "backend_name": "kvdock",
                "module_path": "kvdock_sglang",
                "class_name": "KvdockStorage",
                "prefetch_threshold": 16,
                **self.storage,
            },
        }
        path = self.folder / f"{life}.task.json"
        path.write_text(json.dumps(task))
        log = self.folder / f"{life}.log"
        variables = environ or {}
        seed = len(list(self.folder.glob("*.log"))) % 2 + 1
        # Imports may read other variables.
        warm = variables.keys() <= READ_LATE
        start = warm_python.warm(IMPORTED, seed) if warm else warm_python.cold
        traced = {kvdock_trace.FOLDER: str(self.trace(life))}
        everything = {
            **os.environ,
            **environment.CPU,
            **self.tiny.environ,
            **traced,
            **variables,
        }
        engine = start([str(RUN), str(path)], everything, log)
        end_s = time.monotonic() + LONGEST_S
        try:
            if kill_when is None:
                engine.wait(LONGEST_S)
            while engine.poll() is None and not (kill_when and kill_when()):
                assert time.monotonic() < end_s, log.read_text()[-4000:]
                time.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
        if kill_when is not None:
            ended = f"rc {engine.returncode}\n{log.read_text()[-4000:]}"
            assert engine.returncode == -signal.SIGKILL, ended
            assert not out.exists()
            return []
        assert out.exists(), f"rc {engine.returncode}\n{log.read_text()[-4000:]}"
        answers: list[list[dict[str, Any]]] = json.loads(out.read_text())
        assert len(answers) == len(rounds), log.read_text()[-4000:]
        return answers

    def stored(self) -> World:
        """Let an engine store its prompts; return the same world."""
        (answers,) = self.live("stores", [{"prompts": PROMPTS}])
        assert not any(one["cached"] for one in answers)
        shutil.copytree(self.model, self.folder / "pristine")
        return self

    def again(self, folder: Path) -> World:
        """Return a world with a copy of the store, and with the model as it was."""
        shutil.rmtree(self.model, ignore_errors=True)
        shutil.copytree(self.folder / "pristine", self.model)
        root = folder / "store"
        shutil.copytree(self.storage["root"], root)
        storage = {**self.storage, "root": str(root)}
        return attrs.evolve(self, folder=folder, storage=storage)

    def trace(self, life: str) -> Path:
        """Where a life writes down what it moved."""
        return self.folder / f"{life}.trace"

    def moves(self, life: str) -> list[dict[str, Any]]:
        return kvdock_trace.moves(self.trace(life))
