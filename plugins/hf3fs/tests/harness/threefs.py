"""Where the tests find 3FS: a real mount that is named, else the fake.

The fake is reached by the path that is put in front here, by tests alone. Nothing
that is installed looks for it.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

from kvdock.errors import KvdockError
from kvdock_hf3fs import library

FAKE = Path(__file__).parents[1] / "fake"
REAL = os.environ.get("TESTS_OF_KVDOCK_HF3FS_MOUNT", "")
"""A real mount to run the tests on, with the real module: `make test-hf3fs`."""

POSIX_ONLY = os.environ.get("TESTS_OF_KVDOCK_HF3FS_MODE", "") == "posix"
"""Whether only the tests of mode posix run there: `MODE=posix`."""


def problem_of(mount: str, *, posix_only: bool = False) -> str:
    """Return why the tests cannot run on a mount; empty if they can."""
    if not Path(mount).is_dir():
        return f"{mount} is not a directory: name a mount point"
    if posix_only:
        return ""
    other = f"`make test-hf3fs MOUNT={mount} MODE=posix` tests mode posix there."
    try:
        found = library.load().extract_mount_point(mount)
    except KvdockError as error:
        return f"{error.what}. {error.fix} {other}"
    if found is None or Path(found).resolve() != Path(mount).resolve():
        return f"{mount} is not a mount point of 3FS, says {library.MODULE}. {other}"
    return ""


def use() -> None:
    """Put the fake in front of Python's path, unless a real mount is named."""
    if not REAL and str(FAKE) not in sys.path:
        sys.path.insert(0, str(FAKE))


def mounted(folder: Path) -> Path:
    """Return a mount: the real one, or a folder that the fake takes for one."""
    if REAL:
        return Path(REAL)
    (folder / "3fs-virt" / "iovs").mkdir(parents=True, exist_ok=True)
    return folder


def folder_in(folder: Path) -> Path:
    """Return a folder for mode posix: a new one on the real mount if it is named."""
    return root_in(Path(REAL)) if REAL else folder


def root_in(mount: Path) -> Path:
    """Return a new root below a mount."""
    return mount / f"kvdock-{uuid.uuid4().hex}"
