"""Backends whose pages are sealed, for the conformance kit: `sealed:file`.

Keys lie in a folder of their own, which processes that a test starts find by a
variable.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock.plugin.wrapper import wrapped_plugin
from kvdock.testing.loading import load_backend
from kvdock.wrappers.key_ring import add_key
from kvdock.wrappers.seal import Seal, SealSettings

if TYPE_CHECKING:
    from kvdock.plugin.discovery import LoadedPlugin

_PLACE = "TESTS_OF_KVDOCK_KEYS"
_MASTER = bytes(range(32))


def seal() -> Seal:
    """Return a wrapper whose keys are this run's."""
    if _PLACE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="kvdock-keys-"))
        (folder / "master").write_bytes(_MASTER)
        add_key(folder / "keys.json", _MASTER, "default")
        os.environ[_PLACE] = str(folder)
    folder = Path(os.environ[_PLACE])
    return Seal(SealSettings(keys=folder / "keys.json", master_file=folder / "master"))


def sealed(plugin: str, around: Seal | None = None) -> LoadedPlugin:
    """Return a plugin whose stores are those of another, sealed."""
    inner = load_backend(plugin).plugin
    return wrapped_plugin(inner, [("seal", around or seal())])


def __getattr__(name: str) -> LoadedPlugin:
    """Make one: `sealed:file`, `sealed:folder`."""
    known = {"file": "file", "folder": "reference:folder", "memory": "reference:memory"}
    if name not in known:
        raise AttributeError(name)
    return sealed(known[name])
