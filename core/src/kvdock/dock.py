"""The dock: a value that holds the loaded backends and puts them to use."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.config.core import KEPT_FREE_BYTES
from kvdock.config.tiers import Tier, read_tiers
from kvdock.errors import RegionError, SettingsError
from kvdock.events import PluginLoaded
from kvdock.plugin import discovery, loading
from kvdock.plugin.backend import Backend
from kvdock.plugin.hookspecs import AttachConfig, HostMemory
from kvdock.plugin.instances import add_instances, named_instances
from kvdock.plugin.manifest import Support, Verdict
from kvdock.plugin.observer import build_observers
from kvdock.pools.shard import Shard
from kvdock.routing.plan import Plan, plan_routes

if TYPE_CHECKING:
    from kvdock.config import Configuration
    from kvdock.plugin.manifest import Capability
    from kvdock.pools.spec import PoolSpec
    from kvdock.routing.verdicts import CapabilityCheck, RouteRequirements

log = logging.getLogger("kvdock")


@attrs.frozen(eq=False)
class Dock:
    """Loaded backends, and the problems of those that could not be loaded.

    Args:
        backends: By name, with the named instances of plugins.
        problems: What is wrong with others.
        installed: The names of all backends that are installed, loaded or not.
    """

    backends: Mapping[str, Backend]
    problems: tuple[discovery.PluginProblem, ...] = ()
    installed: frozenset[str] = attrs.field(kw_only=True)

    @installed.default
    def _known(self) -> frozenset[str]:
        return frozenset(self.backends)

    @classmethod
    def load(
        cls,
        *,
        require: Sequence[str] = (),
        only: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Dock:
        """Load the installed backends that KVDOCK_PLUGINS and KVDOCK_DENY admit.

        Args:
            require: Backends, or instances of such, that must be usable.
            only: Import these alone, so that an engine is not hurt by a plugin that
                it does not use; None for all.
            environ: Where the variables are read.
            settings: Backend name to its settings. Where they say
                `plugin`, the name is that of an instance of that plugin.

        Raises:
            PluginError: If a required backend is missing or broken.
            SettingsError: If an instance cannot have its name.
        """
        chosen = discovery.selection(environ)
        candidates = discovery.list_entry_points()
        absent = discovery.missing_allowed(candidates, chosen)
        kept, _ = chosen.of(candidates)
        given = dict(settings or {})
        if only is not None:
            given = {name: own for name, own in given.items() if name in only}
            instances = named_instances(given)
            needed = {instances.get(name, name) for name in only}
            # Names that are near are those of all, loaded or not.
            known = {*instances, *(one.name for one in kept)}
            unknown = [one for one in require if one not in known]
            discovery.require(unknown, known, absent)
            kept = tuple(one for one in kept if one.name in needed)
            absent = tuple(one for one in absent if one.name in needed)
        loaded = cls.of(kept, problems=absent)
        installed = frozenset(one.name for one in candidates)
        dock = attrs.evolve(loaded, installed=installed).with_instances(given)
        discovery.require(require, dock._plugins(), dock.problems)  # noqa: SLF001 - its own
        return dock

    @classmethod
    def for_engine(cls, used: Sequence[str], given: Configuration) -> Dock:
        """Load what an engine uses, as it does when it starts.

        What an adapter's doctor asks this way, an engine would find. Only the backends
        in `used` are imported.

        Raises:
            PluginError: If a backend or an observer cannot be used.
            SettingsError: If their settings are wrong, or this user cannot make
                the directory that one is to keep pages in.
        """
        names = list(dict.fromkeys(used))
        dock = cls.load(require=names, only=names, settings=given.backends)
        dock.observe(given.core.observers, given.observers)
        for name in names:
            settings = dock.backends[name].settings(given.backends.get(name))
            _check_root(name, getattr(settings, "root", None))
        return dock

    @classmethod
    def of(
        cls,
        candidates: Sequence[discovery.Candidate],
        *,
        require: Sequence[str] = (),
        problems: Sequence[discovery.PluginProblem] = (),
    ) -> Dock:
        """Load just these entry points, installed or not."""
        plugins, found = loading.load_all(candidates)
        every = (*problems, *found)
        discovery.require(require, plugins, every)
        for problem in every:
            log.warning("%s", problem)
        return cls(
            {name: Backend(one) for name, one in plugins.items()},
            every,
            installed=frozenset(one.name for one in candidates),
        )

    def with_instances(self, settings: Mapping[str, Mapping[str, object]]) -> Dock:
        """Return this dock with the named instances that settings describe.

        Raises:
            SettingsError: If an instance cannot have its name.
        """
        plugins, problems = add_instances(self._plugins(), settings, self.installed)
        for problem in problems:
            log.warning("%s", problem)
        backends = {
            name: Backend(one)
            if name not in self.backends or self.backends[name].plugin is not one
            else self.backends[name]
            for name, one in plugins.items()
        }
        return attrs.evolve(
            self, backends=backends, problems=(*self.problems, *problems)
        )

    def _plugins(self) -> dict[str, loading.LoadedPlugin]:
        return {name: one.plugin for name, one in self.backends.items()}

    def provenance(self) -> tuple[PluginLoaded, ...]:
        """Return where the code of every loaded plugin comes from."""
        observers = {
            name: backend.observer(name)
            for backend in self.backends.values()
            for name in backend.observers
        }
        found = [
            PluginLoaded(
                kind="backend",
                name=name,
                distribution=backend.plugin.candidate.distribution,
                version=backend.plugin.candidate.version,
                path=backend.plugin.path,
            )
            for name, backend in self.backends.items()
        ]
        # Package metadata is read only where there are observers.
        installed = (
            discovery.list_entry_points(discovery.OBSERVERS_GROUP) if observers else ()
        )
        by_name = {one.name: one for one in installed}
        for name, one in observers.items():
            source = by_name.get(name)
            module = sys.modules.get(type(one).__module__)
            found.append(
                PluginLoaded(
                    kind="observer",
                    name=name,
                    distribution=source.distribution if source else "unknown",
                    version=source.version if source else "unknown",
                    path=getattr(module, "__file__", None) or "unknown",
                )
            )
        return tuple(found)

    def plan(
        self,
        pools: Sequence[PoolSpec],
        shard: Shard,
        prefer: Sequence[str] = (),
        *,
        tiers: Sequence[str | Mapping[str, object] | Tier] = (),
        overrides: Mapping[str, str] | None = None,
        strict: bool = False,
        needs: RouteRequirements | None = None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Plan:
        """Choose a backend for every pool; see `plan_routes`.

        Arguments are as there, and `prefer` is its preference. Instead of that, `tiers`
        has the backends that keep each page, near first: names, or tables with
        `backend`, `write` and `promote`. `settings` are those with which each backend
        will be attached: some can do more or less with some. Wrong ones of a backend
        that neither `prefer` nor `overrides` names are a reason not to choose it.

        Raises:
            SettingsError: On wrong settings of a backend that is named, or
                wrong tiers.
        """
        chain = read_tiers(tiers)
        named = [tier.backend for tier in chain]
        asked = [*prefer, *named, *(overrides or {}).values()]
        discovery.require(asked, self._plugins(), self.problems)
        return plan_routes(
            pools,
            shard,
            {name: one.manifest for name, one in self.backends.items()},
            prefer,
            tiers=chain,
            overrides=overrides,
            strict=strict,
            needs=needs,
            judge=self._judge(settings or {}, asked),
            wrapped={
                name: one.plugin.wrapped_by for name, one in self.backends.items()
            },
            unproven={
                name: one.unproven
                for name, one in self.backends.items()
                if one.manifest.integrity
            },
        )

    def observe(
        self,
        names: Sequence[str],
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> dict[str, object]:
        """Put observers around every backend.

        Called between `Dock.load` and `Attachment.open`, with `core.observers`
        and what is configured for them. Nothing is put around anything unless
        all of them can be used.

        Returns:
            Observer name to the object that was built.

        Raises:
            PluginError: If one cannot be used.
            SettingsError: If its settings are wrong, or are given for one that
                is not among the names.
        """
        built = build_observers(names, settings or {})
        for backend in self.backends.values():
            for name, one in built.items():
                backend.check_observer(name, one)
        for name, one in built.items():
            self.add_observer(name, one)
        return built

    def add_observer(self, name: str, built: object) -> None:
        """Put a built observer around every backend.

        Raises:
            PluginError: If one of that name is there already, or it does more
                than to wrap and to listen.
        """
        for backend in self.backends.values():
            backend.add_observer(name, built)

    def allocate(
        self,
        backend: str,
        nbytes: int,
        settings: Mapping[str, object] | None = None,
        shard: Shard | None = None,
        *,
        pool: str = "",
        reserve_bytes: int = KEPT_FREE_BYTES,
    ) -> HostMemory:
        """Take host memory for pools that a backend is to keep.

        It is memory of the backend's where that reaches no other, and plain memory
        otherwise. Pools in it are planned with `RouteRequirements(allocator=backend)`,
        and give it back when they are detached. `settings` are those with which the
        backend will be attached; `reserve_bytes` stay free on the host.

        Raises:
            KvdockError: If there is none, or the host has too little left.
        """
        from kvdock.models.memory_budget import HostBudget  # noqa: PLC0415 - psutil

        discovery.require([backend], self._plugins(), self.problems)
        if nbytes < 1:
            raise RegionError(f"{nbytes} bytes are not memory")
        HostBudget.measure(reserve_bytes).check(
            [(pool or backend, nbytes)],
            kind="pool" if pool else "memory for backend",
        )
        chosen = self.backends[backend]
        config = AttachConfig(
            settings=chosen.settings(settings), shard=shard or Shard()
        )
        return chosen.allocate(nbytes, config) or _plain(nbytes)

    def _judge(
        self, given: Mapping[str, Mapping[str, object]], asked: Collection[str]
    ) -> CapabilityCheck:
        settings = {
            name: self.backends[name].settings(own)
            for name, own in given.items()
            if name in asked and name in self.backends
        }
        unfit: dict[str, Verdict] = {}

        def judge(
            backend: str, capability: Capability, pool: PoolSpec, shard: Shard
        ) -> Verdict | None:
            one = self.backends[backend]
            if backend in given and backend not in settings and backend not in unfit:
                # Built when it is its turn: most plans never come to it.
                try:
                    settings[backend] = one.settings(given[backend])
                except SettingsError as error:
                    log.warning("%s: it takes no pool", error)
                    unfit[backend] = Verdict(Support.NO, error.what)
            if backend in unfit:
                return unfit[backend]
            return one.check_capability(capability, pool, shard, settings.get(backend))

        return judge


def _plain(nbytes: int) -> HostMemory:
    """Return memory that belongs to no backend."""
    # It goes with its last reference: unmapping it would need that anyway.
    return HostMemory(mmap.mmap(-1, nbytes), lambda: None)


def _check_root(name: str, root: object) -> None:
    """Reject a root that is not, and cannot become, a directory of this user."""
    if not isinstance(root, Path):
        return
    nearest = next(one for one in (root, *root.parents) if os.path.exists(one))  # noqa: PTH110 - it raises for no error
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise SettingsError(
            f"backend {name!r}: {nearest} is not a directory that this user can "
            f"write, so {root} cannot hold its pages",
            fix="Give another root, or correct its owner and mode.",
        )
