"""The observer that writes a journal.

An engine's thread only puts a record into a bounded queue; a thread of the journal
turns what waits there into lines and writes them in one call. A disk that is slow,
full or gone costs records, which are counted, and never an engine's time.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import msgspec

from kvdock.batch import Operation, Outcome
from kvdock.config import count, path, size
from kvdock.errors import KvdockError, SettingsError
from kvdock.events import (
    Event,
    HintAnswered,
    HostMemoryShared,
    LookupSkipped,
    Origin,
    PagesAnswered,
    PoolsAttached,
    PoolsDetached,
    StoreFilled,
)
from kvdock.journal.records import (
    ATTACHED,
    SUFFIX,
    JournalRecord,
    encode,
    journal_files,
    record_of_hint,
    record_of_host_memory,
    record_of_pages,
    record_of_pools,
    record_of_skipped,
)
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.observer import Observer
from kvdock.synchronization import ProcessGuard, new_condition
from kvdock.throttled_log import ThrottledLog, describe_error

log = logging.getLogger(__name__)

_REFUSED = int(Outcome.REFUSED)

_FULL = 0.95
"""Share of a store's limit at which what it refuses is put down to its room."""
_FILES = 8
"""Files that the size limit of a journal is divided into, for one that writes."""
_STEPS = 256
"""Of the limit: how much one writes before it looks again what all files take."""
_NAME = re.compile(r"(.*-[0-9]+-[0-9a-f]+)-[0-9]{6}\.jsonl")
"""A file that a journal has written, and by whom."""
_MOST_ATTACHMENTS = 64
"""Attachments that each new file begins with."""
_RETRY_S = 1.0
"""How long nothing is written after a write failed."""
_GATHER_S = 0.05
"""How long records are gathered before they are written: a thread that is woken for
each of them costs an engine more than the records."""
_END_S = 1.0
"""How long the end of the process waits for the last records."""
_DETACH_S = 0.25
"""The same of an attachment: an engine may end by force as soon as it is closed."""


@attrs.frozen(kw_only=True)
class JournalSettings:
    """Settings of the journal.

    Raises:
        SettingsError: If it may take less than one file of a useful size.
    """

    dir: Path = path(help="Directory of the journal's files; created if missing.")
    max_bytes: int = size(
        256 << 20, help="Most bytes of all its files; the oldest are deleted."
    )
    queue: int = count(
        1 << 18,
        least=1,
        help="Pages whose records may wait to be written; later ones are lost.",
    )

    def __attrs_post_init__(self) -> None:
        """Reject a limit under which every file would be deleted at once."""
        if self.max_bytes < 1 << 20:
            raise SettingsError(
                f"max_bytes {self.max_bytes} is less than 1 MiB",
                fix="Give the journal at least 1 MiB.",
            )


_Make = Callable[[], JournalRecord]
"""Makes a record of an event: not on the engine's thread."""


class Journal:
    """The hooks, the queue and the thread that empties it.

    Raises:
        KvdockError: If the directory cannot be made or written.
    """

    observes_pages = True
    observes_calls = False
    """Its load would pay for two events of each batch that it leaves out."""

    def __init__(self, settings: JournalSettings) -> None:
        self._settings = settings
        self._files = _Files(settings)
        self._lock, self._changed = new_condition()
        self._queue: deque[_Make] = deque()
        self._queued = 0
        self._dropped = 0
        self._full: set[str] = set()
        self._writing = False
        self._awaited = 0
        self._thread: threading.Thread | None = None
        self._guard = ProcessGuard()
        self._log = ThrottledLog(log)
        atexit.register(self.flush, _END_S)

    @hookimpl
    def kvdock_observe(self, event: Event, origin: Origin) -> None:
        """Note what became of pages, and which pools there are."""
        match event:
            case PagesAnswered():
                # The engine may use its arrays again.
                outcomes = event.outcomes.tobytes()
                refused = _REFUSED in outcomes and event.operation == Operation.PUT
                full = refused and event.backend in self._full and not event.held_back
                record = partial(
                    record_of_pages,
                    time.time(),
                    event,
                    origin,
                    tuple(event.hashes),
                    outcomes,
                    "full" if full else "",
                )
                self._add(record, max(1, len(outcomes)))
            case PoolsAttached():
                self._add(partial(record_of_pools, time.time(), event, origin))
            case PoolsDetached():
                self.flush(_DETACH_S)
            case LookupSkipped():
                self._add(partial(record_of_skipped, time.time(), event, origin))
            case HostMemoryShared(computed_tokens=computed) if computed:
                self._add(partial(record_of_host_memory, time.time(), event, origin))
            case HintAnswered():
                self._add(partial(record_of_hint, time.time(), event, origin))
            case StoreFilled(backend=backend):
                # A limit of one byte is that of an empty store without any room.
                full = 0 < event.limit_bytes * _FULL <= max(1, event.used_bytes)
                (self._full.add if full else self._full.discard)(backend)
            case _:
                pass

    def _add(self, make: _Make, pages: int = 1) -> None:
        if self._guard.forked:
            return  # the thread and the file are the parent's
        with self._lock:
            size = self._queued + pages
            if self._queue and size > self._settings.queue:
                self._dropped += 1
                return
            self._queue.append(make)
            first, self._queued = not self._queued, size
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvdock-journal", daemon=True
                )
                self._thread.start()
            if first or self._soon():
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all records are written; return whether they are."""
        if self._guard.forked:
            return True
        with self._lock:
            self._awaited += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: not self._queue and not self._writing, timeout_s
                )
            finally:
                self._awaited -= 1

    def _soon(self) -> bool:
        """Return whether to write before the time to gather is over."""
        return self._awaited > 0 or self._queued > self._settings.queue // 2

    def _run(self) -> None:
        while True:
            with self._lock:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue)
                self._changed.wait_for(self._soon, _GATHER_S)
                taken, self._queue, self._queued = list(self._queue), deque(), 0
                dropped, self._dropped = self._dropped, 0
                self._writing = True
            try:
                self._write(taken, dropped)
            except Exception as error:  # noqa: BLE001 - it must never end
                with self._lock:
                    self._dropped += len(taken) + dropped
                what = f"the journal loses records: {describe_error(error)}"
                self._log.warning("journal", what, error)
                time.sleep(_RETRY_S)

    def _write(self, taken: Sequence[_Make], dropped: int) -> None:
        records = [make() for make in taken]
        records[0] = msgspec.structs.replace(records[0], dropped=dropped)
        for record in records:
            if record.operation == ATTACHED:
                self._files.note(record)
        lost = self._files.write(records, records[0].rank)
        with self._lock:
            self._dropped += lost


class _Files:
    """The files of one process, and the limit over all in the directory."""

    def __init__(self, settings: JournalSettings) -> None:
        self._dir, self._most = settings.dir, settings.max_bytes
        try:
            self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise KvdockError(
                f"the journal's directory {self._dir} cannot be made: {error.strerror}",
                fix="Choose another observers.journal.dir.",
            ) from error
        if not os.access(self._dir, os.W_OK | os.X_OK):
            raise KvdockError(
                f"the journal's directory {self._dir} cannot be written",
                fix="Give this user the right, or choose another "
                "observers.journal.dir.",
            )
        self._began = f"{os.getpid()}-{time.time_ns():x}"
        self._number = 0
        self._file = -1
        self._path: Path | None = None
        self._left = 0
        self._unseen = 0
        self._torn = False
        self._attached: dict[tuple[str, str], JournalRecord] = {}

    def note(self, record: JournalRecord) -> None:
        """Keep an attachment, for the files to come."""
        self._attached.pop(key := (record.namespace, record.rank), None)
        self._attached[key] = record
        while len(self._attached) > _MOST_ATTACHMENTS:
            self._attached.pop(next(iter(self._attached)))

    def write(self, records: Sequence[JournalRecord], rank: str) -> int:
        """Append records in one call; begin a new file if one is full.

        Returns:
            How many are larger than a file, and lost.

        Raises:
            OSError: If it cannot.
        """
        if not self._linked():
            self._begin(rank)
        lines = encode(records)
        if len(lines) <= min(self._left, self._most // _STEPS):
            self._append(lines)
            return 0
        lost = 0
        for line in lines.splitlines(keepends=True):
            if len(line) > self._most // _FILES:
                lost += 1
                continue
            if len(line) > self._left:
                self._begin(rank)
            self._append(line)
        return lost

    def _linked(self) -> bool:
        """Return whether its file is still there: other writers delete the oldest."""
        return self._file >= 0 and os.fstat(self._file).st_nlink > 0

    def _append(self, lines: bytes) -> None:
        if not lines:
            return
        if self._torn:
            lines = b"\n" + lines  # what a failed write began is no record
        self._torn = True
        self._unseen += len(lines)
        if self._unseen >= self._most // _STEPS:
            self._delete_oldest(len(lines))
        while lines:
            done = os.write(self._file, lines)
            lines = lines[done:]
            self._left -= done
        self._torn = False

    def _begin(self, rank: str) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._number += 1
        name = f"{rank}-{self._began}-{self._number:06d}{SUFFIX}"
        self._path = self._dir / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._torn = False
        self._append(encode(list(self._attached.values())))
        self._left = self._most // _FILES // self._delete_oldest(0)

    def _delete_oldest(self, more: int) -> int:
        """Delete the oldest files, so that all of them and `more` are in the limit.

        Files of others are deleted while they write to them as well, so that many of
        them together keep it. They begin new ones.

        Returns:
            How many have written the files that were there.
        """
        self._unseen = 0
        left = self._most - self._most // _FILES - more
        mine = [one for one in journal_files(self._dir) if _NAME.fullmatch(one.name)]
        # Its own file counts first, and stays; then the newest ones.
        mine.sort(key=lambda one: one == self._path)
        for one in reversed(mine):
            with suppress(OSError):  # another process was faster
                left -= one.stat().st_size
                if left < 0 and one != self._path:
                    one.unlink()
        return len({_NAME.sub(r"\1", one.name) for one in mine})


observer = Observer(
    name="journal",
    summary="a file of what became of each page, for `kvdock why`",
    settings=JournalSettings,
    build=Journal,
)
