"""Backends whose pages are sealed, for the conformance kit: `sealed:file`.

Keys lie in a folder of their own, which processes that a test starts find by a
variable.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvdock import (
    Attachment,
    Backend,
    Dock,
    DType,
    Namespace,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.plugin.wrapper import wrapped_plugin
from kvdock.pools import Part, Per
from kvdock.testing.loading import load_backend
from kvdock.wrappers.key_ring import add_key, destroy_keys, list_keys
from kvdock.wrappers.seal import Seal, SealSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from kvdock.plugin.loading import LoadedPlugin

_PLACE = "TESTS_OF_KVDOCK_KEYS"
_MASTER = bytes(range(32))


def seal() -> Seal:
    """Return a wrapper whose keys are this run's."""
    if _PLACE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="kvdock-keys-"))
        (folder / "master").write_bytes(_MASTER)
        for tenant in ("default", "quiet", "busy"):  # the kit's
            add_key(folder / "keys.json", _MASTER, tenant)
        os.environ[_PLACE] = str(folder)
    folder = Path(os.environ[_PLACE])
    return Seal(SealSettings(keys=folder / "keys.json", master_file=folder / "master"))


def sealed(plugin: str, around: Seal | None = None) -> LoadedPlugin:
    """Return a plugin whose stores are those of another, sealed."""
    inner = load_backend(plugin).plugin
    return wrapped_plugin(inner, [("seal", around or seal())])


def __getattr__(name: str) -> LoadedPlugin:
    """Make one: `sealed:file`, `sealed:folder`."""
    known = {"folder": "reference:folder", "memory": "reference:memory"}
    known |= {one: one for one in ("file", "hf3fs", "mooncake", "nixl", "s3")}
    if name not in known:
        raise AttributeError(name)
    return sealed(known[name])


def _opened(
    plugin: str,
    backend: LoadedPlugin,
    settings: Mapping[str, object],
    memory: npt.NDArray[np.uint8],
) -> Attachment:
    """Attach memory of pages, one a row, to a sealed backend."""
    pages, page_bytes = memory.shape
    part = Part("kv", DType.U8, (page_bytes,), per=Per.PAGE)
    pool = PoolSpec(
        name="kv", kind="mla", parts=(part,), layers=(0,), page_tokens=1, anchor=True
    )
    dock = Dock({plugin: Backend(backend)})
    return Attachment.open(
        dock,
        dock.plan([pool], Shard(), [plugin], settings={plugin: settings}),
        Namespace(model="sealed"),
        {"kv": Region.of(pool, Shard(), (memory,), pages)},
        {plugin: settings},
    )


def check_round_trip(plugin: str, settings: Mapping[str, object]) -> None:
    """Store sealed pages, load them by another attachment, and by one without keys.

    Args:
        plugin: An installed backend.
        settings: Its settings.
    """
    pages, page_bytes = 8, 64 << 10
    names = [f"{page:064x}" for page in range(pages)]
    wanted = np.random.default_rng(5).integers(0, 256, (pages, page_bytes), np.uint8)

    def opened(memory: npt.NDArray[np.uint8], backend: LoadedPlugin) -> Attachment:
        return _opened(plugin, backend, settings, memory)

    own = {"kv": np.arange(pages)}
    with opened(wanted.copy(), sealed(plugin)) as cache:
        assert "sealed" in cache.plan.explain()
        assert cache.put(names, own).pages == pages
    found = np.zeros_like(wanted)
    with opened(found, sealed(plugin)) as cache:
        assert cache.exists(names).best == pages
        assert cache.get(names, own).pages == pages
        assert np.array_equal(found, wanted)
    with tempfile.TemporaryDirectory() as empty:
        other = SealSettings(
            keys=Path(empty) / "keys.json",
            master_file=Path(os.environ[_PLACE]) / "master",
        )
        add_key(other.keys, bytes(range(32)), "default")
        found[:] = 0
        with opened(found, sealed(plugin, Seal(other))) as cache:
            assert cache.get(names, own).pages == 0
            assert not found.any()


def check_pages_of_a_lost_key_are_replaced(
    plugin: str, settings: Mapping[str, object], folder: Path
) -> None:
    """Store pages again whose key was destroyed, before and after they are missed.

    Args:
        plugin: An installed backend.
        settings: Its settings.
        folder: An empty one, for keys; they are to be looked at before each call.
    """
    (folder / "master").write_bytes(_MASTER)
    keys = folder / "keys.json"
    add_key(keys, _MASTER, "default")
    names = [f"{page:064x}" for page in range(8)]
    own = {"kv": np.arange(8)}
    right = np.random.default_rng(6).integers(0, 256, (8, 4096), np.uint8)

    def opened(memory: npt.NDArray[np.uint8]) -> Attachment:
        around = Seal(SealSettings(keys=keys, master_file=folder / "master"))
        return _opened(plugin, sealed(plugin, around), settings, memory)

    def rotate() -> None:
        add_key(keys, _MASTER, "default")
        destroy_keys(keys, "default", max(one[1] for one in list_keys(keys)) - 1)

    def check(cache: Attachment, memory: npt.NDArray[np.uint8]) -> None:
        assert cache.exists(names).best == 8
        memory[:] = 0
        assert cache.get(names, own).pages == 8
        assert (memory == right).all()

    memory = right.copy()
    with opened(memory) as cache:
        assert cache.put(names, own).pages == 8
        rotate()
        # A put that comes before anyone has missed them.
        assert cache.put(names, own).pages == 8
        check(cache, memory)
        rotate()
        # Or a load, and a lookup that says that they are to be computed.
        assert cache.get(names, own).pages == 0
        assert cache.exists(names).best == 0
        memory[:] = right
        assert cache.put(names[:4], {"kv": np.arange(4)}).pages == 4
    with opened(memory) as cache:
        memory[:] = right
        assert cache.put(names, own).pages == 8
        check(cache, memory)
    with opened(memory) as cache:
        check(cache, memory)
