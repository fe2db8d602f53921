"""One loaded backend behind a typed facade."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.config.schema import NoSettings, own_settings, structure
from kvdock.errors import KvdockError, PluginError
from kvdock.plugin import evidence, loading, validation
from kvdock.plugin.hookspecs import AttachConfig, Finding, HostMemory
from kvdock.plugin.manifest import Capability, Manifest, Support, Verdict
from kvdock.plugin.store import check_store
from kvdock.plugin.validation import OBSERVER_PREFIX

if TYPE_CHECKING:
    from kvdock.batch import Batch, BatchResult
    from kvdock.geometry.region import Region
    from kvdock.plugin.store import WholeStore
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


@attrs.frozen(eq=False)
class Backend:
    """One loaded backend: a typed method for each of its hooks."""

    plugin: loading.LoadedPlugin

    @property
    def name(self) -> str:
        """The backend's one name, or that of an instance."""
        return self.plugin.candidate.name

    @property
    def manifest(self) -> Manifest:
        """Return what it declares."""
        return self.plugin.manifest

    @property
    def unproven(self) -> str:
        """Why the integrity that it declares is not proven; "" where it is."""
        value = self.plugin.candidate.value
        return "" if self.plugin.believed else evidence.why_unproven(value)

    @property
    def observers(self) -> tuple[str, ...]:
        """The names of the observers around it."""
        return tuple(
            name.removeprefix(OBSERVER_PREFIX)
            for name, _ in self.plugin.manager.list_name_plugin()
            if name.startswith(OBSERVER_PREFIX)
        )

    def observer(self, name: str) -> object:
        """Return one of the observers around it."""
        return self.plugin.manager.get_plugin(f"{OBSERVER_PREFIX}{name}")

    def add_observer(self, name: str, built: object) -> None:
        """Put an observer around it, for as long as it is loaded.

        One that has a method `for_backend` is asked for one that knows its backend.

        Raises:
            PluginError: If one of that name is there already, or it does more
                than to wrap and to listen.
        """
        self.check_observer(name, built)
        for_backend = getattr(built, "for_backend", None)
        built = for_backend(self.name) if for_backend else built
        self.plugin.manager.register(built, name=f"{OBSERVER_PREFIX}{name}")

    def check_observer(self, name: str, built: object) -> None:
        """Refuse what cannot be put around it.

        Raises:
            PluginError: As `add_observer`.
        """
        if name in self.observers:
            raise PluginError(
                f"observer {name!r} is around backend {self.name!r} already",
                fix="Put observers around a dock once, after it is loaded.",
            )
        try:
            validation.check_observer(built)
        except validation.ContractViolation as breach:
            what = f"observer {name!r} cannot be used: {breach.cause}"
            raise PluginError(what, fix=breach.fix) from breach

    def settings(self, given: Mapping[str, object] | None) -> Any:  # noqa: ANN401 - the plugin's own class
        """Build its settings from a mapping.

        Raises:
            SettingsError: On an unknown, missing or wrong setting.
        """
        where = f"backend {self.name!r}"
        cls = self.manifest.settings
        found: object = structure(
            cls or NoSettings, own_settings(given or {}), where=where
        )
        return found if cls else None

    def probe(self, config: AttachConfig) -> tuple[Finding, ...]:
        """Ask whether it could work here; a failing probe is a finding."""
        return run_probe(lambda: self.plugin.hooks.kvdock_probe(config=config))

    def check_capability(
        self,
        capability: Capability,
        pool: PoolSpec,
        shard: Shard,
        settings: object = None,
    ) -> Verdict | None:
        """Ask for its own verdict; None where the manifest answers.

        A backend that fails to answer is refused with that as the reason: it
        must not keep the others from taking the pool.
        """
        try:
            found = self.plugin.hooks.kvdock_check_capability(
                capability=capability, pool=pool, shard=shard, settings=settings
            )
        except Exception as error:  # noqa: BLE001 - a plugin's code
            why = f"{self.name} failed to judge {capability}: "
            return Verdict(Support.NO, f"{why}{type(error).__name__}: {error}")
        if found is not None and not isinstance(found, Verdict):
            why = f"{self.name} judged {capability} with {found!r}: not a Verdict"
            return Verdict(Support.NO, why)
        return found

    def allocate(self, nbytes: int, config: AttachConfig) -> HostMemory | None:
        """Ask for memory that it reaches; None where any memory will do.

        Raises:
            KvdockError: If it has none, or the answer is no such memory.
        """
        if "kvdock_allocate" not in self.plugin.implemented:
            return None
        found = self.plugin.hooks.kvdock_allocate(nbytes=nbytes, config=config)
        if found is None:
            return None
        if not isinstance(found, HostMemory):
            raise PluginError(
                f"kvdock_allocate of {self.name} returned {found!r}",
                fix="It returns a HostMemory, or None where any memory will do.",
            )
        from kvdock.geometry.region import block_of  # noqa: PLC0415 - numpy, 65 ms

        try:
            given = block_of(memoryview(found.buffer)).nbytes
        except (TypeError, KvdockError) as error:
            found.give_back()
            raise PluginError(
                f"kvdock_allocate of {self.name} brought what is not memory: {error}",
                fix="Its buffer is writable and contiguous, with the buffer protocol.",
            ) from error
        if given != nbytes:
            found.give_back()
            raise PluginError(
                f"kvdock_allocate of {self.name} was asked for {nbytes} bytes and "
                f"brought {given}"
            )
        return found

    def register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> WholeStore:
        """Hand it a pool's memory; return the pool's store.

        Raises:
            PluginError: If the pool or the store does not fit the manifest.
            KvdockError: If it rejects the pool.
        """
        plugin, limit = self.plugin, self.manifest.max_object_bytes
        if limit and limit < (largest := max(region.object_bytes.tolist(), default=0)):
            raise PluginError(
                f"an object of pool {pool.name!r} has {largest} bytes, and {self.name} "
                f"takes {limit} at most",
                fix="Plan the routes with the settings that it is attached with.",
            )
        store: WholeStore = plugin.hooks.kvdock_register_pool(
            pool=pool, region=region, config=config
        )
        wrapped = bool(plugin.wrapped_by)
        try:
            check_store(store, self.manifest, plugin.implemented, wrapped=wrapped)
        except PluginError:
            with contextlib.suppress(Exception):  # a plugin's code
                store.close()
            raise
        return store

    def key_suffix(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        """Ask how it ends the keys of a page's objects."""
        found: Sequence[str] = self.plugin.hooks.kvdock_key_suffix(
            pool=pool, shard=shard
        )
        return (found,) if isinstance(found, str) else tuple(found)

    def batch_io(self, store: object, batch: Batch) -> BatchResult:
        """Run one batch and hold the answer against it.

        Raises:
            BatchError: If the answer is not one outcome per key.
        """
        from kvdock.batch import validate_result  # noqa: PLC0415 - numpy, 65 ms

        return validate_result(batch, self.batch_hook()(store=store, batch=batch))

    def batch_hook(self) -> Callable[..., object]:
        """Return what takes `store` and `batch`, and answers unchecked.

        Where no observer wraps the hook it is the plugin's own function: the
        relay costs each batch two microseconds and three frames. An observer
        that is added later is not called. Where it is the core's default, a store
        may be called at once: see `calls_stores`.
        """
        hook = self.plugin.hooks.kvdock_batch_io
        implementations = hook.get_hookimpls()
        takes = {name for one in implementations for name in one.argnames}
        alone = len(implementations) == 1 and takes == {"store", "batch"}
        function: Callable[..., object] = implementations[0].function if alone else hook
        return function

    @property
    def calls_stores(self) -> bool:
        """Return whether nothing stands between a batch and the store that runs it."""
        return self.batch_hook() is validation.kvdock_batch_io


def run_probe(ask: Callable[[], Iterable[Finding] | None]) -> tuple[Finding, ...]:
    """Ask for findings; whatever goes wrong with that is a finding too."""
    try:
        found: tuple[object, ...] = tuple(ask() or ())
    except KvdockError as error:
        return (Finding(ok=False, what=error.what, hint=error.fix),)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin's code
        return (Finding(ok=False, what=f"{type(error).__name__}: {error}"),)
    return tuple(
        one
        if isinstance(one, Finding)
        else Finding(
            ok=False, what=f"{one!r} is not a Finding", hint="Return Findings."
        )
        for one in found
    )
