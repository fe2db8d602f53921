"""What a plugin's author knows about where the bytes lie.

An oracle bypasses the plugin: it peeks at stored bytes and damages them
without the plugin. With one, the kit shows that damage is a miss and
never another page's bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Oracle:
    """Override what your store allows; what is left out is skipped.

    A backend that declares `integrity=NATIVE` is believed only if its own
    distribution brings an oracle, as an entry point in `kvdock.oracles`.
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
