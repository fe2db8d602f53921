"""Walk over the namespaces, pools and segments of a store on disk.

Everything that looks at a store without opening it goes this way. It reads files only,
so it finds what a new process would find.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs
import numpy as np

from kvdock.arrays import BoolArray
from kvdock.errors import KvdockError, NamespaceError
from kvdock_segments import paths
from kvdock_segments.format import (
    RECORD_BYTES,
    RECORDS_AT,
    key_digests,
    key_seed,
    slots_of,
)
from kvdock_segments.index_file import IndexContents, open_index, read_contents
from kvdock_segments.paths import IndexName, closing_fd, data_segment


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


@attrs.frozen(kw_only=True, eq=False)
class StoredSegment:
    """A segment whose index file can be read, and that has a file of pages.

    Args:
        home: The folder of its namespace.
        folder: Name of its pool's folder.
        contents: Its index file as it was read.
        index_fd: That file, open until the walk goes on.
        data_fd: The file of pages, open until then.
    """

    home: Path
    folder: str
    name: IndexName
    contents: IndexContents
    index_fd: int
    data_fd: int

    @property
    def live(self) -> BoolArray:
        """Which slots hold an object, bool (slots,)."""
        live: BoolArray = self.contents.records["check"] != 0
        return live

    def location(self, slot: int) -> Location:
        """Return the location of the object in one slot."""
        pool = paths.parse_pool_folder(self.folder)
        return Location(
            pool=pool[0] if pool else self.folder,
            path=self.home / self.folder / self.name.data,
            offset=slot * self.contents.slot_bytes,
            nbytes=self.contents.object_bytes,
            slot_bytes=self.contents.slot_bytes,
            checksum=int(self.contents.records["checksum"][slot]),
            record_path=self.home / self.folder / str(self.name),
            record_offset=RECORDS_AT + slot * RECORD_BYTES,
        )


@attrs.define
class ListedSegment:
    """The files of a segment, as its folder lists them.

    Args:
        name: Its index file; None if it has none.
        changed_ns: When that was changed. What is read or stored is noted there within
            ten seconds, so it is the time of use as well.
        slots: Number of slots that it has room for.
        data_bytes: Size of the file of pages.
        nbytes: Bytes of all files; those that belong to no segment count as one.
    """

    name: IndexName | None = None
    changed_ns: int = 0
    slots: int = 0
    data_bytes: int = 0
    nbytes: int = 0


def namespaces(root: Path) -> Iterator[tuple[str, int]]:
    """Open the namespaces of a root one after the other.

    Yields:
        Digest and descriptor of each, closed before the next one is opened. What cannot
        be opened, or is deleted meanwhile, is left out.
    """
    with (
        suppress(OSError, KvdockError),
        closing_fd(paths.open_root(root, shared=True, create=False)) as root_fd,
    ):
        for name in paths.namespaces_in(root_fd):
            with (
                suppress(OSError),
                closing_fd(paths.open_folder(root_fd, name)) as namespace,
            ):
                yield name, namespace


def pools(
    namespace_fd: int, ignored: type[OSError] = FileNotFoundError
) -> Iterator[tuple[str, int]]:
    """Open the folders of a namespace one after the other.

    Yields:
        Name and descriptor of each, closed before the next one is opened; those that
        cannot be opened for an `ignored` reason are left out.
    """
    for name in paths.pool_folders(namespace_fd):
        with (
            suppress(ignored),
            closing_fd(paths.open_folder(namespace_fd, name)) as folder,
        ):
            yield name, folder


def list_segments(folder: int) -> Iterable[ListedSegment]:
    """List the segments of a folder with the sizes of their files; opens none."""
    listed: dict[int | None, ListedSegment] = defaultdict(ListedSegment)
    with paths.listing(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                size, name = status.st_size, IndexName.parse(entry.name)
                number = name.segment if name else data_segment(entry.name)
                segment = listed[number]
                segment.nbytes += size
                if name:
                    segment.name, segment.changed_ns = name, status.st_mtime_ns
                    segment.slots = slots_of(size)
                else:
                    segment.data_bytes = size
    return listed.values()


def names_in(folder: int) -> list[str]:
    """Return the names of all files of a folder, sorted."""
    with paths.listing(folder) as entries:
        return sorted(entry.name for entry in entries)


def index_names(folder: int) -> list[IndexName]:
    """Return the index files of a folder, those in creation too."""
    return [name for name in map(IndexName.parse, names_in(folder)) if name]


@contextmanager
def namespace_of(root: Path, namespace: str, *, shared: bool = True) -> Iterator[int]:
    """Open a namespace's folder as a context; the value is the descriptor.

    Raises:
        NamespaceError: If the namespace does not exist, or a folder of it is
            deleted meanwhile.
        KvdockError: If the operating system denies access.
    """
    paths.check_namespace(namespace)
    with closing_fd(paths.open_root(root, shared=shared, create=False)) as root_fd:
        try:
            with closing_fd(paths.open_folder(root_fd, namespace)) as fd:
                yield fd
        except FileNotFoundError as error:
            raise NamespaceError(
                f"namespace {namespace[:12]} of store {str(root)!r} is not there, or "
                f"goes just now ({error.filename})",
                fix="`kvdock store ls ROOT` lists what is there.",
            ) from error
        except OSError as error:
            raise KvdockError(
                f"namespace {namespace[:12]} of store {str(root)!r} cannot be worked "
                f"on: {error.strerror or error} ({error.filename})",
                fix="Run this as the user who owns the store, where its file system "
                "can be written.",
            ) from error


def segments(
    root: Path,
    namespace: str,
    *,
    shared: bool = True,
    write: bool = False,
    broken: Callable[[Path, OSError | None], object] = lambda *_: None,
) -> Iterator[StoredSegment]:
    """Read the segments of a namespace; none of one that is not there.

    Args:
        root: The root directory of the store.
        namespace: Its digest.
        shared: Accept a root that others own or may write.
        write: Open index files for writing as well.
        broken: Called with the path of each index file that cannot be read or has no
            file of pages, and with the error, if it is one of the system.
    """
    opened = namespace_of(root, namespace, shared=shared)
    with suppress(NamespaceError), opened as fd:
        for pool, folder in pools(fd):
            for name in index_names(folder):
                if name.state == "new":
                    continue
                with ExitStack() as files:
                    contents = problem = None
                    try:
                        index_fd = files.enter_context(
                            closing_fd(open_index(folder, str(name), write=write))
                        )
                        data_fd = files.enter_context(
                            closing_fd(paths.open_file(folder, name.data, os.O_RDONLY))
                        )
                        contents = _settled(index_fd, name, data_fd)
                    except OSError as error:
                        problem = error
                    if contents is not None:
                        yield StoredSegment(
                            home=root / namespace,
                            folder=pool,
                            name=name,
                            contents=contents,
                            index_fd=index_fd,
                            data_fd=data_fd,
                        )
                    # It may have been recycled, or deleted, since it was listed.
                    elif paths.status_of(folder, str(name)):
                        broken(root / namespace / pool / str(name), problem)


def _settled(fd: int, name: IndexName, data_fd: int) -> IndexContents | None:
    """Read an index file; again if a record may just be written."""
    contents = read_contents(fd, name, os.fstat(data_fd).st_size)
    if contents is not None and len(contents.corrupt_slots):
        return read_contents(fd, name, os.fstat(data_fd).st_size)
    return contents


def locate(root: Path, key: str) -> tuple[Location, ...]:
    """Find every copy of an object.

    Damage its bytes through `path` and `offset` to see a read miss. `key` is the whole
    key: namespace digest, page hash, suffix.

    Raises:
        NamespaceError: If the key does not begin with a namespace.
    """
    namespace = paths.check_namespace(key.partition("/")[0])
    low, high = key_digests([key], key_seed(namespace))[0]
    return tuple(
        segment.location(slot)
        for segment in segments(root, namespace)
        for slot in np.flatnonzero(
            (segment.contents.records["key_low"] == low)
            & (segment.contents.records["key_high"] == high)
            & segment.live
        ).tolist()
    )
