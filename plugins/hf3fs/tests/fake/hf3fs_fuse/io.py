# ruff: noqa: FBT001, FBT002, PTH108, PTH112, PTH115, PTH211
# Its signatures are those of the original.
"""A fake of `hf3fs_fuse.io` on any local directory: signatures and semantics of 3FS.

A directory is a mount if it holds `3fs-virt/iovs`. Bytes move through a mapping of
the daemon's own, which it finds by the link that `make_iovec` makes. The fake is
unkind wherever 3FS may be: it runs operations in random order, some before they are
submitted, and reports them in the order in which they ended. `KNOBS` makes it worse.

Source: 3FS, `hf3fs_fuse/io.py`, `src/lib/py/usrbio_binding.cc`, `src/fuse/IoRing.cc`,
`src/fuse/PioV.cc`, `src/fuse/IovTable.cc`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

FORBID_READ_HOLES = 2
IOVS = "3fs-virt/iovs"

# Tests count what others move by these, so the fake keeps its own.
_preadv, _pwritev, _lseek, _fstat = os.preadv, os.pwritev, os.lseek, os.fstat

Fate = Callable[["Operation"], Any]


class Operation:
    """One queued operation, as the daemon sees it."""

    def __init__(self, iov: _Slice, *, read: bool, file: _File, offset: int) -> None:
        self.iov = iov
        self.read = read
        self.file = file
        self.offset = offset
        self.nbytes = len(iov)


class Knobs:
    """What goes wrong; one object for all rings of the process.

    Args:
        order: "random", "fifo" or "reverse".
        delay: Seconds that an operation takes.
        lose: Whether an operation does not run until `find` is called.
        result: -errno, or bytes that move at most; None to move all.
        refuse: errno with which the next `wait` of any ring fails.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.order = "random"
        self.delay: Fate | None = None
        self.lose: Fate | None = None
        self.result: Fate | None = None
        self.wait_fails: Callable[[], int] | None = None
        self.random = random.Random(19)  # noqa: S311 - not a secret

    def find(self) -> None:
        """Run what was lost, and lose nothing more."""
        self.lose = None
        for state in list(_states):
            state.find()


class Counts:
    """What the daemon has done."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self.rings = 0


KNOBS = Knobs()
COUNTS = Counts()
_states: set[_State] = set()
_files: dict[int, _File] = {}
_lock = threading.Lock()


def _unlink(link: str) -> None:
    # A mount that is gone has taken its links along.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)


class _File:
    """A registered descriptor: the daemon keeps the file open by itself."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        self.mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE

    def __del__(self) -> None:
        os.close(self.fd)


def extract_mount_point(path: str) -> str | None:
    place = Path(path).resolve()
    for folder in (place, *place.parents):
        if (folder / IOVS).is_dir():
            return str(folder)
    return None


def register_fd(fd: int, flags: int = 0) -> None:
    del flags
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        raise OSError(errno.EBADF, "not open") from None
    if extract_mount_point(name) is None:
        raise OSError(errno.EBADF, "not a file of 3FS")
    with _lock:
        if fd in _files:
            raise OSError(errno.EINVAL, "registered already")
        _files[fd] = _File(fd)


def deregister_fd(fd: int) -> None:
    """Forget a descriptor; an unknown one is ignored."""
    with _lock:
        _files.pop(fd, None)


def force_fsync(fd: int) -> int:
    """Bring the length of a file up to date."""
    os.fsync(fd)
    return 0


class _Slice:
    """A piece of registered memory."""

    def __init__(self, memory: _Memory, start: int, stop: int) -> None:
        self.memory = memory
        self.base_off = start
        self.nbytes = stop - start
        self.result = 0
        self.userdata: object = None

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, piece: slice) -> _Slice:
        start, stop, step = piece.indices(self.nbytes)
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return _Slice(
            self.memory, self.base_off + start, self.base_off + max(start, stop)
        )


class _Memory:
    """The daemon's own mapping of shared memory."""

    def __init__(self, target: str, block: int) -> None:
        with Path(target).open("r+b") as file:
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0))
        self.block = block
        self.gone = False


class iovec:  # noqa: N801 - its name there
    """Registered memory; its end unlinks what the daemon knows it by."""

    def __init__(self, iov: _Slice, link: str) -> None:
        self.iov = iov
        self.link = link

    def __del__(self) -> None:
        self.iov.memory.gone = True
        _unlink(self.link)

    def __getitem__(self, piece: slice) -> _Slice:
        return self.iov[piece]


def make_iovec(
    shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
) -> iovec:
    """Register shared memory by a link to it below the mount."""
    del numa
    suffix = f".b{block_size}" if block_size > 0 else ""
    link = f"{hf3fs_mount_point}/{IOVS}/{uuid4()}{suffix}"
    os.symlink(os.path.normpath(f"/dev/shm/{shm.name}"), link)  # noqa: S108
    memory = _Memory(os.readlink(link), block_size)
    return iovec(_Slice(memory, 0, len(memory.bytes)), link)


class ioring:  # noqa: N801 - its name there
    """A ring; its thread ends with it."""

    def __init__(self, state: _State) -> None:
        self.ior = state

    def prepare(self, iov: Any, *args: Any, **kwargs: Any) -> _State:
        return self.ior.prepare(
            iov.iov if isinstance(iov, iovec) else iov, *args, **kwargs
        )

    def submit(self) -> _State:
        return self.ior.submit()

    def wait(self, **kwargs: Any) -> list[_Slice]:
        return self.ior.wait(**kwargs)

    def __del__(self) -> None:
        self.ior.stop()


class _State:
    """The daemon's side of a ring."""

    def __init__(
        self, mount: str, entries: int, depth: int, flags: int, *, read: bool
    ) -> None:
        self.entries, self.read, self.depth, self.flags = entries, read, depth, flags
        self.ended = threading.Condition()
        self.used = 0
        self.queued: list[Operation] = []
        self.under_way: list[tuple[float, int, Operation]] = []
        self.lost: list[Operation] = []
        self.done: deque[_Slice] = deque()
        self.stopped = False
        self.number = 0
        # A ring is a link, too; with flags of 2 or more its name is misspelt when it
        # is to be unlinked, so that it stays until the process ends.
        self.link = f"{mount}/{IOVS}/{uuid4()}.r{depth}" + (
            f".f{flags:b}" if flags else ""
        )
        os.symlink("/dev/null", self.link)
        COUNTS.rings += 1
        _states.add(self)
        self.thread = threading.Thread(target=self.run, daemon=True, name="fake-3fs")
        self.thread.start()

    def prepare(
        self, iov: _Slice, read: bool, fd: int, off: int, userdata: object = None
    ) -> _State:
        if read != self.read or not len(iov) or iov.memory.gone:
            raise OSError(errno.EINVAL, "prep_io")
        block = iov.memory.block
        if block and iov.base_off // block != (iov.base_off + len(iov) - 1) // block:
            raise OSError(errno.EINVAL, "across two blocks of the iov")
        file = _files.get(fd)
        if file is None:
            raise OSError(errno.EBADF, "not registered")
        if file.mode == (os.O_WRONLY if read else os.O_RDONLY):
            raise OSError(errno.EACCES, "access mode")
        with self.ended:
            if self.used >= self.entries:
                raise OSError(errno.EAGAIN, "ring full")
            self.used += 1
            iov.userdata = userdata
            self.queued.append(Operation(iov, read=read, file=file, offset=off))
            if self.depth <= 0 and len(self.queued) % 7 == 0:
                self.ended.notify_all()  # the daemon looks by itself, too
        return self

    def submit(self) -> _State:
        with self.ended:
            self.ended.notify_all()
        return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: Any = None
    ) -> list[_Slice]:
        if KNOBS.wait_fails and (error := KNOBS.wait_fails()):
            raise OSError(error, "wait_for_ios")
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        end = None if timeout is None else time.monotonic() + timeout
        most = max(max_results, min_results, 1)
        out: list[_Slice] = []
        with self.ended:
            while True:
                while self.done and len(out) < most:
                    out.append(self.done.popleft())
                    self.used -= 1
                left = None if end is None else end - time.monotonic()
                if len(out) >= min_results or (left is not None and left <= 0):
                    return out
                self.ended.wait(left)

    def find(self) -> None:
        with self.ended:
            self.queued += self.lost
            self.lost = []
            self.ended.notify_all()

    def stop(self) -> None:
        with self.ended:
            self.stopped = True
            self.ended.notify_all()
        _states.discard(self)
        if self.flags < FORBID_READ_HOLES:
            _unlink(self.link)

    def _take(self) -> None:
        """Move what is queued under way, as io_depth has it."""
        count = len(self.queued)
        if self.depth > 0:
            count = self.depth if count >= self.depth else 0
        elif self.depth < 0:
            count = min(count, -self.depth)
        batch, self.queued = self.queued[:count], self.queued[count:]
        if KNOBS.order == "random":
            KNOBS.random.shuffle(batch)
        elif KNOBS.order == "reverse":
            batch.reverse()
        now = time.monotonic()
        for one in batch:
            if KNOBS.lose and KNOBS.lose(one):
                self.lost.append(one)
                continue
            self.number += 1
            delay = KNOBS.delay(one) if KNOBS.delay else 0
            heapq.heappush(self.under_way, (now + delay, self.number, one))

    def run(self) -> None:
        while True:
            with self.ended:
                while True:
                    if self.stopped:
                        return
                    self._take()
                    now = time.monotonic()
                    if self.under_way and self.under_way[0][0] <= now:
                        break
                    next_s = self.under_way[0][0] - now if self.under_way else None
                    self.ended.wait(next_s)
                due = []
                while self.under_way and self.under_way[0][0] <= now:
                    due.append(heapq.heappop(self.under_way)[2])
            for one in due:
                one.iov.result = _run(one, self.flags)
            with self.ended:
                self.done.extend(one.iov for one in due)
                self.ended.notify_all()


def _run(one: Operation, flags: int) -> int:
    """Move bytes, or not; return what the completion says."""
    fate = KNOBS.result(one) if KNOBS.result else None
    if fate is not None and fate < 0:
        return int(fate)
    most = one.nbytes if fate is None else min(fate, one.nbytes)
    start = one.iov.base_off
    memory = one.iov.memory.bytes[start : start + most]
    try:
        if one.read:
            moved = _read(one.file.fd, memory, one.offset, flags)
            COUNTS.read_bytes += max(0, moved)
        else:
            moved = _pwritev(one.file.fd, [memory], one.offset)
            COUNTS.written_bytes += moved
    except OSError as error:
        return -(error.errno or errno.EIO)
    return moved


def _read(fd: int, memory: memoryview, offset: int, flags: int) -> int:
    """Read; a hole at the end is short, one before data zeros or an error."""
    status = _fstat(fd)
    if not status.st_nlink:
        return 0  # its chunks are gone, also for open readers
    end = min(offset + len(memory), status.st_size)
    last = at = offset
    holes = False
    while at < end:
        try:
            data = _lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing more
            break
        if data >= end:
            break
        holes |= data > at
        last = at = min(end, _lseek(fd, data, os.SEEK_HOLE))
    if holes and flags & FORBID_READ_HOLES:
        return -errno.ENODATA
    moved = last - offset
    return _preadv(fd, [memory[:moved]], offset) if moved else 0


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    """Make a ring of one direction."""
    del priority, timeout, numa
    if not os.path.isdir(f"{hf3fs_mount_point}/{IOVS}"):
        raise OSError(errno.ENOENT, "not a mount of 3FS")
    return ioring(_State(hf3fs_mount_point, entries, io_depth, flags, read=for_read))
