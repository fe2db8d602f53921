"""`kvdock store` on a directory of segment files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.config import structure
from kvdock.errors import KvdockError, NamespaceError, SettingsError
from kvdock.namespace import RECORD_NAME, load_record
from kvdock_segments import inspect
from kvdock_segments.copies import SegmentReceiver, receiver, stored_pages
from kvdock_segments.limits import StoreLocation
from kvdock_segments.paths import earlier_now_ns
from kvdock_segments.room import tenants_in
from kvdock_segments.verify import verify_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Self

    from kvdock.capacity import TenantUse
    from kvdock.config.tenants import Tenants
    from kvdock.stores import NamespaceSurvey, PageReceiver, StoredPage, Verified
    from kvdock_segments.settings import SegmentSettings


@attrs.frozen
class DirectoryStore:
    """The namespaces below a root directory: a `kvdock.stores.Store`.

    Backends on segments return it from their entry point of `kvdock.stores`.

    Args:
        shared: Accept one that others own or may write.
        settings: Of what is copied there; without them nothing limits it.
    """

    root: Path
    shared: bool = False
    settings: SegmentSettings | None = None

    @classmethod
    def open(
        cls,
        target: str,
        given: Mapping[str, object],
        backend: str,
        settings: type[SegmentSettings],
    ) -> Self | None:
        """Open a directory; None for a URL.

        `target` is what the user names; `given` are settings of the backend.

        Raises:
            SettingsError: If a setting is unknown or of the wrong kind, or there is
                no path.
        """
        if "://" in target:
            return None
        if not target.strip():
            # Where a root is optional, no text would be none.
            raise SettingsError(
                f"{target!r} is not a path", fix="Name the root of a backend."
            )
        where = f"backend {backend!r}"
        found = structure(settings, {**given, "root": target}, where=where)
        return cls(found.root, found.shared_root, found)

    def namespaces(self) -> tuple[str, ...]:
        """Return the digests of the namespaces, sorted.

        Raises:
            SettingsError: If the directory is missing, or holds other things only.
        """
        found = inspect.namespaces(self.root) if self.root.is_dir() else ()
        if not found:
            self._check_store()
        return found

    def now_ns(self) -> int:
        """Return the time by this host's clock, or its file system's if earlier."""
        return earlier_now_ns(self.root)

    def room(self, tenants: Tenants) -> Mapping[str, TenantUse]:
        """Count what tenants take, in all namespaces."""
        self.namespaces()
        return tenants_in(self.root, tenants)

    def _check_store(self) -> None:
        """Raise unless a directory without namespaces is an empty store."""
        where = f"{self.root} is not a store"
        if not self.root.is_dir():
            why = "it is not a directory" if self.root.exists() else "it is missing"
            raise SettingsError(f"{where}: {why}", fix="Name the root of a backend.")
        if (self.root / RECORD_NAME).is_file():
            raise SettingsError(
                f"{where}: it is one namespace of {self.root.parent}",
                fix=f"Name {self.root.parent}, and {self.root.name[:12]} as namespace.",
            )
        try:
            others = [one for one in self.root.iterdir() if one.name[:1] != "."]
        except OSError as error:
            raise SettingsError(
                f"{self.root} cannot be read: {error.strerror or error}",
                fix="Run this as the user of the engine.",
            ) from error
        if others:
            raise SettingsError(
                f"{where}: it holds {len(others)} other files or directories, such as "
                f"{min(others).name}, and no namespace",
                fix="Name the root of a backend.",
            )

    def pages(
        self, namespace: str, keys: Sequence[str] = (), *, expiring: bool = False
    ) -> Iterator[StoredPage]:
        """Yield the objects of a namespace."""
        return stored_pages(self.root, namespace, keys, expiring=expiring)

    def receive(
        self, namespace: str, record: bytes
    ) -> AbstractContextManager[PageReceiver]:
        """Open the store, new or not, for objects that are copied to it."""
        return self._receiver(namespace, record)

    def _receiver(
        self, namespace: str, record: bytes
    ) -> AbstractContextManager[SegmentReceiver]:
        place = StoreLocation(
            root=self.root,
            namespace=namespace,
            pool="",
            object_bytes=(),
            record=record,
            shared=self.shared,
        )
        return receiver(place, self.settings)

    def record(self, namespace: str) -> Mapping[str, object]:
        """Return the record of a namespace; empty if none is there that fits."""
        with suppress(NamespaceError):
            return load_record(self.root / namespace)
        return {}

    def finder(self, namespace: str) -> Callable[[Sequence[str]], Sequence[bool]]:
        """Return what says which of some keys are stored, as the store is now."""
        return inspect.finder(self.root, namespace)

    def survey(self, namespace: str) -> NamespaceSurvey:
        """Count what is held of a namespace."""
        return inspect.describe_namespace(self.root, namespace)

    def verify(
        self,
        namespace: str,
        progress: Callable[[int], None] | None = None,
        *,
        heal: bool = False,
    ) -> Verified:
        """Read every page of a namespace and compare its checksum."""
        return verify_namespace(
            self.root, namespace, progress, heal=heal, shared=self.shared
        )

    def collect(
        self,
        namespace: str,
        *,
        to_bytes: int | None = None,
        older_s: float | None = None,
        newer: bool = False,
    ) -> int:
        """Delete what crashed writers left, and the coldest pages if asked to.

        What has expired is overwritten first, unless an engine is writing beside it:
        that engine does it.

        Raises:
            KvdockError: If pages are to be deleted by their age.
        """
        if older_s is not None:
            raise KvdockError(
                f"{self.root} deletes by use and not by age",
                fix="Give --to with the bytes that may stay, or set the quota of the "
                "backend.",
            )
        pools = self.survey(namespace).pools
        if any(one.expiring for one in pools):
            with self._receiver(namespace, b"") as opened:
                opened.erase_expired(pools)
        return inspect.gc(
            self.root, namespace, to_bytes=to_bytes, newer=newer, shared=self.shared
        )

    def in_use(self, namespace: str) -> str:
        """Say why a process may have a namespace open; "" if none has."""
        return inspect.in_use(self.root, namespace)

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        """Delete all pages of a namespace; return the bytes that were freed."""
        return inspect.clear(self.root, namespace, unused=unused, shared=self.shared)
