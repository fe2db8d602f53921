"""Build the environment of the LMCache tests, and run them in it.

    python engines/lmcache/tests/lmcache_environment.py           build it
    python engines/lmcache/tests/lmcache_environment.py --test    run them
    python engines/lmcache/tests/lmcache_environment.py --test -k s3

LMCache comes from PyPI, unpatched, without its dependencies: half of them are for
CUDA. All of it lives in `.venv-lmcache` at the root of the checkout; delete that
folder and nothing is left.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "harness"))

from engine_environment import EngineEnvironment  # noqa: E402 - found by the path above

LMCACHE = "0.5.6"

OFFLINE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""Environment in which LMCache reports to no one."""

ENVIRONMENT = EngineEnvironment(
    engine="lmcache",
    script=Path(__file__),
    what=f"LMCache {LMCACHE} for the CPU: 1 GB, a minute",
    packages=(
        ("-r", str(HERE / "requirements.txt")),
        ("--no-deps", f"lmcache=={LMCACHE}"),
    ),
    workspace={
        "core": "",
        "segments": "",
        "plugins/file": "",
        "plugins/s3": "[demo]",
        "engines/lmcache": "",
    },
    variables=OFFLINE,
)

if __name__ == "__main__":
    sys.exit(ENVIRONMENT.main())
