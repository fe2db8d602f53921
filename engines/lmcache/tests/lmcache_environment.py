"""Build the environment of the LMCache tests, and run them in it.

    python engines/lmcache/tests/lmcache_environment.py           build it
    python engines/lmcache/tests/lmcache_environment.py --test    run them
    python engines/lmcache/tests/lmcache_environment.py --test -k s3

LMCache comes from PyPI, unpatched, without its dependencies: half of them are for
CUDA. All of it lives in `.venv-lmcache` at the root of the checkout; delete that
folder and nothing is left.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
VENV = ROOT / ".venv-lmcache"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
# Folder to the extra that its tests ask for.
WORKSPACE = {
    "core": "",
    "segments": "",
    "plugins/file": "",
    "plugins/s3": "[demo]",
    "engines/lmcache": "",
}
LMCACHE = "0.5.6"

OFFLINE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""Environment in which LMCache reports to no one."""


def _say(what: str) -> None:
    sys.stderr.write(f"== {what}\n")


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-input"]
    subprocess.run([*command, "--disable-pip-version-check", *arguments], check=True)


def _recipe() -> str:
    """Return a digest of everything that decides what is installed."""
    digest = hashlib.sha256(LMCACHE.encode())
    own = (HERE / "requirements.txt", Path(__file__))
    for path in (*own, *(ROOT / name / "pyproject.toml" for name in WORKSPACE)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build() -> Path:
    """Make `.venv-lmcache`, or leave it alone if it is as it should be.

    Returns:
        Its Python.
    """
    recipe = _recipe()
    if STAMP.exists() and STAMP.read_text() == recipe:
        return PYTHON
    started = time.monotonic()
    if not PYTHON.exists():
        _say(f"making {VENV.name}")
        venv.create(VENV, with_pip=True)
    _say(f"installing LMCache {LMCACHE} for the CPU: 1 GB, a minute")
    _pip("-r", str(HERE / "requirements.txt"))
    _pip("--no-deps", f"lmcache=={LMCACHE}")
    _say("installing the workspace: " + ", ".join(WORKSPACE))
    folders = [f"{ROOT / name}{extra}" for name, extra in WORKSPACE.items()]
    _pip(*(part for folder in folders for part in ("-e", folder)))
    STAMP.write_text(recipe)
    _say(f"{VENV.name} is ready after {time.monotonic() - started:.0f} s")
    return PYTHON


def main() -> int:
    """Build, and with --test run the suite."""
    parser = argparse.ArgumentParser(description="The LMCache test environment.")
    parser.add_argument("--test", action="store_true", help="run the suite")
    options, arguments = parser.parse_known_args()
    python = build()
    if not options.test:
        sys.stdout.write(f"{python}\n")
        return 0
    command = [str(python), "-m", "pytest", str(HERE), *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **OFFLINE}).returncode  # noqa: PLW1510 - pytest's own status


if __name__ == "__main__":
    sys.exit(main())
