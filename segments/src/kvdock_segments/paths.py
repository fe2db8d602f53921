"""Names of files and folders in a store, and how to open them safely.

Everything is opened relative to a descriptor of its folder and never through a
symbolic link, so an entry of a store cannot point out of it. Keys never become
names.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import attrs

from kvdock.errors import KvdockError, NamespaceError

RECORD_NAME = "namespace.json"
"""The record of a namespace; its SHA-256 is the name of the namespace's folder."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_POOL = re.compile(r"([a-z][a-z0-9_]{0,47})\.(\d{1,19})")
_INDEX = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{8})\.(idx|open|new)")
_DATA = re.compile(r"([0-9a-f]{16})\.dat")
_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{16}|(.+)\.[0-9a-f]{16}\.damaged")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors for too many open files."""

SETTLED_NS = 12_000_000
"""Resolution of a folder's time of change. A younger one may hide a second change,
so the folder is read again."""


_COARSE_NS = 2 * 10**9
"""How much a file system may round the time of a change down."""


@attrs.frozen
class IndexName:
    """Name of an index file: which segment, which generation, which state.

    Args:
        segment: Identity of the segment, 64 bits drawn at random.
        generation: Number of writers that have claimed it.
        state: "new" in creation, "open" while it is filled, else "idx".
    """

    segment: int
    generation: int
    state: str

    @classmethod
    def parse(cls, name: str) -> IndexName | None:
        """Parse a file name; None if it is not that of an index file."""
        match = _INDEX.fullmatch(name)
        if not match:
            return None
        return cls(int(match[1], 16), int(match[2], 16), match[3])

    def __str__(self) -> str:
        """Spell the file name."""
        return f"{self.segment:016x}.{self.generation:08x}.{self.state}"

    @property
    def data(self) -> str:
        """Name of the file that holds the pages."""
        return data_name(self.segment)


def data_name(segment: int) -> str:
    """Return the name of the file that holds a segment's pages."""
    return f"{segment:016x}.dat"


def data_segment(name: str) -> int | None:
    """Return the segment of a file of pages; None if it is another file."""
    match = _DATA.fullmatch(name)
    return int(match[1], 16) if match else None


def pool_folder(pool: str, object_bytes: int) -> str:
    """Return the name of the folder of a pool's objects of one size."""
    name = f"{pool}.{object_bytes}"
    if not _POOL.fullmatch(name):
        raise NamespaceError(f"{name!r} is not the name of a pool and its object size")
    return name


def parse_pool_folder(name: str) -> tuple[str, int] | None:
    """Return pool and object size of a folder name, or None."""
    match = _POOL.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def is_namespace(name: str) -> bool:
    """Return whether this is a namespace digest."""
    return _NAMESPACE.fullmatch(name) is not None


def earlier_now_ns(folder: int | Path) -> int:
    """Return the time by this host's clock, or by a folder's file system's if earlier.

    Pages are dated by the hosts that use them, unfinished files by the file system. On
    a shared one a host whose clock is ahead would find all of them old.
    """
    now_ns = time.time_ns()
    if isinstance(folder, int):
        folder = Path(f"/proc/self/fd/{folder}")
    with suppress(OSError), TemporaryFile(dir=folder, prefix=".now-") as file:
        return min(now_ns, os.fstat(file.fileno()).st_mtime_ns + _COARSE_NS)
    return now_ns


def namespaces_in(root: int) -> tuple[str, ...]:
    """Return the namespaces that a store holds, sorted."""
    with listing(root) as entries:
        found = [e.name for e in entries if is_namespace(e.name) and is_folder(e)]
    return tuple(sorted(found))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a folder and not a link to one."""
    return entry.is_dir(follow_symlinks=False)


def pool_folders(namespace_fd: int) -> list[str]:
    """Return the names of a namespace's folders of segments, sorted."""
    with listing(namespace_fd) as entries:
        return sorted(
            e.name for e in entries if parse_pool_folder(e.name) and is_folder(e)
        )


def check_namespace(name: str) -> str:
    """Return a namespace digest that is safe as a folder name."""
    if is_namespace(name):
        return name
    raise NamespaceError(
        f"{name[:80]!r} is not a namespace",
        fix="A namespace is the 64 hex digits of a SHA-256, in lower case.",
    )


def open_root(root: Path, *, shared: bool = False, create: bool = True) -> int:
    """Open a store's root; return a descriptor.

    `shared` accepts one that belongs to another user, or that group or world can write.
    """
    try:
        if create:
            _make_root(root)
        fd = os.open(root, _FOLDER)
    except OSError as error:
        raise KvdockError(
            f"store {str(root)!r} cannot be opened: {error.strerror or error}",
            fix="Name a directory that this user can write, not a symbolic link.",
        ) from error
    status = os.fstat(fd)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    if problem and not shared:
        os.close(fd)
        raise KvdockError(
            f"store {str(root)!r} {problem}: others could plant pages in it",
            fix="Use a directory of your own with mode 700, or allow it (shared_root).",
        )
    return fd


def _make_root(root: Path) -> None:
    """Create a root and its missing parents, writable by this user only.

    `Path.mkdir` would make the parents as the umask has it: with one of 0, others
    could rename the root and put their own in its place.
    """
    for folder in reversed(missing_folders(root)):
        with suppress(FileExistsError):  # another process was first
            folder.mkdir(mode=0o700)


def missing_folders(root: Path) -> list[Path]:
    """Return a root and those above it that have to be made, from the root upwards."""
    return [one for one in (root, *root.parents) if not os.path.lexists(one)]


def find_exposed_parent(root: Path) -> Path | None:
    """Return a folder above a root in which everyone may rename what is in it.

    Every user may write there, and no sticky bit (as /tmp has one) keeps them from
    the folders of others: the root can be replaced at any time.
    """
    with suppress(OSError):
        for folder in root.resolve().parents:
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return folder
    return None


NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors for a file that is missing or has been replaced by something else."""


def open_file(folder: int, name: str, flags: int) -> int:
    """Open a file inside a folder; return a descriptor.

    Raises:
        OSError: If it is missing, a link, or not a regular file (ENXIO).
    """
    return open_and_look(folder, name, flags)[0]


def open_data(folder: int, name: str, *, create: bool, direct: bool) -> int:
    """Open a segment's data for reading and, where that can be, writing.

    `create` makes the file, which must not be there yet; `direct` bypasses the page
    cache (O_DIRECT).

    Raises:
        OSError: If it cannot be opened.
    """
    flags = os.O_RDWR
    flags |= os.O_CREAT | os.O_EXCL if create else 0
    flags |= os.O_DIRECT if direct else 0
    try:
        return open_file(folder, name, flags)
    except OSError as error:
        if error.errno != errno.EROFS or create:
            raise
    # A disk with errors is often remounted read-only; its pages are still good.
    return open_file(folder, name, flags & ~os.O_RDWR)


def open_and_look(folder: int, name: str, flags: int) -> tuple[int, os.stat_result]:
    """Open a file as `open_file` does; return its status as well."""
    # Opening a pipe of that name would block until its other end is opened.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    raise OSError(errno.ENXIO, "not a regular file", name)


def status_of(folder: int, name: str) -> os.stat_result | None:
    """Return the status of an entry of any kind; None if it is missing."""
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close a descriptor when a block ends; the value is the descriptor."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_folder(parent: int, name: str, *, create: bool = False) -> int:
    """Open a folder inside another one; return a descriptor."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def is_gone(fd: int) -> bool:
    """Return whether a folder was deleted since it was opened."""
    try:
        return not os.fstat(fd).st_nlink
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return True  # by another host of a shared file system


def replace_folder(fd: int, fresh: int) -> None:
    """Make a descriptor refer to another folder, for all of its users.

    Threads that use it meanwhile see one of the two folders, and never another file
    that was given the same number. `fresh` is closed.
    """
    try:
        os.dup2(fresh, fd, inheritable=False)
    finally:
        os.close(fresh)


@contextmanager
def listing(folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a folder by its descriptor, independent of other listings.

    `os.scandir(fd)` shares its position with every duplicate of the descriptor, so
    two threads, or a parent and its child, would skip entries of each other.
    """
    own = closing_fd(os.open(".", _FOLDER, dir_fd=folder))
    with own as fd, os.scandir(fd) as entries:
        yield entries


def open_namespace(root: int, namespace: str, record: bytes = b"") -> int:
    """Open a namespace's folder under a lock that keeps it; create it if it is missing.

    The digest is the SHA-256 of the record, which is what the namespace covers.
    """
    check_namespace(namespace)
    if record and not fits(record, namespace):
        raise NamespaceError(f"the record does not match namespace {namespace[:12]}")
    while True:
        fd = open_folder(root, namespace, create=True)
        try:
            # A process that removes an empty one holds an exclusive lock for a moment.
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_SH)
            if not is_gone(fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def fits(record: bytes, namespace: str) -> bool:
    """Return whether a namespace's digest is that of a record."""
    return hashlib.sha256(record).hexdigest() == namespace


def read_aside(folder: int, name: str) -> bytes:
    """Read a small file that `write_aside` wrote; b"" if it is missing."""
    try:
        fd = open_file(folder, name, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read(1 << 24)


def write_aside(folder: int, name: str, content: bytes) -> None:
    """Write a file that others see whole or not at all.

    What has its name and is not a file is kept under another name.
    """
    aside = f".{name}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(aside, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
        _set_aside(folder, name)
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(aside, dir_fd=folder)
        raise


def _set_aside(folder: int, name: str) -> None:
    """Give what is not a file another name: some of it no file can replace."""
    status = status_of(folder, name)
    if status and not stat.S_ISREG(status.st_mode):
        other = f"{name}.{os.urandom(8).hex()}.damaged"
        with suppress(FileNotFoundError):
            os.rename(name, other, src_dir_fd=folder, dst_dir_fd=folder)


def remove(folder: int, name: str) -> int | None:
    """Delete a file, or a directory that has its name with everything in it.

    Returns:
        Size of the file, 0 of a directory; None if it is not there.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=folder)
            return status.st_size
        shutil.rmtree(name, dir_fd=folder)
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise OSError(errno.ENAMETOOLONG, "a directory too deep", name) from error
    return 0


def is_leftover(name: str, files: Collection[str]) -> bool:
    """Return whether `write_aside` set this aside, or did not end."""
    match = _LEFTOVER.fullmatch(name)
    return match is not None and (match[1] or match[2]) in files
