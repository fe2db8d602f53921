"""Looking at whole stores: what is in them, and what can go.

For the command line and other tools. Everything here reads the files alone,
beside processes that may be using them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import NamespaceError
from kvdock.segments import (paths, ownership)
from kvdock.segments.inspect import namespace_of, segments_of
from kvdock.segments.cleanup import (clear_namespace, delete_unowned, remove_empty, sweep)
from kvdock.segments.usage import Neighbours


@attrs.frozen(kw_only=True)
class PoolSurvey:
    """What a store holds of one pool, in objects of one size.

    Args:
        pool: Name of the pool.
        object_bytes: Size of the objects.
        segments: Segments that can be read.
        pages: Objects in them.
        stored_bytes: Bytes of those objects.
        file_bytes: Bytes of all files, free slots and leftovers among them.
        wrong_records: Records that are there and not whole.
    """

    pool: str
    object_bytes: int
    segments: int
    pages: int
    stored_bytes: int
    file_bytes: int
    wrong_records: int


@attrs.frozen(kw_only=True)
class NamespaceSurvey:
    """What a store holds of one namespace.

    Args:
        namespace: Its digest.
        model: Identity of the model, "" where it is not recorded.
        revision: Which weights, as recorded.
        recorded: Whether what it covers is kept beside the data, and fits.
        used_ns: When any of its pages was last stored or read; 0 for never.
        pools: Its pools.
    """

    namespace: str
    model: str
    revision: str
    recorded: bool
    used_ns: int
    pools: tuple[PoolSurvey, ...]

    @property
    def pages(self) -> int:
        """Objects of all pools."""
        return sum(pool.pages for pool in self.pools)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(pool.file_bytes for pool in self.pools)


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


def chosen(root: Path, prefix: str) -> str:
    """Return the one namespace that begins with a prefix.

    Raises:
        NamespaceError: If none does, or several.
    """
    found = [name for name in namespaces(root) if name.startswith(prefix)]
    if len(found) == 1 and prefix:
        return found[0]
    what = f"{len(found)} namespaces begin" if found else "no namespace begins"
    raise NamespaceError(
        f"{what} with {prefix!r}", fix="`kvdock store ls ROOT` lists them."
    )


def survey(root: Path, namespace: str) -> NamespaceSurvey:
    """Count what a store holds of one namespace."""
    with namespace_of(root, namespace) as fd:
        record = b""
        with suppress(OSError):  # something else of its name
            record = paths.read_record(fd)
        listed = Neighbours(fd).bytes_of()
    fits = bool(record) and paths.fits(record, namespace)
    about = _about(record) if fits else {}
    totals = {folder: np.zeros(4, np.int64) for folder in listed}
    used_ns = 0
    for folder, _, contents in segments_of(root, namespace):
        live = contents.records["check"] != 0
        nbytes = int(contents.records["nbytes"][live].sum())
        one = [1, int(live.sum()), nbytes, len(contents.wrong_slots)]
        totals.setdefault(folder, np.zeros(4, np.int64))[:] += one
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
    """Read a record; nothing where another program's is no object of JSON."""
    with suppress(ValueError):
        found = json.loads(record)
        if isinstance(found, dict):
            return found
    return {}


def _pool_survey(
    folder: str, total: npt.NDArray[np.int64], file_bytes: int
) -> PoolSurvey:
    pool, _, object_bytes = folder.rpartition(".")
    segments, pages, stored_bytes, wrong_records = total.tolist()
    return PoolSurvey(
        pool=pool,
        object_bytes=int(object_bytes),
        segments=segments,
        pages=pages,
        stored_bytes=stored_bytes,
        file_bytes=file_bytes,
        wrong_records=wrong_records,
    )


def collect(
    root: Path,
    namespace: str,
    *,
    to_bytes: int | None = None,
    newer: bool = False,
    shared: bool = False,
) -> int:
    """Give back what crashed writers left, and the coldest pages if told to.

    Segments that nobody can read go as well, and in the end the namespace
    itself, if nothing is left in it and no store has it open.

    Args:
        root: The store's root directory.
        namespace: Its digest.
        to_bytes: Most bytes that the namespace may keep, or None.
        newer: Delete what a later version of kvdock has stored.
        shared: Accept a root that others own or may write.

    Returns:
        Bytes that came back.

    Raises:
        KvdockError: If others own the root or may write there.
    """
    freed = 0
    with namespace_of(root, namespace, shared=shared) as fd:
        kept_by = ownership.remembered(fd)
        neighbours = Neighbours(fd)
        for folder in neighbours.bytes_of():
            folder_fd = paths.open_folder(fd, folder)
            freed += sweep(folder_fd, kept_by, lost=True, newer=newer)
            os.close(folder_fd)
        if to_bytes is not None:
            freed += _shrink(root, namespace, fd, to_bytes)
    root_fd = paths.open_root(root, shared=shared, create=False)
    try:
        remove_empty(root_fd, namespace)
    finally:
        os.close(root_fd)
    return freed


def clear(root: Path, namespace: str, *, shared: bool = False) -> int:
    """Delete all pages of a namespace; return the bytes that came back.

    Args:
        root: The store's root directory.
        namespace: Its digest.
        shared: Accept a root that others own or may write.

    Raises:
        KvdockError: If others own the root or may write there.
    """
    with namespace_of(root, namespace, shared=shared) as fd:
        return clear_namespace(fd)


def _shrink(root: Path, namespace: str, fd: int, to_bytes: int) -> int:
    by_use = []
    for folder, name, contents in segments_of(root, namespace):
        live = contents.records["check"] != 0
        used = contents.used_ns[live]
        by_use.append((float(used.mean()) if len(used) else 0.0, folder, str(name)))
    begun = now = Neighbours(fd).usage_bytes()
    for _, folder, file in sorted(by_use):
        if now <= to_bytes:
            break
        if delete_unowned(fd, folder, file, ownership.remembered(fd)):
            now = Neighbours(fd).usage_bytes()
    return begun - now
