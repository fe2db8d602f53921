"""Where the tests find 3FS: a real mount that is named, else the fake.

The fake is reached by the path that is put in front here, by tests alone. Nothing
that is installed looks for it.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

FAKE = Path(__file__).parents[1] / "fake"
REAL = os.environ.get("KVDOCK_HF3FS_MOUNT", "")
"""A real mount to run the tests on, with the real module: `make test-hf3fs`."""


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


def root_in(mount: Path) -> Path:
    """Return a new root below a mount."""
    return mount / f"kvdock-{uuid.uuid4().hex}"
