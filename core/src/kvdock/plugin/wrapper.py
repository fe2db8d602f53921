"""Wrappers: stores around the stores of any backend, chosen by `wrap = [...]`.

    [backends.disk]
    plugin = "file"
    root = "/var/cache/kv"
    wrap = ["faults"]

An entry point in `kvdock.wrappers` names a `Wrapper` record. It is built once for
each backend that names it, and puts a store around each store of that backend. A
wrapper with settings is given as a table: `wrap = [{name = "faults", rate = 0.1}]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import attrs

from kvdock.errors import SettingsError
from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import list_entry_points
from kvdock.plugin.extension import Extension
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.store import StoreWrapper
from kvdock.plugin.validation import OBSERVER_PREFIX, add_defaults, hook_manager

if TYPE_CHECKING:
    import pluggy

    from kvdock.batch import Batch, BatchResult
    from kvdock.geometry.region import Region
    from kvdock.plugin.hookspecs import AttachConfig, HostMemory
    from kvdock.plugin.loading import LoadedPlugin
    from kvdock.plugin.manifest import Manifest
    from kvdock.plugin.store import PoolStore, WholeStore
    from kvdock.pools.spec import PoolSpec

WRAPPERS_GROUP = "kvdock.wrappers"


@attrs.frozen(eq=False)
class InnerStore:
    """The store of one pool that a wrapper is put around, before it is opened.

    Args:
        open: Opens it for some memory: that of the core, or memory of the wrapper
            through which it moves pages.
        allocate: Allocates memory for that which the backend reaches, to the byte;
            None where any memory will do. Give it back once the store is closed.
    """

    open: Callable[[Region], PoolStore]
    allocate: Callable[[int], HostMemory | None]


class Wrapping(Protocol):
    """A wrapper with its settings, around one backend."""

    def manifest(self, inner: Manifest) -> Manifest:
        """Return what the backend declares with this wrapper around its stores."""

    def wrap(
        self,
        inner: InnerStore,
        pool: PoolSpec,
        region: Region,
        config: AttachConfig,
    ) -> PoolStore:
        """Open the store of one pool, and put a store around it.

        `region` is the memory that the core moves pages from and to.

        Returns:
            A store, as `kvdock_register_pool` returns; see `StoreWrapper`.
        """


@attrs.frozen(kw_only=True)
class Wrapper(Extension):
    """The record of an entry point in `kvdock.wrappers`; it builds a `Wrapping`."""


def find_wrapper(name: str) -> Wrapper:
    """Load one wrapper by name."""
    return Wrapper.find(name, list_entry_points(WRAPPERS_GROUP))


def build_wrappers(given: object, *, where: str) -> tuple[tuple[str, Wrapping], ...]:
    """Build what `wrap` names, the innermost first.

    `given` is a list of names, and of tables with `name` and settings; or names in one
    text, with commas.

    Raises:
        PluginError: If one is not installed, or cannot be used.
        SettingsError: If this is not such a list, or settings are wrong.
    """
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    if not isinstance(given, Sequence):
        raise SettingsError(
            f"{where}: wrap is {given!r}, and not a list",
            fix='Write wrap = ["NAME"], or wrap = [{name = "NAME", KEY = VALUE}].',
        )
    built = []
    for one in given:
        table = {"name": one} if isinstance(one, str) else one
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise SettingsError(
                f"{where}: wrap names {one!r}",
                fix='Give a name, or a table with a name: {name = "NAME"}.',
            )
        name = table["name"]
        own = {key: value for key, value in table.items() if key != "name"}
        made = find_wrapper(name).built(own, f"{where}: wrapper {name!r}")
        built.append((name, made))
    return tuple(built)


def wrapped_plugin(
    plugin: LoadedPlugin, wrappings: Sequence[tuple[str, Wrapping]]
) -> LoadedPlugin:
    """Return a plugin that is not observed yet, with stores around its stores."""
    manifest = plugin.manifest
    for _, wrapping in wrappings:
        manifest = wrapping.manifest(manifest)

    @hookimpl
    def kvdock_manifest() -> Manifest:
        return manifest

    def open_plain(pool: PoolSpec, config: AttachConfig, region: Region) -> PoolStore:
        store = Backend(plugin).register_pool(pool, region, config)
        if "kvdock_batch_io" in plugin.implemented:
            return _RunByHook(store, plugin)
        return store

    @hookimpl
    def kvdock_register_pool(
        pool: PoolSpec, region: Region, config: AttachConfig
    ) -> PoolStore:
        opened: Callable[[Region], PoolStore] = partial(open_plain, pool, config)
        for _, wrapping in wrappings:
            allocate = partial(Backend(plugin).allocate, config=config)
            around = InnerStore(opened, allocate)
            opened = partial(wrapping.wrap, around, pool, config=config)
        return opened(region)

    hooks: dict[str, Callable[..., object]] = {
        name: _function(plugin, name)
        for name in plugin.implemented - {"kvdock_batch_io"}
    }
    if not manifest.host_allocator:
        hooks.pop("kvdock_allocate", None)  # a wrapper asks for what it needs
    hooks["kvdock_manifest"] = kvdock_manifest
    hooks["kvdock_register_pool"] = kvdock_register_pool
    manager = hook_manager()
    manager.register(SimpleNamespace(**hooks), name=plugin.candidate.name)
    add_defaults(manager, hooks)
    return attrs.evolve(
        plugin,
        manifest=manifest,
        manager=manager,
        implemented=frozenset(hooks),
        wrapped_by=(*plugin.wrapped_by, *(name for name, _ in wrappings)),
    )


def _function(plugin: LoadedPlugin, hook: str) -> Callable[..., object]:
    """Return a plugin's own function for a hook."""
    caller: pluggy.HookCaller = getattr(plugin.hooks, hook)
    (own,) = [
        implementation
        for implementation in caller.get_hookimpls()
        if not implementation.plugin_name.startswith(OBSERVER_PREFIX)
    ]
    return own.function


class _RunByHook(StoreWrapper):
    """The store of a plugin that does its batches in `kvdock_batch_io`."""

    def __init__(self, inner: WholeStore, plugin: LoadedPlugin) -> None:
        super().__init__(inner)
        self._hook = plugin.hooks.kvdock_batch_io
        if plugin.manifest.peers:
            peers = inner.peers
            self.peers = SimpleNamespace(
                endpoint=peers.endpoint,
                connect=peers.connect,
                disconnect=peers.disconnect,
                withdraw=peers.withdraw,
                send=self.run,
            )

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch."""
        result: BatchResult = self._hook(store=self.inner, batch=batch)
        return result
