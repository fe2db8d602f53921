"""Find out whether the master is there, without asking the library.

The library waits for a master that is away: up to 90 s when it joins, and some
1.5 x `rpc_timeout_s` in every call. A socket is refused in no time.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import KvdockError
from kvdock_mooncake.settings import split_address

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

_CONNECT_S = 2.0
_LOOK_S = 0.25
_LOOK_EVERY_S = 0.5
_LOOK_EVERY_MOST_S = 8.0

_ETCD = "etcd://"


class ClusterError(KvdockError):
    """The Mooncake cluster cannot be joined."""


@attrs.define(eq=False)
class Master:
    """The address of a master, or of a standalone client.

    Args:
        address: "host:port", or "etcd://host:port;host:port" for the
            leader; other addresses with a scheme are not looked at.
        standalone: Whether a standalone client is to be found there.
    """

    address: str
    standalone: bool = False
    _lost: bool = attrs.field(default=False, init=False)
    _pause_s: float = attrs.field(default=0.0, init=False)
    _look_at: float = attrs.field(default=0.0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def of(cls, settings: MooncakeSettings) -> Master:
        """Return what a process with these settings joins."""
        return cls(settings.standalone or settings.master, bool(settings.standalone))

    @property
    def what(self) -> str:
        """Return what is to be found there."""
        if self.standalone:
            return "Mooncake standalone client"
        return "etcd" if self.address.startswith(_ETCD) else "Mooncake master"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that can be looked at: one of them has to answer."""
        if self.address.startswith(_ETCD):
            rest = self.address.removeprefix(_ETCD)
            return tuple(filter(None, re.split("[;,]", rest)))
        return () if "://" in self.address else (self.address,)

    def connect(self, within_s: float = _CONNECT_S) -> None:
        """Connect to it once."""
        places = [split_address(one) for one in self.addresses]
        until = time.monotonic() + within_s
        failed: OSError | None = None
        for left, place in zip(range(len(places), 0, -1), places, strict=True):
            share_s = max(0.01, (until - time.monotonic()) / left)
            try:
                socket.create_connection(place, share_s).close()
            except OSError as error:
                failed = error
            else:
                return
        if failed:
            program, setting = "mooncake_master", "`master` (MOONCAKE_MASTER)"
            if self.standalone:
                program, setting = "mooncake_client", "`standalone` (MOONCAKE_CLIENT)"
            elif self.what == "etcd":
                program = "etcd"
            raise ClusterError(
                f"no {self.what} answers at {self.address}: "
                f"{failed.strerror or failed}",
                fix=f"Start {program} there, or correct {setting}.",
            ) from failed

    def answers(self, within_s: float = _CONNECT_S) -> bool:
        """Return whether something listens there."""
        try:
            self.connect(within_s)
        except KvdockError:
            return False
        return True

    def mark_down(self) -> None:
        """Note that a call waited for it in vain."""
        with self._lock:
            if not self._lost:
                # One that listens and never answers is tried less and less.
                longer = min(2 * self._pause_s, _LOOK_EVERY_MOST_S)
                self._pause_s = max(longer, _LOOK_EVERY_S)
                self._look_at = time.monotonic() + self._pause_s
                self._lost = True

    def mark_up(self) -> None:
        """Note that a call was answered."""
        if self._pause_s:
            with self._lock:
                self._pause_s, self._lost = 0.0, False

    def is_down(self) -> bool:
        """Return whether a call would wait in vain; look now and then."""
        if not self._lost:
            return False
        with self._lock:
            if time.monotonic() < self._look_at:
                return True
            # Meanwhile other threads get the last result.
            self._look_at = time.monotonic() + _LOOK_EVERY_S
        if not self.answers(_LOOK_S):
            return True
        self._lost = False
        return False
