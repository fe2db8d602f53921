"""Shared memory that 3FS's daemon registers: the only memory that USRBIO moves."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock import HostMemory
from kvdock.errors import RegionError
from kvdock.geometry import AddressRanges
from kvdock.units import format_bytes
from kvdock_hf3fs.library import Kept

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvdock import Block
    from kvdock_hf3fs.library import Usrbio

FOLDER = "/dev/shm"  # noqa: S108 - where 3FS's links lead to

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    *(ctypes.c_int,) * 3,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """Mapped shared memory, unmapped when nothing refers to it any more.

    Neither `mmap.mmap` nor `SharedMemory`: the first keeps a descriptor for each
    mapping, the second two, and cannot be closed while an array looks into it. The file
    is not needed any more afterwards.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        mode = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = 0
        found = _libc.mmap(None, nbytes, mode, mmap.MAP_SHARED, fd, 0)
        if found == _FAILED:
            raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
        self.address = found
        self.__array_interface__ = {
            "data": (found, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        """Unmap it."""
        if self.address:
            _libc.munmap(self.address, self.nbytes)


@attrs.frozen
class _Named:
    """What `make_iovec` looks at: a name below /dev/shm, and the bytes."""

    name: str
    buf: npt.NDArray[np.uint8]


@attrs.define(eq=False)
class Iov:
    """Registered memory.

    Args:
        kept: The library's object; its slices go into operations.
        bytes: The memory itself.
        users: The loan, and the pools that lie in it.
    """

    address: int
    nbytes: int
    kept: Kept
    bytes: npt.NDArray[np.uint8] | None
    users: int = 1

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.address + self.nbytes


class Registry:
    """All registered memory of this process.

    An engine takes memory before it attaches, and several attachments may lie in it.
    """

    def __init__(self) -> None:
        self._iovs: list[Iov] = []
        self._lock = threading.Lock()

    def allocate(
        self, usrbio: Usrbio, mount: str, nbytes: int, *, block: int = 0, limit: int = 0
    ) -> HostMemory:
        """Make shared memory that rings reach.

        Pieces of `block` bytes are registered, 0 for all in one; `limit` bounds the
        bytes of this process, 0 for no limit.
        """
        size = max(1, nbytes)
        with self._lock:
            taken = sum(one.nbytes for one in self._iovs)
        if limit and taken + size > limit:
            raise RegionError(
                f"{format_bytes(size)} of shared memory beside {format_bytes(taken)} "
                f"are more than iov_limit, {format_bytes(limit)}",
                fix="Raise iov_limit, or let the engine keep a smaller pool.",
            )
        try:
            iov = _register(usrbio, mount, size, block)
        except OSError as error:
            raise RegionError(
                f"3FS registers no {format_bytes(size)} of shared memory: {error}",
                fix=f"See how much room {FOLDER} has (df {FOLDER}), and that the FUSE "
                f"daemon of {mount} sees the same {FOLDER}.",
            ) from error
        with self._lock:
            self._iovs.append(iov)
        found = iov.bytes
        assert found is not None  # noqa: S101 - for the type checker
        return HostMemory(found[:nbytes], lambda: self.leave([iov]))

    def hold(self, blocks: Iterable[Block]) -> list[Iov]:
        """Keep the memory of a pool registered; `leave` ends it."""
        found: list[Iov] = []
        with self._lock:
            for block in blocks:
                if not block.nbytes:
                    continue
                end = block.address + block.nbytes
                around = [
                    iov
                    for iov in self._iovs
                    if iov.address <= block.address and end <= iov.end
                ]
                if not around:
                    raise RegionError(
                        f"memory at {block.address:#x} of {format_bytes(block.nbytes)} "
                        "is not in an iov, and USRBIO moves no other",
                        fix="Take it from Dock.allocate, or plan with the settings of "
                        "this backend, so that pools elsewhere are staged.",
                    )
                if around[0] not in found:
                    found.append(around[0])
            for iov in found:
                iov.users += 1
        return found

    def leave(self, iovs: Iterable[Iov]) -> None:
        """End uses; memory without any is released."""
        ended = []
        with self._lock:
            for iov in iovs:
                iov.users -= 1
                if not iov.users:
                    self._iovs.remove(iov)
                    ended.append(iov)
        for iov in ended:
            iov.kept.release()
            iov.bytes = None

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._iovs)


IOVS = Registry()
"""All of the process: an address is registered or it is not, for every pool."""


def ranges_of(iovs: Iterable[Iov]) -> AddressRanges:
    """Return the addresses that rings reach."""
    return AddressRanges.of((iov.address, iov.nbytes) for iov in iovs)


def _reserve(fd: int, nbytes: int) -> None:
    """Take all of a file's memory now; else a full /dev/shm is a SIGBUS later.

    Asked first: a tmpfs as large as the memory gives pages until processes are
    killed, before it says that it has no more.
    """
    status = os.fstatvfs(fd)
    if nbytes > status.f_bavail * status.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FOLDER)
    os.posix_fallocate(fd, 0, nbytes)


def _register(usrbio: Usrbio, mount: str, nbytes: int, block: int) -> Iov:
    name = f"kvdock-hf3fs-{os.getpid()}-{secrets.token_hex(8)}"
    path = f"{FOLDER}/{name}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        try:
            _reserve(fd, nbytes)
            mapping = Mapping(fd, nbytes)
        finally:
            os.close(fd)
        found: Any = np.asarray(mapping)
        iov = usrbio.make_iovec(_Named(name, found), mount, block)
    finally:
        # The daemon has mapped it; nothing else may.
        Path(path).unlink()
    if found.ctypes.data != mapping.address:
        raise OSError(errno.EINVAL, "numpy copied the mapping")
    return Iov(mapping.address, nbytes, Kept(iov), found)
