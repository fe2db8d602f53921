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
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs
import pluggy

from kvdock.errors import SettingsError
from kvdock.plugin import hookspecs
from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import list_entry_points
from kvdock.plugin.extension import Extension
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import Support
from kvdock.plugin.store import (
    MEMBERS,
    STORE_METHODS,
    PeerMemory,
    PoolStore,
    check_store,
    default_hooks,
)
from kvdock.plugin.validation import DEFAULTS, OBSERVER_PREFIX

if TYPE_CHECKING:
    from kvdock.batch import Batch, BatchResult
    from kvdock.geometry.region import Region
    from kvdock.plugin.hookspecs import AttachConfig, HostMemory
    from kvdock.plugin.loading import LoadedPlugin
    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.spec import PoolSpec

WRAPPERS_GROUP = "kvdock.wrappers"

_BEFORE = (
    "kvdock_probe",
    "kvdock_check_capability",
    "kvdock_allocate",
    "kvdock_key_suffix",
)
"""Hooks that are called before there is a store: they stay the plugin's."""

_OPENING = frozenset({"kvdock_manifest", "kvdock_register_pool", *_BEFORE})


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
            The store; see `StoreWrapper`.
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
    """Return a plugin whose stores have others around them.

    The plugin may be of either form, and is not observed yet.
    """
    inner = _declared(plugin)
    manifest = inner
    for _, wrapping in wrappings:
        manifest = wrapping.manifest(manifest)
    own = plugin.implemented - plugin.defaults
    before = set(_BEFORE) & own
    if not manifest.host_allocator:
        before.discard("kvdock_allocate")  # a wrapper asks for what it needs

    @hookimpl
    def kvdock_manifest() -> Manifest:
        return manifest

    def open_plain(pool: PoolSpec, config: AttachConfig, region: Region) -> PoolStore:
        handle = plugin.hooks.kvdock_register_pool(
            pool=pool, region=region, config=config
        )
        check_store(handle, plugin.manifest, own)
        # A store that answers everything itself needs no hook between.
        store = handle if own <= _OPENING else _HookStore(plugin, handle)
        return cast("PoolStore", store)

    @hookimpl
    def kvdock_register_pool(
        pool: PoolSpec, region: Region, config: AttachConfig
    ) -> PoolStore:
        opened: Callable[[Region], PoolStore] = partial(open_plain, pool, config)
        for _, wrapping in wrappings:
            allocate = partial(Backend(plugin).allocate, config=config)
            around = InnerStore(opened, allocate)
            opened = partial(_open_around, wrapping, around, pool, config)
        return opened(region)

    hooks: dict[str, Callable[..., object]] = {
        "kvdock_manifest": kvdock_manifest,
        "kvdock_register_pool": kvdock_register_pool,
        **{name: _function(plugin, name) for name in sorted(before)},
    }
    defaults = default_hooks(manifest, frozenset(hooks))
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(SimpleNamespace(**hooks), name=plugin.candidate.name)
    manager.register(SimpleNamespace(**defaults), name=DEFAULTS)
    return attrs.evolve(
        plugin,
        manifest=manifest,
        manager=manager,
        implemented=frozenset(hooks) | frozenset(defaults),
        defaults=frozenset(defaults),
        wrapped_by=(*plugin.wrapped_by, *(name for name, _ in wrappings)),
    )


def _open_around(
    wrapping: Wrapping,
    inner: InnerStore,
    pool: PoolSpec,
    config: AttachConfig,
    region: Region,
) -> PoolStore:
    return wrapping.wrap(inner, pool, region, config)


def _declared(plugin: LoadedPlugin) -> Manifest:
    """Return a manifest that also declares what a plugin only has hooks for."""
    found: dict[str, Any] = {
        name: Support.NATIVE
        for name in ("touch", "removed", "capacity")
        if f"kvdock_{name}" in plugin.implemented and not getattr(plugin.manifest, name)
    }
    return attrs.evolve(plugin.manifest, **found)


def _function(plugin: LoadedPlugin, hook: str) -> Callable[..., object]:
    """Return a plugin's own function for a hook."""
    caller: pluggy.HookCaller = getattr(plugin.hooks, hook)
    (one,) = [
        one
        for one in caller.get_hookimpls()
        if not one.plugin_name.startswith(OBSERVER_PREFIX)
    ]
    return one.function


class _HookStore:
    """The store that a plugin's hooks and one of its handles are together."""

    def __init__(self, plugin: LoadedPlugin, handle: object) -> None:
        self._hooks, self._handle = plugin.hooks, handle
        self._releases = "kvdock_release" in plugin.implemented
        for hook, member in STORE_METHODS.items():
            if member in MEMBERS and hook in plugin.implemented:
                setattr(self, member, self._calling(hook))
        self.peers: PeerMemory | None = None
        if plugin.manifest.peers:
            calls = {
                name: self._calling(f"kvdock_{name}")
                for name in ("endpoint", "connect", "disconnect", "withdraw")
            }
            made: Any = SimpleNamespace(**calls, send=self.run)
            self.peers = made

    def _calling(self, hook: str) -> Callable[..., Any]:
        """Return what calls a hook, with its arguments in their order."""
        caller = getattr(self._hooks, hook)
        names = getattr(hookspecs, hook).__code__.co_varnames

        def call(*arguments: object) -> object:
            given = dict(zip(names, (self._handle, *arguments), strict=False))
            return caller(**given)

        return call

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch."""
        done: BatchResult = self._hooks.kvdock_batch_io(
            handle=self._handle, batch=batch
        )
        return done

    def close(self) -> None:
        """Release the handle, if that is something to the plugin."""
        if self._releases:
            self._hooks.kvdock_release(handle=self._handle)
