"""kvdock: storage of an LLM engine's KV caches, through plugins.

Names load when they are first used, so that `import kvdock` costs next to
nothing and a listing of plugins never imports numpy.

The names here are what the author of an engine's adapter and the author of a plugin
begin with. Public are this package and the modules that the reference describes,
page "Python API". Others may change without notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.batch import Batch as Batch
    from kvdock.batch import BatchResult as BatchResult
    from kvdock.batch import MemoryGate as MemoryGate
    from kvdock.batch import MemoryHold as MemoryHold
    from kvdock.batch import Operation as Operation
    from kvdock.batch import Outcome as Outcome
    from kvdock.capacity import Capacity as Capacity
    from kvdock.dock import Dock as Dock
    from kvdock.errors import KvdockError as KvdockError
    from kvdock.errors import NoRoute as NoRoute
    from kvdock.geometry.region import Block as Block
    from kvdock.geometry.region import Region as Region
    from kvdock.hits import Hits as Hits
    from kvdock.hits import evaluate as evaluate
    from kvdock.namespace import Namespace as Namespace
    from kvdock.plugin.backend import Backend as Backend
    from kvdock.plugin.discovery import PluginProblem as PluginProblem
    from kvdock.plugin.hookspecs import AttachConfig as AttachConfig
    from kvdock.plugin.hookspecs import Finding as Finding
    from kvdock.plugin.hookspecs import HostMemory as HostMemory
    from kvdock.plugin.hookspecs import hookimpl as hookimpl
    from kvdock.plugin.manifest import API_VERSION as API_VERSION
    from kvdock.plugin.manifest import Capability as Capability
    from kvdock.plugin.manifest import KindSupport as KindSupport
    from kvdock.plugin.manifest import Manifest as Manifest
    from kvdock.plugin.manifest import Scope as Scope
    from kvdock.plugin.manifest import Support as Support
    from kvdock.plugin.manifest import Verdict as Verdict
    from kvdock.plugin.observer import Observer as Observer
    from kvdock.pools.enums import DType as DType
    from kvdock.pools.enums import HitPolicy as HitPolicy
    from kvdock.pools.enums import Layout as Layout
    from kvdock.pools.enums import PoolKind as PoolKind
    from kvdock.pools.enums import Sharding as Sharding
    from kvdock.pools.shard import Shard as Shard
    from kvdock.pools.spec import PoolSpec as PoolSpec
    from kvdock.routing.plan import Plan as Plan
    from kvdock.routing.plan import Route as Route
    from kvdock.routing.plan import plan_routes as plan_routes
    from kvdock.routing.verdicts import RouteOption as RouteOption
    from kvdock.routing.verdicts import RouteRequirements as RouteRequirements
    from kvdock.transfer.attached_pool import AttachedPool as AttachedPool
    from kvdock.transfer.attachment import Attachment as Attachment
    from kvdock.transfer.futures import TransferFuture as TransferFuture
    from kvdock.transfer.leases import Lease as Lease
    from kvdock.transfer.leases import PageLeases as PageLeases
    from kvdock.transfer.manager import TransferManager as TransferManager
    from kvdock.transfer.result import NO_PAGE as NO_PAGE
    from kvdock.transfer.result import TransferResult as TransferResult

__getattr__, __dir__, __all__ = lazy_names(__name__)
