"""Build the environment of the stores and tools that kvdock is measured beside.

    python benchmarks/outside/outside_environment.py    build it, and print its Python

LMDB, RocksDB (rocksdict) and KVCache.AI's simulator come from the package index,
unpatched, and nothing of them is kept here. All of it lives in `.venv-outside` at the
root of the checkout; delete that folder and nothing is left.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "harness"))

from engine_environment import EngineEnvironment

HERE = Path(__file__).parent

ENVIRONMENT = EngineEnvironment(
    engine="outside",
    script=Path(__file__),
    what="LMDB, RocksDB and kvcache-simulator: 100 MB, half a minute",
    packages=(("-r", str(HERE / "requirements.txt")),),
    workspace={"core": "", "segments": "", "plugins/file": "", "cli": ""},
    variables={},
)

if __name__ == "__main__":
    sys.exit(ENVIRONMENT.main())
