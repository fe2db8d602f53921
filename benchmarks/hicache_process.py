"""SGLang's HiCacheFile in a process of its own, driven by `file.py`.

Reads one JSON list a line: a word and its arguments. Answers each with the
seconds that the calls of the class itself took.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

STUBS = ("triton", "torchvision")


class _Stub(types.ModuleType):
    """A module that is imported by the class's package and never used."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - anything at all
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything:
    def __call__(self, *args: object, **_: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - same
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for packages that need a GPU and are only imported."""

    def find_spec(
        self, fullname: str, *_: object
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the stubs and everything below them."""
        if fullname.partition(".")[0] not in STUBS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Stub:
        """Make an empty module."""
        module = _Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class Driver:
    """Does what `file.py` asks for."""

    def __init__(self, root: str, pages: int, page_bytes: int) -> None:
        # After the stubs, and by name: neither is here when types are checked.
        torch: Any = importlib.import_module("torch")
        storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        known = storage.HiCacheStorageConfig.__dataclass_fields__
        given = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": True,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "m",
        }
        config = storage.HiCacheStorageConfig(
            **{name: value for name, value in given.items() if name in known}
        )
        self.root = Path(root)
        self.root.mkdir()
        self.store: Any = storage.HiCacheFile(config, root)
        shape = (pages, page_bytes)
        self.source = list(torch.randint(0, 255, shape, dtype=torch.uint8))
        self.target = list(torch.ones(shape, dtype=torch.uint8))
        self.turn = 0

    def keys(self, pages: list[int], turn: int) -> list[str]:
        """Return keys as an engine spells them: 64 hex digits."""
        return [f"{turn:032x}{page:032x}" for page in pages]

    def put(self, batches: list[list[int]], turn: int) -> float:
        """Store pages under new keys; the last turn's files go, untimed."""
        if turn != self.turn:
            for path in self.root.iterdir():
                path.unlink()
            self.turn = turn
        calls = [
            (self.keys(pages, turn), [self.source[page] for page in pages])
            for pages in batches
        ]
        begun = time.perf_counter()
        good = all(self.store.batch_set(keys, values) for keys, values in calls)
        took = time.perf_counter() - begun
        if not good:
            raise SystemExit("HiCacheFile refused pages")
        return took

    def get(self, batches: list[list[int]], turn: int) -> float:
        """Load pages."""
        calls = [
            (self.keys(pages, turn), [self.target[page] for page in pages])
            for pages in batches
        ]
        begun = time.perf_counter()
        for keys, targets in calls:
            self.store.batch_get(keys, targets)
        return time.perf_counter() - begun

    def exists(self, count: int, turn: int) -> float:
        """Ask for keys that are there."""
        keys = self.keys(list(range(count)), turn)
        begun = time.perf_counter()
        found = self.store.batch_exists(keys)
        took = time.perf_counter() - begun
        if found != count:
            raise SystemExit(f"HiCacheFile finds {found} of {count} keys")
        return took


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is not an answer
    logging.disable(logging.WARNING)
    # A script's own folder comes first, and a benchmark is called sglang.py.
    sys.path.remove(str(Path(__file__).resolve().parent))
    sys.meta_path.insert(0, _Finder())
    driver: Driver | None = None
    for line in sys.stdin:
        word, *arguments = json.loads(line)
        took = 0.0
        if word == "open":
            driver = Driver(*arguments)
        else:
            took = getattr(driver, word)(*arguments)
        answers.write(json.dumps(took) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
