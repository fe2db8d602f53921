"""What a plugin's author knows about where the bytes lie.

An oracle bypasses the plugin: it peeks at stored bytes and damages them
without the plugin, and takes the whole store away. With one, the kit shows that
damage is a miss and never another page's bytes, and an absent store is one in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

Fails = Callable[[str], bool]
"""From the name of a place to whether a write there fails now."""


class Oracle:
    """Override what your store allows; what is left out is skipped.

    `kvdock check` finds that of a distribution by its entry point in `kvdock.oracles`.
    """

    def small(self, folder: Path) -> Mapping[str, object] | None:
        """Return the settings of a store with room for less than 100 MiB.

        Used where no such settings are given; None if there is no such store.

        Args:
            folder: An empty folder that is new for each test.
        """
        del folder
        return None

    def peek(self, key: str) -> bytes | None:
        """Return the stored bytes of an object without any framing, or None."""
        raise NotImplementedError("peek")

    def poke(self, key: str, offset: int, data: bytes) -> None:
        """Overwrite some of an object's stored bytes in place."""
        raise NotImplementedError("poke")

    def resize(self, key: str, nbytes: int) -> None:
        """Cut an object's bytes short, or append bytes, in the store itself."""
        raise NotImplementedError("resize")

    def swap(self, key: str, other: str) -> None:
        """Let two objects change places, with whatever frames them."""
        raise NotImplementedError("swap")

    def remove(self, key: str) -> None:
        """Remove an object without the plugin."""
        raise NotImplementedError("remove")

    def failing(
        self, store: object, part: str, fails: Fails
    ) -> AbstractContextManager[None]:
        """Let writes of a pool's store fail with EIO while a block runs.

        For backends that keep files.

        Args:
            store: What `kvdock_register_pool` returned.
            part: "data" for the bytes of objects, "index" for what says where they
                lie.
            fails: Called once for each object that is written, with a name of the
                place that its bytes, or its record, go to.
        """
        raise NotImplementedError("let writes fail")

    def frozen(self) -> AbstractContextManager[None]:
        """Let the store answer nothing while a block runs, as a stopped process does.

        Of a server its process, of files their mount. A call that your store cannot
        have is declined by raising NotImplementedError with the reason, as here; a
        fault that is declined is not proven.
        """
        raise NotImplementedError("freeze the store")

    def refusing(self) -> AbstractContextManager[None]:
        """Let the store answer each call with an error while a block runs."""
        raise NotImplementedError("let the store refuse")

    def stopped(self) -> AbstractContextManager[None]:
        """End what holds the pages while a block runs; start it again after it.

        Killed and not asked to end: what must outlive that is `durability` of "host"
        and "cluster".
        """
        raise NotImplementedError("stop the store")

    def halved(self) -> AbstractContextManager[None]:
        """Take some of several servers, disks or mounts away while a block runs."""
        raise NotImplementedError("take half of the store away")
