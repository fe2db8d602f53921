"""Bring the system libraries that the wheels need, without root.

`python -m kvdock_mooncake.system_libraries` downloads Debian's or Ubuntu's packages of
libibverbs and unpacks them below the interpreter's own prefix, where the
plugin finds them. Does nothing where the system has them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvdock_mooncake.library import NATIVE_FOLDER, NATIVE_NAMES, loads, preload

_PACKAGES = ("libnl-3-200", "libnl-route-3-200", "libibverbs1")


def missing() -> list[str]:
    """Return the needed libraries that no process here could load."""
    preload()
    return [name for name in NATIVE_NAMES if not loads(name)]


def bring() -> None:
    """Download and unpack the packages."""
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise OSError(f"there is no {tool} here")
    NATIVE_FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # The sandbox user of apt could not write into a private folder.
        apt = ["apt-get", "-o", "APT::Sandbox::User=root"]
        try:
            _run([*apt, "download", *_PACKAGES], folder)
        except OSError:
            # A fresh machine has no list of packages yet: make a private one.
            lists = Path(folder) / "lists"
            (lists / "partial").mkdir(parents=True)
            apt += ["-o", f"Dir::State::Lists={lists}"]
            _run([*apt, "update"], folder)
            _run([*apt, "download", *_PACKAGES], folder)
        for package in sorted(Path(folder).glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(NATIVE_FOLDER)], folder)


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(  # noqa: S603 - fixed commands
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> int:
    """Make the libraries loadable; return the exit status."""
    lacking = missing()
    if not lacking:
        sys.stdout.write("== Mooncake's system libraries are here\n")
        return 0
    sys.stdout.write(f"== bringing {', '.join(lacking)} to {NATIVE_FOLDER}\n")
    try:
        bring()
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(
            f"{error}\nInstall libibverbs1 (Debian, Ubuntu) or rdma-core (others), "
            "then try again. Until then the mooncake backend is unavailable.\n"
        )
        return 1
    lacking = missing()
    if lacking:
        sys.stderr.write(f"still missing: {', '.join(lacking)}\n")
    return bool(lacking)


if __name__ == "__main__":
    sys.exit(main())
