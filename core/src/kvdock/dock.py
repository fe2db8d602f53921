"""The dock: a value that holds the loaded backends and puts them to use."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.plugin import (validation, discovery)
from kvdock.errors import KvdockError, PluginError, RegionError
from kvdock.plugin.hookspecs import (AttachConfig, Capacity, Finding, HostMemory)
from kvdock.plugin.manifest import (Capability, Manifest, Support, Verdict)
from kvdock.pools.spec import Shard
from kvdock.routing.plan import (Judge, Needs, Plan, plan_routes)
from kvdock.config.fields import structure

if TYPE_CHECKING:
    from kvdock.batch import (Batch, BatchResult)
    from kvdock.pools.spec import PoolSpec
    from kvdock.region import Region

log = logging.getLogger("kvdock")

_OBSERVER = "observer:"
"""How a plugin manager's names of observers begin."""


@attrs.frozen(eq=False)
class Backend:
    """One loaded backend: a typed method for each of its hooks."""

    plugin: discovery.LoadedPlugin

    @property
    def name(self) -> str:
        """The backend's one name."""
        return self.plugin.candidate.name

    @property
    def manifest(self) -> Manifest:
        """What it declares."""
        return self.plugin.manifest

    @property
    def observers(self) -> tuple[str, ...]:
        """The names of the observers around it."""
        return tuple(
            name.removeprefix(_OBSERVER)
            for name, _ in self.plugin.manager.list_name_plugin()
            if name.startswith(_OBSERVER)
        )

    def put_around(self, name: str, built: object) -> None:
        """Put an observer around it, for as long as it is loaded.

        Raises:
            PluginError: If one of that name is there already, or it does more
                than to wrap and to listen.
        """
        self.check_observer(name, built)
        self.plugin.manager.register(built, name=f"{_OBSERVER}{name}")

    def check_observer(self, name: str, built: object) -> None:
        """Refuse what cannot be put around it.

        Raises:
            PluginError: As `put_around`.
        """
        if name in self.observers:
            raise PluginError(
                f"observer {name!r} is around backend {self.name!r} already",
                fix="Put observers around a dock once, after it is loaded.",
            )
        try:
            validation.check_observer(built)
        except validation.Breach as breach:
            what = f"observer {name!r} cannot be used: {breach.cause}"
            raise PluginError(what, fix=breach.fix) from breach

    def settings(self, given: Mapping[str, object] | None) -> Any:  # noqa: ANN401 - the plugin's own class
        """Build its settings from a mapping.

        Raises:
            SettingsError: On an unknown, missing or wrong setting.
        """
        where = f"backend {self.name!r}"
        cls = self.manifest.settings
        if cls is None:
            structure(_NoSettings, given or {}, where=where)
            return None
        return structure(cls, given or {}, where=where)

    def probe(self, config: AttachConfig) -> tuple[Finding, ...]:
        """Ask whether it could work here; a failing probe is a finding."""
        return examined(lambda: self.plugin.hooks.kvdock_probe(config=config))

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
        except Exception as error:  # noqa: BLE001 - a stranger's code
            why = f"{self.name} failed to judge {capability}: "
            return Verdict(Support.NO, f"{why}{type(error).__name__}: {error}")
        if found is not None and not isinstance(found, Verdict):
            why = f"{self.name} judged {capability} with {found!r}, which is no Verdict"
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
        from kvdock.region import block_of  # noqa: PLC0415 - numpy, 65 ms

        try:
            given = block_of(memoryview(found.buffer)).nbytes
        except (TypeError, KvdockError) as error:
            found.give_back()
            raise PluginError(
                f"kvdock_allocate of {self.name} brought what is no memory: {error}",
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
    ) -> object:
        """Hand it a pool's memory; return its handle."""
        return self.plugin.hooks.kvdock_register_pool(
            pool=pool, region=region, config=config
        )

    def key_suffix(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        """Ask how it ends the keys of a page's objects."""
        found: Sequence[str] = self.plugin.hooks.kvdock_key_suffix(
            pool=pool, shard=shard
        )
        return (found,) if isinstance(found, str) else tuple(found)

    def batch_io(self, handle: object, batch: Batch) -> BatchResult:
        """Run one batch and hold the answer against it.

        Raises:
            BatchError: If the answer is not one outcome per key.
        """
        from kvdock.batch import checked  # noqa: PLC0415 - numpy, 65 ms

        result = self.plugin.hooks.kvdock_batch_io(handle=handle, batch=batch)
        return checked(batch, result)

    def capacity(self, handle: object) -> Capacity | None:
        """Ask how full its store is; None where it does not say.

        Raises:
            TypeError: If the answer is no `Capacity`.
        """
        found = self.plugin.hooks.kvdock_capacity(handle=handle)
        if found is not None and not isinstance(found, Capacity):
            raise TypeError(f"kvdock_capacity returned {found!r}, which is no Capacity")
        return found

    def release(self, handle: object) -> None:
        """Tell it that a pool has ended."""
        self.plugin.hooks.kvdock_release(handle=handle)


def examined(ask: Callable[[], Iterable[Finding] | None]) -> tuple[Finding, ...]:
    """Ask for findings; whatever goes wrong with that is a finding too."""
    try:
        found: tuple[object, ...] = tuple(ask() or ())
    except KvdockError as error:
        return (Finding(ok=False, what=error.what, hint=error.fix),)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code
        return (Finding(ok=False, what=f"{type(error).__name__}: {error}"),)
    return tuple(
        one
        if isinstance(one, Finding)
        else Finding(ok=False, what=f"{one!r} is no Finding", hint="Return Findings.")
        for one in found
    )


@attrs.frozen
class _NoSettings:
    """The settings of a backend that has none."""


@attrs.frozen(eq=False)
class Dock:
    """Loaded backends, and the problems of those that could not be loaded."""

    backends: Mapping[str, Backend]
    problems: tuple[discovery.PluginProblem, ...] = ()

    @classmethod
    def load(
        cls, *, require: Sequence[str] = (), environ: Mapping[str, str] = os.environ
    ) -> Dock:
        """Load every installed backend that KVDOCK_PLUGINS allows.

        Args:
            require: Backends that must be usable.
            environ: Where KVDOCK_PLUGINS is read.

        Raises:
            PluginError: If a required backend is missing or broken.
        """
        names = discovery.allowed(environ)
        candidates = discovery.installed()
        absent = discovery.absent(candidates, names)
        kept = tuple(discovery.kept(candidates, names))
        return cls.of(kept, require=require, problems=absent)

    @classmethod
    def of(
        cls,
        candidates: Sequence[discovery.Candidate],
        *,
        require: Sequence[str] = (),
        problems: Sequence[discovery.PluginProblem] = (),
    ) -> Dock:
        """Load just these entry points, installed or not.

        Args:
            candidates: The entry points.
            require: Backends that must be usable.
            problems: What is known to be wrong already.
        """
        plugins, found = discovery.load_all(candidates)
        every = (*problems, *found)
        discovery.require(require, plugins, every)
        for problem in every:
            log.warning("%s", problem)
        return cls({name: Backend(one) for name, one in plugins.items()}, every)

    def plan(  # noqa: PLR0913 - the whole question in one call
        self,
        pools: Sequence[PoolSpec],
        shard: Shard,
        prefer: Sequence[str] = (),
        *,
        overrides: Mapping[str, str] | None = None,
        strict: bool = False,
        needs: Needs | None = None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Plan:
        """Choose a backend for every pool; see `plan_routes`.

        Args:
            pools: As there, and so are the others.
            shard: As there.
            prefer: `preference`.
            overrides: As there.
            strict: As there.
            needs: As there.
            settings: Backend name to the settings with which it will be
                attached: some backends can do more or less with some.
        """
        discovery.require(
            [*prefer, *(overrides or {}).values()],
            {name: one.plugin for name, one in self.backends.items()},
            self.problems,
        )
        return plan_routes(
            pools,
            shard,
            {name: one.manifest for name, one in self.backends.items()},
            prefer,
            overrides=overrides,
            strict=strict,
            needs=needs,
            judge=self._judge(settings or {}),
        )

    def allocate(
        self,
        backend: str,
        nbytes: int,
        settings: Mapping[str, object] | None = None,
        shard: Shard | None = None,
    ) -> HostMemory:
        """Take host memory for pools that a backend is to keep.

        It is memory of the backend's where that reaches no other, and plain
        memory otherwise. Pools in it are planned with
        `Needs(allocator=backend)`, and give it back when they are detached.

        Args:
            backend: Its name.
            nbytes: How much.
            settings: Those with which it will be attached.
            shard: The slice of the model that this process owns.

        Raises:
            KvdockError: If there is none.
        """
        loaded = {name: one.plugin for name, one in self.backends.items()}
        discovery.require([backend], loaded, self.problems)
        if nbytes < 1:
            raise RegionError(f"{nbytes} bytes are no memory")
        chosen = self.backends[backend]
        config = AttachConfig(
            settings=chosen.settings(settings), shard=shard or Shard()
        )
        return chosen.allocate(nbytes, config) or _plain(nbytes)

    def _judge(self, given: Mapping[str, Mapping[str, object]]) -> Judge:
        settings = {
            name: self.backends[name].settings(own)
            for name, own in given.items()
            if name in self.backends
        }

        def judge(
            backend: str, capability: Capability, pool: PoolSpec, shard: Shard
        ) -> Verdict | None:
            return self.backends[backend].check_capability(
                capability, pool, shard, settings.get(backend)
            )

        return judge


def _plain(nbytes: int) -> HostMemory:
    """Return memory that belongs to no backend."""
    # It goes with its last reference: unmapping it would need that anyway.
    return HostMemory(mmap.mmap(-1, nbytes), lambda: None)
