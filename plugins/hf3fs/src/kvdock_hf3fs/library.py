"""3FS's Python module `hf3fs_fuse.io`: what is used of it, and where it is found.

Source: 3FS, `hf3fs_fuse/io.py` and `src/lib/py/usrbio_binding.cc`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from kvdock.errors import PluginError

MODULE = "hf3fs_fuse.io"
BUILD = (
    "It is not on PyPI: build it in the source tree of 3FS, as docs/how-to/hf3fs.md "
    "says. Or set mode=posix to use the mount without USRBIO."
)

FORBID_HOLES = 2
"""Flag of reading rings: a hole before data is an error instead of zeros."""


class Completion(Protocol):
    """A slice of an iov whose operation has ended."""

    @property
    def result(self) -> int:
        """Bytes that moved, fewer at the end of a file or at a hole; or -errno."""

    @property
    def userdata(self) -> object:
        """Return what was given to `prepare`."""


class RawRing(Protocol):
    """A queue of operations in one direction; see `library.Usrbio.make_ioring`."""

    def prepare(
        self,
        iov: object,
        read: bool,  # noqa: FBT001 - as it is there
        fd: int,
        off: int,
        userdata: object = None,
        /,
    ) -> object:
        """Queue an operation, which may begin at once.

        Raises:
            OSError: EAGAIN if the ring is full, EBADF if the descriptor is not
                registered, EINVAL and EACCES for what can never work.
        """

    def submit(self) -> object:
        """Wake the daemon."""

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: object = None
    ) -> Sequence[Completion]:
        """Return what has ended, in the order in which it ended."""


class Usrbio(Protocol):
    """The module, as far as it is used."""

    def extract_mount_point(self, path: str) -> str | None:
        """Return the mount point of a path; None if it is not on 3FS."""

    def register_fd(self, fd: int) -> None:
        """Let rings use a descriptor.

        Raises:
            OSError: EBADF if it is not a file of 3FS, EINVAL if it is known.
        """

    def deregister_fd(self, fd: int) -> None:
        """Stop using a descriptor, before it is closed."""

    def make_iovec(
        self, shm: object, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Any:  # noqa: ANN401 - slices of it go into `prepare`
        """Register shared memory that has a name and a buffer."""

    def make_ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,  # noqa: FBT001, FBT002 - as it is there
        *,
        flags: int = 0,
    ) -> RawRing:
        """Make a ring of one direction."""


def load() -> Usrbio:
    """Import the module."""
    try:
        return cast("Usrbio", import_module(MODULE))
    except (ImportError, OSError) as error:
        raise PluginError(
            f"3FS's module {MODULE} cannot be imported: {error}", fix=BUILD
        ) from error


class Kept:
    """An object of the module that ends in its own process only.

    The end of an iov or a ring removes a link by which the daemon knows it. A forked
    child inherits the object, and its exit would take the link from its parent. So
    there is one reference more, which only `release` in the right process drops.
    """

    __slots__ = ("_pid", "inner")

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - any object
        self.inner = inner
        self._pid = os.getpid()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))

    def release(self) -> None:
        """End the object; called once."""
        inner, self.inner = self.inner, None
        if os.getpid() == self._pid:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(inner))
