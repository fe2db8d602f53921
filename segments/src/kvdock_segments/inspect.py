"""Inspect a store on disk without opening it: for the command line, demos and tests.

Reads files only, so it finds what a new process would find.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import KvdockError, NamespaceError
from kvdock.stores import NamespaceSurvey, PoolSurvey
from kvdock_segments import ownership, paths
from kvdock_segments.cleanup import (
    clear_namespace,
    collect_garbage,
    delete_if_unowned,
    delete_linked,
    lock_unused,
    remove_empty,
)
from kvdock_segments.eviction import mean_last_used_ns
from kvdock_segments.format import (
    RECORD_BYTES,
    RECORDS_AT,
    index_bytes,
    key_digests,
    key_seed,
)
from kvdock_segments.index_file import IndexContents, open_index, read_contents
from kvdock_segments.namespace_files import read_record, remove_damaged
from kvdock_segments.usage import NamespaceUsage


@attrs.frozen(kw_only=True)
class Location:
    """Location of one object on disk.

    Args:
        path: The file that holds its bytes.
        offset: Their offset in it.
        checksum: Their xxh3 according to the record.
        record_path: The index file that holds its record.
        record_offset: Offset of its 64 bytes.
    """

    pool: str
    path: Path
    offset: int
    nbytes: int
    slot_bytes: int
    checksum: int
    record_path: Path
    record_offset: int

    @property
    def where(self) -> str:
        """Its place on disk, for people."""
        return f"{self.path} at {self.offset}"


def locate(root: Path, key: str) -> tuple[Location, ...]:
    """Find every copy of an object.

    Damage its bytes through `path` and `offset` to see a read miss. `key` is the whole
    key: namespace digest, page hash, suffix.

    Raises:
        NamespaceError: If the key does not begin with a namespace.
    """
    namespace = paths.check_namespace(key.partition("/")[0])
    wanted = key_digests([key], key_seed(namespace))[0]
    return tuple(
        location(root / namespace, pool, name, contents, slot)
        for pool, name, contents in segments_of(root, namespace)
        for slot in np.flatnonzero(
            (contents.records["key_low"] == wanted[0])
            & (contents.records["key_high"] == wanted[1])
            & (contents.records["check"] != 0)
        ).tolist()
    )


def finder(root: Path, namespace: str) -> Callable[[Sequence[str]], Sequence[bool]]:
    """Read the index files of a namespace; return what finds keys in them."""
    found = [np.zeros((0, 2), np.uint64)]
    for _, _, contents in segments_of(root, namespace):
        live = contents.records[contents.records["check"] != 0]
        found.append(np.stack([live["key_low"], live["key_high"]], axis=1))
    digests = np.concatenate(found)
    digests = digests[np.argsort(digests[:, 0])]

    def holds(keys: Sequence[str]) -> Sequence[bool]:
        wanted = key_digests(keys, key_seed(namespace))
        if not len(digests):
            return [False] * len(keys)
        places = np.searchsorted(digests[:, 0], wanted[:, 0]).clip(max=len(digests) - 1)
        answer: list[bool] = (digests[places] == wanted).all(axis=1).tolist()
        return answer

    return holds


def segments_of(
    root: Path, namespace: str
) -> Iterator[tuple[str, paths.IndexName, IndexContents]]:
    """Read the index files of a namespace.

    Yields:
        Folder name of the pool, name and contents of each index file that is
        whole and has a file of pages.
    """
    for pool, folder in folders_of(root, namespace):
        for name in index_names(folder):
            contents = None
            with suppress(OSError):
                data = os.stat(name.data, dir_fd=folder, follow_symlinks=False)
                fd = open_index(folder, str(name))
                try:
                    contents = read_contents(fd, name, data.st_size)
                finally:
                    os.close(fd)
            if contents is not None:
                yield pool, name, contents


def folders_of(
    root: Path, namespace: str, *, shared: bool = True
) -> Iterator[tuple[str, int]]:
    """Open the folders of a namespace one after the other.

    Yields:
        Name and descriptor of each, closed before the next one is opened.
    """
    paths.check_namespace(namespace)
    opened = namespace_of(root, namespace, shared=shared)
    with suppress(NamespaceError), opened as fd:
        for pool in paths.pool_folders(fd):
            folder = paths.open_folder(fd, pool)
            try:
                yield pool, folder
            finally:
                os.close(folder)


@contextmanager
def namespace_of(root: Path, namespace: str, *, shared: bool = True) -> Iterator[int]:
    """Open a namespace's folder as a context; the value is the descriptor.

    Raises:
        NamespaceError: If the namespace does not exist, or a folder of it is
            deleted meanwhile.
        KvdockError: If the operating system denies access.
    """
    root_fd = paths.open_root(root, shared=shared, create=False)
    try:
        fd = paths.open_folder(root_fd, paths.check_namespace(namespace))
        try:
            yield fd
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise NamespaceError(
            f"namespace {namespace[:12]} of store {str(root)!r} is not there, or "
            f"goes just now ({error.filename})",
            fix="`kvdock store ls ROOT` lists what is there.",
        ) from error
    except OSError as error:
        raise KvdockError(
            f"namespace {namespace[:12]} of store {str(root)!r} cannot be worked on: "
            f"{error.strerror or error} ({error.filename})",
            fix="Run this as the user who owns the store, where its file system can "
            "be written.",
        ) from error
    finally:
        os.close(root_fd)


def index_names(folder: int) -> tuple[paths.IndexName, ...]:
    """Return the index files of a folder, sorted, without those in creation."""
    with paths.listing(folder) as entries:
        found = sorted(entry.name for entry in entries)
    parsed = filter(None, map(paths.IndexName.parse, found))
    return tuple(name for name in parsed if name.state != "new")


def location(
    home: Path, folder: str, name: paths.IndexName, contents: IndexContents, slot: int
) -> Location:
    """Return the location of the object in one slot."""
    record = contents.records[slot]
    pool = paths.parse_pool_folder(folder)
    return Location(
        pool=pool[0] if pool else folder,
        path=home / folder / name.data,
        offset=slot * contents.slot_bytes,
        nbytes=contents.object_bytes,
        slot_bytes=contents.slot_bytes,
        checksum=int(record["checksum"]),
        record_path=home / folder / str(name),
        record_offset=RECORDS_AT + slot * RECORD_BYTES,
    )


def namespaces(root: Path) -> tuple[str, ...]:
    """Return the namespaces that a store holds, sorted.

    Raises:
        KvdockError: If there is no such store.
    """
    fd = paths.open_root(root, shared=True, create=False)
    try:
        return paths.namespaces_in(fd)
    finally:
        os.close(fd)


def resolve_prefix(root: Path, prefix: str) -> str:
    """Return the one namespace that begins with a prefix.

    Raises:
        NamespaceError: If none does, or several do.
    """
    found = [name for name in namespaces(root) if name.startswith(prefix)]
    if len(found) == 1 and prefix:
        return found[0]
    what = f"{len(found)} namespaces begin" if found else "no namespace begins"
    raise NamespaceError(
        f"{what} with {prefix!r}", fix="`kvdock store ls ROOT` lists them."
    )


def describe_namespace(root: Path, namespace: str) -> NamespaceSurvey:
    """Count the contents of one namespace."""
    with namespace_of(root, namespace) as fd:
        record = b""
        with suppress(OSError):  # something else of its name
            record = read_record(fd)
        listed = NamespaceUsage(fd).bytes_of()
    fits = bool(record) and paths.fits(record, namespace)
    about = _about(record) if fits else {}
    totals = {folder: np.zeros(6, np.int64) for folder in listed}
    used_ns = 0
    for folder, _, contents in segments_of(root, namespace):
        live = contents.records["check"] != 0
        nbytes = contents.object_bytes * int(live.sum())
        kept = live & (contents.records["keep_until"] > time.time())
        timed = live & (contents.records["expire_at"] > 0)
        one = [1, int(live.sum()), nbytes, len(contents.corrupt_slots)]
        one += [contents.slot_bytes * int(kept.sum()), int(timed.sum())]
        totals.setdefault(folder, np.zeros(6, np.int64))[:] += one
        if live.any():
            used_ns = max(used_ns, int(contents.used_ns[live].max()))
    return NamespaceSurvey(
        namespace=namespace,
        model=str(about.get("model", "")),
        revision=str(about.get("revision", "")),
        recorded=fits,
        used_ns=used_ns,
        pools=tuple(
            _pool_survey(folder, total, listed.get(folder, 0))
            for folder, total in sorted(totals.items())
        ),
    )


def _about(record: bytes) -> dict[str, object]:
    """Parse a record; empty if it is not a JSON object."""
    with suppress(ValueError, RecursionError):
        found = json.loads(record)
        if isinstance(found, dict):
            return found
    return {}


def _pool_survey(
    folder: str, total: npt.NDArray[np.int64], file_bytes: int
) -> PoolSurvey:
    pool, _, object_bytes = folder.rpartition(".")
    segments, pages, stored_bytes, corrupt, promised_bytes, expiring = total.tolist()
    return PoolSurvey(
        pool=pool,
        object_bytes=int(object_bytes),
        segments=segments,
        pages=pages,
        stored_bytes=stored_bytes,
        file_bytes=file_bytes,
        corrupt_records=corrupt,
        promised_bytes=promised_bytes,
        expiring=expiring,
    )


def gc(
    root: Path,
    namespace: str,
    *,
    to_bytes: int | None = None,
    newer: bool = False,
    shared: bool = False,
) -> int:
    """Delete leftovers of crashed writers, and the coldest segments on request.

    Unreadable segments are deleted as well, and finally the namespace itself if it is
    empty and no store has it open. `to_bytes` is the most that the namespace keeps. If
    `newer`, segments of a later version of kvdock go too.

    Returns:
        Bytes that were freed.

    Raises:
        KvdockError: If other users own the root or can write there.
    """
    freed = 0
    with namespace_of(root, namespace, shared=shared) as fd:
        kept_by = ownership.read_liveness(fd)
        freed += remove_damaged(fd, namespace)
        usage = NamespaceUsage(fd)
        for folder in usage.bytes_of():
            folder_fd = paths.open_folder(fd, folder)
            freed += collect_garbage(folder_fd, kept_by, lost=True, newer=newer)
            os.close(folder_fd)
        begun = usage.usage_bytes()
        if delete_linked(fd, kept_by):
            freed += begun - usage.usage_bytes()
        if to_bytes is not None:
            freed += shrink(root, namespace, fd, to_bytes)
    root_fd = paths.open_root(root, shared=shared, create=False)
    try:
        remove_empty(root_fd, namespace)
    finally:
        os.close(root_fd)
    return freed


def in_use(root: Path, namespace: str) -> str:
    """Say why a process may have a namespace open; "" if none has."""
    with namespace_of(root, namespace) as fd:
        return lock_unused(fd)


def clear(
    root: Path, namespace: str, *, unused: bool = False, shared: bool = False
) -> int:
    """Delete all pages of a namespace; return the bytes that were freed.

    If `unused`, processes are kept from opening it meanwhile, and one that has it open
    is an error.

    Raises:
        KvdockError: If other users own the root or can write there, or a process
            may have the namespace open and that is not accepted.
    """
    with namespace_of(root, namespace, shared=shared) as fd:
        if unused and (why := lock_unused(fd)):
            raise KvdockError(f"namespace {namespace[:12]} of {root} is kept: {why}")
        return clear_namespace(fd) + remove_damaged(fd, namespace)


def shrink(
    root: Path,
    namespace: str,
    fd: int,
    to_bytes: int,
    stopped: threading.Event | None = None,
) -> int:
    """Delete the coldest segments until a namespace takes no more than `to_bytes`.

    Those with promised pages stay, and those that a process writes. Returns the bytes
    that were freed.
    """
    usage, kept_by = NamespaceUsage(fd), ownership.read_liveness(fd)
    begun = left = usage.usage_bytes()
    by_use = []
    if left > to_bytes:
        for folder, name, contents in segments_of(root, namespace):
            used_ns = contents.used_ns[contents.records["check"] != 0]
            nbytes = index_bytes(contents.slots) + contents.slots * contents.slot_bytes
            by_use.append((mean_last_used_ns(used_ns), folder, str(name), nbytes))
    for _, folder, file, nbytes in sorted(by_use):
        if left <= to_bytes or (stopped and stopped.is_set()):
            break
        if delete_if_unowned(fd, folder, file, kept_by):
            left -= nbytes
    return begun - usage.usage_bytes()
