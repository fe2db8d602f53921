"""A mount for `kvdock demo --backend hf3fs` where there is no 3FS: a fake of it.

Called by the demo alone. The fake lies in the tests of the source tree, is not part
of the wheel, and nothing that serves an engine looks for it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from kvdock.errors import KvdockError

_NOTICE = (
    "no mount of 3FS is configured: this runs on a FAKE of its module hf3fs_fuse, on "
    "a local directory; it shows nothing of 3FS's speed"
)

FAKE = Path(__file__).parents[2] / "tests" / "fake"


@contextmanager
def local_server(
    given: Mapping[str, object],
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Bring what the backend needs, for as long as a demo runs.

    Entry point `hf3fs` of the group `kvdock.servers`.

    Yields:
        Settings to use instead, and a sentence that says that this is a fake; ""
        if the user's own mount is used.
    """
    mount = str(given.get("mount") or "")
    if given.get("mode") == "posix":
        yield given, ""
        return
    if mount:
        with tempfile.TemporaryDirectory(prefix="kvdock-demo-", dir=mount) as folder:
            yield {**given, "root": folder}, ""
        return
    if not FAKE.is_dir():
        raise KvdockError(
            "no mount of 3FS is configured, and there is no fake in an installed wheel",
            fix="Give --set mount=DIR, or --set mode=posix; or run the demo in a "
            "checkout of kvdock.",
        )
    with tempfile.TemporaryDirectory(prefix="kvdock-demo-3fs-") as folder:
        (Path(folder) / "3fs-virt" / "iovs").mkdir(parents=True)
        # This process, and those that it starts, import the fake.
        path = os.pathsep.join(filter(None, (str(FAKE), os.environ.get("PYTHONPATH"))))
        with (
            patch.dict(os.environ, PYTHONPATH=path),
            patch.object(sys, "path", [str(FAKE), *sys.path]),
        ):
            yield {**given, "root": f"{folder}/store", "mount": folder}, _NOTICE
