"""The records of a journal: JSON, one line each, in files that are rotated.

A record has page hashes, never tokens or salts. A file begins with what is known
of the attachments that write to it, so that it can be read without those before
it. The last line of a process that was killed may be torn: it is left out.
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar

import msgspec
import numpy as np

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.pools.enums import HitPolicy

if TYPE_CHECKING:
    from kvdock.events import (
        HintAnswered,
        HostMemoryShared,
        LookupSkipped,
        Origin,
        PagesAnswered,
        PoolsAttached,
    )

VERSION = 1
SUFFIX = ".jsonl"
HASH_CHARS = 16
"""Characters of a page hash that are kept, its last ones: 64 bits tell the pages of a
journal apart, and each byte costs an engine time."""
ATTACHED = "attached"
"""What a record of an attachment has as its operation."""
HINT = "hint"
"""What a record of a hint that was answered has as its operation."""
SKIPPED = "skipped"
"""What a record of a lookup that the engine left out has as its operation."""

MOST_LINE_BYTES = 64 << 20
"""Bytes of a line; what is longer is no record, and is passed over."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Time = Annotated[float, msgspec.Meta(ge=0, lt=2**32)]
_ENCODER = msgspec.json.Encoder()
_NAMES = MappingProxyType({int(one): one.name.lower() for one in Outcome})


class JournalPool(msgspec.Struct, frozen=True):
    """A pool of an attachment, as far as the evaluation of prefixes needs it."""

    physical: ClassVar[bool] = True
    name: str
    kind: str = ""
    anchor: bool = False
    required: bool = True
    draft: bool = False
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: _Count = 0
    block_pages: _Count = 0
    group_pages: _Count = 0
    engine_hits: bool = False
    slice_name: str = ""


class JournalRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a journal.

    Args:
        at_s: When, in seconds since 1970.
        operation: "exists", "get", "put", "clear", "retain" where the time of stored
            pages was changed, "attached", "hint", or "skipped" where the engine did
            not ask storage.
        rank: The process among those of its deployment.
        request: The engine's request, "" where it is not known.
        held_back: Why no backend was asked, see `kvdock.events.PagesAnswered` and
            `LookupSkipped`; "full" where one had no room when it was last asked.
        slice_name: Which part of each page it is about, as a coordinate.
        pages: The last 16 characters of each page hash, one after the other; with
            blanks between them if some are shorter. One text costs a fifth of what a
            list of them does.
        outcomes: How they ended, as (outcome, pages) in their order.
        pools: Of an attachment: its pools.
        refused: Of an attachment: name of each pool that is not stored to why.
        record: Of an attachment: what its namespace covers. Of a prefix that host
            memory had no room for: its "rows", and the "pages" that were needed.
        expire_at: From when on stored pages are not served, in seconds since 1970.
        max_age_s: Of an attachment: how long pages are served that say no time.
        action: Of a hint: its type and the client's id of it; `outcomes` has what
            became of the action, or of its pages.
        dropped: Records that were lost before this one, because they came faster
            than they could be written.
    """

    version: int
    at_s: _Time
    operation: str
    namespace: str
    rank: str = "0"
    request: str = ""
    backend: str = ""
    pool: str = ""
    held_back: str = ""
    slice_name: str = ""
    pages: str = ""
    outcomes: tuple[tuple[str, _Count], ...] = ()
    pools: tuple[JournalPool, ...] = ()
    refused: Mapping[str, str] = {}
    record: Mapping[str, Any] = {}
    action: tuple[str, str] = ("", "")
    dropped: _Count = 0
    expire_at: _Count = 0
    max_age_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def names(self) -> list[str]:
        """Return what is kept of each page hash."""
        text, width = self.pages, HASH_CHARS
        if " " in text or len(text) < width:
            return text.split()
        return [text[at : at + width] for at in range(0, len(text), width)]

    def each(self) -> Iterator[tuple[str, str]]:
        """Yield the hash and the outcome of every page."""
        outcomes = itertools.chain.from_iterable(
            itertools.repeat(outcome, pages) for outcome, pages in self.outcomes
        )
        return zip(self.names(), outcomes, strict=False)


def record_of_pages(
    at_s: float,
    event: PagesAnswered,
    origin: Origin,
    hashes: Sequence[str],
    outcomes: bytes,
    held_back: str = "",
) -> JournalRecord:
    """Describe what became of pages; `outcomes` has a byte for each."""
    who = (origin.namespace, origin.rank, event.request, event.backend, event.pool)
    why = (held_back or event.held_back, event.slice_name)
    pages = (_cut(hashes), _runs(outcomes))
    operation, end = event.operation.value, event.expire_at
    return JournalRecord(VERSION, at_s, operation, *who, *why, *pages, expire_at=end)


def record_of_pools(at_s: float, event: PoolsAttached, origin: Origin) -> JournalRecord:
    """Describe an attachment."""
    return JournalRecord(
        VERSION, at_s, ATTACHED, origin.namespace, origin.rank,
        pools=tuple(
            JournalPool(
                name=pool.name,
                kind=str(pool.kind),
                anchor=pool.anchor,
                required=pool.required and not pool.draft,
                draft=pool.draft,
                hit_policy=pool.hit_policy,
                window_pages=pool.window_pages,
                block_pages=pool.block_pages,
                group_pages=pool.group_pages,
                engine_hits=pool.engine_hits,
                slice_name=event.slice_names.get(pool.name, ""),
            )
            for pool in event.pools
        ),
        refused=event.refused, record=event.record, max_age_s=event.max_age_s,
    )  # fmt: skip


def record_of_skipped(
    at_s: float, event: LookupSkipped, origin: Origin
) -> JournalRecord:
    """Describe a lookup that the engine left out."""
    who = (origin.namespace, origin.rank, event.request)
    return JournalRecord(VERSION, at_s, SKIPPED, *who, held_back=event.reason)


def record_of_host_memory(
    at_s: float, event: HostMemoryShared, origin: Origin
) -> JournalRecord:
    """Describe a prefix that was not loaded as a whole."""
    who = (origin.namespace, origin.rank, event.request)
    sizes = {"rows": event.rows, "pages": event.pages}
    why = "host_memory"
    return JournalRecord(VERSION, at_s, SKIPPED, *who, held_back=why, record=sizes)


def record_of_hint(at_s: float, event: HintAnswered, origin: Origin) -> JournalRecord:
    """Describe how a hint was answered."""
    return JournalRecord(
        version=VERSION,
        at_s=at_s,
        operation=HINT,
        namespace=origin.namespace,
        rank=origin.rank,
        request=event.request,
        pool=event.pool,
        outcomes=((event.outcome, 1),) if event.outcome else (*event.pages.items(),),
        action=(event.action, event.action_id),
    )


def _cut(hashes: Sequence[str]) -> str:
    """Return the ends of page hashes."""
    # Those of one call are of one length, as one function has made them.
    width, text = len(hashes[0]) if hashes else 0, "".join(hashes)
    equal = len(text) == width * len(hashes) and text.isascii()
    if width < HASH_CHARS or not equal:
        return " ".join(one[-HASH_CHARS:] for one in hashes)
    rows = np.frombuffer(text.encode(), np.uint8).reshape(-1, width)
    return rows[:, -HASH_CHARS:].tobytes().decode()


def _runs(outcomes: bytes) -> tuple[tuple[str, int], ...]:
    """Return the outcomes as runs of equal ones."""
    if outcomes and outcomes.count(outcomes[:1]) == len(outcomes):
        return ((_NAMES[outcomes[0]], len(outcomes)),)
    codes = np.frombuffer(outcomes, np.uint8)
    ends = np.flatnonzero(np.diff(codes, append=np.uint8(255)))
    sizes = np.diff(ends, prepend=-1).tolist()
    return tuple(
        (_NAMES[code], size)
        for code, size in zip(codes[ends].tolist(), sizes, strict=True)
    )


def encode(records: Sequence[JournalRecord]) -> bytes:
    """Return the lines of some records."""
    return _ENCODER.encode_lines(records)


def journal_files(folder: Path) -> list[Path]:
    """Return the files of a journal, oldest first.

    Raises:
        KvdockError: If there is none.
    """
    found = []
    try:
        for path in folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # it was rotated away meanwhile
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime_ns, path))
    except OSError as error:
        raise KvdockError(f"{folder} cannot be read: {error.strerror}") from error
    if not found:
        raise KvdockError(
            f"{folder} holds no journal",
            fix='Switch it on: core.observers = ["journal"] and observers.journal.dir.',
        )
    return [path for _, path in sorted(found)]


def read_journal(folder: Path) -> Iterator[JournalRecord]:
    """Yield the records of a journal, file by file.

    Lines that are torn, damaged or of another version are left out.

    Raises:
        KvdockError: If the folder has no journal.
    """
    decoder = msgspec.json.Decoder(JournalRecord)
    for path in journal_files(folder):
        try:
            with path.open("rb") as file:
                for line in _lines(file):
                    try:
                        record = decoder.decode(line)
                    except ValueError:  # UTF-8 that is damaged is one as well
                        continue
                    if record.version == VERSION:
                        yield record
        except OSError:
            continue  # it was rotated away meanwhile, or its disk fails


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that have an end, but those that are too long."""
    whole = True
    while line := file.readline(MOST_LINE_BYTES):
        ends = line.endswith(b"\n")
        if whole and ends:
            yield line
        whole = ends
