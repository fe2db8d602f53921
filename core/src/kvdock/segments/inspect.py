"""Where an object's bytes lie on disk: for tools, demos and tests.

Reads a store without opening it, and without its memory: what is found is
what a fresh process would find.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import numpy as np

from kvdock.errors import KvdockError, NamespaceError
from kvdock.segments import paths
from kvdock.segments.cleanup import pool_folders
from kvdock.segments.format import (RECORD_BYTES, RECORDS_AT, key_digests, key_seed)
from kvdock.segments.segment import Contents, open_index, read_contents


@attrs.frozen(kw_only=True)
class Location:
    """Where one object lies.

    Args:
        pool: Name of its pool.
        path: The file that holds its bytes.
        offset: Where they begin.
        nbytes: How many there are.
        slot_bytes: How many the slot has room for.
        checksum: xxh3 that they must have.
        record_path: The index file that holds its record.
        record_offset: Where the record begins; it has 64 bytes.
    """

    pool: str
    path: Path
    offset: int
    nbytes: int
    slot_bytes: int
    checksum: int
    record_path: Path
    record_offset: int


def locate(root: Path, key: str) -> tuple[Location, ...]:
    """Find every copy of an object.

    Damage its bytes through `path` and `offset` to see a read miss.

    Args:
        root: The store's root directory.
        key: The object's whole key: namespace digest, page hash, suffix.

    Raises:
        NamespaceError: If the key begins with no namespace.
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


def segments_of(
    root: Path, namespace: str
) -> Iterator[tuple[str, paths.IndexName, Contents]]:
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

    Args:
        root: The store's root directory.
        namespace: Its digest.
        shared: Accept a root that others own or may write; to look is harmless.

    Yields:
        Name and descriptor of each; closed when the next one is asked for.
    """
    paths.check_namespace(namespace)
    opened = namespace_of(root, namespace, shared=shared)
    with suppress(NamespaceError), opened as fd:
        for pool in pool_folders(fd):
            folder = paths.open_folder(fd, pool)
            try:
                yield pool, folder
            finally:
                os.close(folder)


@contextmanager
def namespace_of(root: Path, namespace: str, *, shared: bool = True) -> Iterator[int]:
    """Open a namespace's folder for a while; the descriptor.

    Args:
        root: The store's root directory.
        namespace: Its digest.
        shared: Accept a root that others own or may write; to look is harmless.

    Raises:
        NamespaceError: If there is no such namespace, or a folder of it goes
            meanwhile.
        KvdockError: If the operating system does not let us look, or work, there.
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
    """Return the index files of a folder, sorted, but for half-made ones."""
    with paths.listing(folder) as entries:
        found = sorted(entry.name for entry in entries)
    parsed = filter(None, map(paths.IndexName.parse, found))
    return tuple(name for name in parsed if name.state != "new")


def location(
    home: Path, folder: str, name: paths.IndexName, contents: Contents, slot: int
) -> Location:
    """Return where the object in one slot lies."""
    record = contents.records[slot]
    pool = paths.parse_pool_folder(folder)
    return Location(
        pool=pool[0] if pool else folder,
        path=home / folder / name.data,
        offset=slot * contents.slot_bytes,
        nbytes=int(record["nbytes"]),
        slot_bytes=contents.slot_bytes,
        checksum=int(record["checksum"]),
        record_path=home / folder / str(name),
        record_offset=RECORDS_AT + slot * RECORD_BYTES,
    )
