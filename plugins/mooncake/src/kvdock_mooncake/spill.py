"""The directory into which one rank's segment spills.

Measured with 0.3.13: an owner that was killed and is back before the master
has given up its old self (client_ttl, 10 s) loses every object on its disk;
one that comes back later, or that left properly, finds all of them again. So
the directory remembers how its last owner ended.
"""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import attrs

from kvdock.errors import SettingsError
from kvdock_mooncake.disk_watch import DiskWatch

if TYPE_CHECKING:
    from kvdock import Shard
    from kvdock_mooncake.settings import MooncakeSettings

log = logging.getLogger("kvdock")

_IN_USE = "in use"


def owner_of(process: str, shard: Shard) -> str:
    """Return the configured name of a process, or one of its shard."""
    return process or f"pp{shard.pp_rank}-tp{shard.tp_rank}-cp{shard.cp_rank}"


@attrs.define(eq=False)
class SpillDirectory:
    """A directory that this process alone spills into.

    Args:
        path: The directory, absolute and free of links.
        lost: Whether its last owner ended without leaving the cluster.
    """

    path: str
    lost: bool
    _lock: IO[str]
    disk: DiskWatch = attrs.field(init=False)
    _settled: bool = attrs.field(default=False, init=False)

    @disk.default
    def _disk_of_the_path(self) -> DiskWatch:
        return DiskWatch(self.path)

    @classmethod
    def claim(cls, settings: MooncakeSettings, owner: str) -> SpillDirectory:
        """Make the directory of a process and lock it.

        Two that share one would each count the other's bytes as their own. `owner` is
        the process's name among all that have the same settings.
        """
        folder = Path(settings.ssd_path) / owner
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not inside the directory: the library reads whatever lies in it.
            lock = folder.with_name(f"{owner}.lock").open("a+", encoding="ascii")
        except OSError as error:
            raise SettingsError(
                f"ssd_path {folder} cannot be made: {error.strerror}"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise SettingsError(
                f"another process spills into {folder}",
                fix="Give each process an ssd_path of its own.",
            ) from error
        lock.seek(0)
        return cls(str(folder.resolve()), lock.read() == _IN_USE, lock)

    def wait_for_previous_owner(self, client_ttl_s: float) -> None:
        """Wait until the master has given up a lost owner; mark it in use."""
        if self.lost:
            log.warning(
                "the last owner of %s was lost: waiting %g s for the master "
                "to notice, or its objects would be lost as well",
                self.path,
                client_ttl_s,
            )
            time.sleep(client_ttl_s)
        self._write(_IN_USE)
        self._settled = True
        self.disk.start()

    def mark_clean(self) -> None:
        """Note that its owner has left the cluster properly."""
        self.disk.stop()
        if self._settled:
            self._write("")
        self._lock.close()

    def _write(self, word: str) -> None:
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(word)
        self._lock.flush()
