"""Try the backend on earlier releases of the Mooncake library.

    python plugins/mooncake/tests/releases.py                all of them
    python plugins/mooncake/tests/releases.py 0.3.9 0.3.11   some

Each release lies in a folder of its own in `.venv-mooncake`, an environment without
the library, and is tried in a process of its own: with a master of its release, and
with one of the release that kvdock is tested with, which is newer than the client. It
works, or it is rejected by an error of kvdock; anything else fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-mooncake"
PYTHON = VENV / "bin" / "python"
WHEEL = "mooncake-transfer-engine-non-cuda"
EARLIER = ("0.3.9", "0.3.10", "0.3.10.post1", "0.3.10.post2", "0.3.11", "0.3.11.post1")
TESTED = "0.3.13.post1"
RESULT = "RESULT "
"""How the line of output begins that has the result."""

_PAGES = 16
_LIMIT_S = 120
_CLEARED_S = 20.0


def _say(what: str) -> None:
    sys.stderr.write(f"== {what}\n")


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-input"]
    subprocess.run([*command, "--disable-pip-version-check", *arguments], check=True)


def build() -> None:
    """Make the environment, once."""
    if PYTHON.exists():
        return
    _say(f"making {VENV.name}")
    venv.create(VENV, with_pip=True)
    _pip("-e", f"{ROOT / 'core'}[testing]", "-e", str(ROOT / "plugins" / "mooncake"))
    # The libraries that every release needs; none of them is installed here.
    bring = [str(PYTHON), "-m", "kvdock_mooncake.system_libraries"]
    subprocess.run(bring, check=False, stdout=sys.stderr)


def folder_of(release: str) -> Path:
    """Return where a release lies, installed."""
    folder = VENV / "releases" / release
    if not (folder / "mooncake").is_dir():
        _say(f"installing {WHEEL} {release}")
        _pip("--no-deps", "--target", str(folder), f"{WHEEL}=={release}")
    return folder


def ask(release: str, *arguments: str) -> dict[str, Any]:
    """Run a trial in a process that has this release."""
    environ = {**os.environ, "PYTHONPATH": str(folder_of(release))}
    command = [str(PYTHON), __file__, "--try", *arguments]
    try:
        ran = subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "FAILED", "words": f"it hung for {_LIMIT_S} s"}
    for line in ran.stdout.splitlines():
        if line.startswith(RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
            return found
    last = ran.stderr.strip().splitlines()[-3:]
    return {"verdict": "FAILED", "words": f"it ended with {ran.returncode}: {last}"}


def trial(master: str) -> str:
    """Store pages, restore them through another client, delete and clear them."""
    from kvdock import Dock, Namespace, Shard
    from kvdock.pools import mla
    from kvdock.testing.memory import PageMemory
    from kvdock.transfer import Attachment

    pool = mla("kv", layers=range(2), page_tokens=16, latent=64, rope=16, anchor=True)
    pages = [hashlib.sha256(f"{n}".encode()).hexdigest() for n in range(_PAGES)]
    dock = Dock.load(require=["mooncake"])
    plan = dock.plan([pool], Shard(), ["mooncake"])

    def attached(segment_bytes: int) -> tuple[Attachment, PageMemory]:
        memory = PageMemory.of(pool, Shard(), _PAGES)
        settings = {"master": master, "segment_bytes": segment_bytes, "lease_s": 0.5}
        attachment = Attachment.open(
            dock,
            plan,
            Namespace(model="releases"),
            {pool.name: memory.region()},
            {"mooncake": settings},
        )
        return attachment, memory

    every = {pool.name: range(_PAGES)}
    lender, source = attached(64 << 20)
    with lender:
        for page, name in enumerate(pages):
            source.write(page, name)
        stored = lender.put(pages, every).pages
        other, target = attached(0)
        with other:
            found = other.exists(pages).best
            loaded = other.get(pages, every).pages
            (stored_object,) = target.region().objects
            right = all(
                target.holds(page, name, stored_object)
                for page, name in enumerate(pages)
            )
            if (stored, found, loaded, right) != (_PAGES, _PAGES, _PAGES, True):
                raise AssertionError(
                    f"{stored} stored, {found} found, {loaded} loaded, right: {right}"
                )
        _until_cleared(lender, pages)
    return f"{_PAGES} pages stored, restored by another client and cleared"


def _until_cleared(attachment: Any, pages: list[str]) -> None:
    """Clear until nothing is found: the other client's leases keep pages a while."""
    end = time.monotonic() + _CLEARED_S
    while attachment.exists(pages).best:
        if time.monotonic() > end:
            raise AssertionError("pages are found after a clear")
        attachment.clear()
        time.sleep(0.1)


def try_here(master: str) -> dict[str, Any]:
    """Try the release that this process has; start a master of it if none is given."""
    from kvdock.errors import KvdockError
    from kvdock_mooncake.library import load
    from kvdock_mooncake.server import start_master

    server = None
    try:
        wheel = load().wheel
        if not master:
            server = start_master("-default_kv_lease_ttl=500")
            master = server.address
        words, verdict = trial(master), "works"
        return {"verdict": verdict, "words": words, "wheel": str(wheel)}
    except KvdockError as error:
        return {"verdict": "rejected", "words": str(error)}
    except Exception:  # noqa: BLE001 - the report says what went wrong
        return {"verdict": "FAILED", "words": traceback.format_exc()[-1500:]}
    finally:
        if server:
            server.stop()


def serve() -> None:
    """Run a master of the release that this process has, until its input ends."""
    from kvdock_mooncake.server import start_master

    server = start_master("-default_kv_lease_ttl=500")
    sys.stdout.write(f"{RESULT}{server.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


def report(releases: list[str]) -> int:
    """Try releases; return how many failed."""
    build()
    environ = {**os.environ, "PYTHONPATH": str(folder_of(TESTED))}
    master = subprocess.Popen(
        [str(PYTHON), __file__, "--serve"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert master.stdout is not None
        newer = master.stdout.readline().strip().removeprefix(RESULT)
        rows = [
            (release, of, ask(release, *where))
            for release in releases
            for of, where in ((release, ()), (TESTED, (newer,)))
        ]
    finally:
        master.communicate()
    for release, of, found in rows:
        line = f"{release:14} master {of:14} {found['verdict']:10} {found['words']}"
        sys.stdout.write(f"{line}\n")
    return sum(found["verdict"] == "FAILED" for _, _, found in rows)


def main() -> int:
    """Try the releases that are named, or all."""
    parser = argparse.ArgumentParser(description="Try earlier Mooncake releases.")
    parser.add_argument("releases", nargs="*", help="default: all earlier ones")
    parser.add_argument(
        "--try", dest="tried", action="store_true", help=argparse.SUPPRESS
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.tried:
        found = try_here(*(options.releases or [""]))
        sys.stdout.write(f"\n{RESULT}{json.dumps(found)}\n")
        sys.stdout.flush()
        # The library's threads may crash while the interpreter is taken down.
        os._exit(0)
    return report(options.releases or list(EARLIER))


if __name__ == "__main__":
    sys.exit(main())
