"""kvdock: storage of an LLM engine's KV caches, through plugins.

Names load when they are first used, so that `import kvdock` costs next to
nothing and a listing of plugins never imports numpy.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.address_ranges import AddressRanges as AddressRanges
    from kvdock.batch import Batch as Batch
    from kvdock.batch import BatchResult as BatchResult
    from kvdock.batch import MemoryHold as MemoryHold
    from kvdock.batch import Operation as Operation
    from kvdock.batch import Outcome as Outcome
    from kvdock.dock import Dock as Dock
    from kvdock.errors import KvdockError as KvdockError
    from kvdock.errors import NoRoute as NoRoute
    from kvdock.hits import Hits as Hits
    from kvdock.keys import key_suffixes as key_suffixes
    from kvdock.models.assembly import Assembly as Assembly
    from kvdock.models.assembly import Deployment as Deployment
    from kvdock.models.assembly import assemble as assemble
    from kvdock.models.description import load_model as load_model
    from kvdock.models.memory_budget import HostBudget as HostBudget
    from kvdock.namespace import Namespace as Namespace
    from kvdock.plugin.backend import Backend as Backend
    from kvdock.plugin.discovery import PluginProblem as PluginProblem
    from kvdock.plugin.hookspecs import AttachConfig as AttachConfig
    from kvdock.plugin.hookspecs import Capacity as Capacity
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
    from kvdock.pools.enums import ContextSplit as ContextSplit
    from kvdock.pools.enums import DType as DType
    from kvdock.pools.enums import HitPolicy as HitPolicy
    from kvdock.pools.enums import Layout as Layout
    from kvdock.pools.enums import Per as Per
    from kvdock.pools.enums import PoolKind as PoolKind
    from kvdock.pools.enums import PoolName as PoolName
    from kvdock.pools.enums import Sharding as Sharding
    from kvdock.pools.part import Part as Part
    from kvdock.pools.shard import Shard as Shard
    from kvdock.pools.spec import PoolSpec as PoolSpec
    from kvdock.region import Block as Block
    from kvdock.region import Region as Region
    from kvdock.routing.plan import Plan as Plan
    from kvdock.routing.plan import plan_routes as plan_routes
    from kvdock.routing.verdicts import RouteRequirements as RouteRequirements
    from kvdock.transfer.attachment import Attachment as Attachment
    from kvdock.transfer.manager import TransferManager as TransferManager

_HOMES = MappingProxyType(
    {
        "address_ranges": ("AddressRanges",),
        "batch": (
            "Batch",
            "BatchResult",
            "MemoryHold",
            "Operation",
            "Outcome",
        ),
        "dock": ("Dock",),
        "errors": (
            "KvdockError",
            "NoRoute",
        ),
        "hits": ("Hits",),
        "keys": ("key_suffixes",),
        "models.assembly": (
            "Assembly",
            "Deployment",
            "assemble",
        ),
        "models.description": ("load_model",),
        "models.memory_budget": ("HostBudget",),
        "namespace": ("Namespace",),
        "plugin.backend": ("Backend",),
        "plugin.discovery": ("PluginProblem",),
        "plugin.hookspecs": (
            "AttachConfig",
            "Capacity",
            "Finding",
            "HostMemory",
            "hookimpl",
        ),
        "plugin.manifest": (
            "API_VERSION",
            "Capability",
            "KindSupport",
            "Manifest",
            "Scope",
            "Support",
            "Verdict",
        ),
        "pools.enums": (
            "ContextSplit",
            "DType",
            "HitPolicy",
            "Layout",
            "Per",
            "PoolKind",
            "PoolName",
            "Sharding",
        ),
        "pools.part": ("Part",),
        "pools.shard": ("Shard",),
        "pools.spec": ("PoolSpec",),
        "region": (
            "Block",
            "Region",
        ),
        "routing.plan": (
            "Plan",
            "plan_routes",
        ),
        "routing.verdicts": ("RouteRequirements",),
        "transfer.attachment": ("Attachment",),
        "transfer.manager": ("TransferManager",),
    }
)
_HOME = MappingProxyType(
    {name: module for module, names in _HOMES.items() for name in names}
)

__all__ = sorted(_HOME)  # noqa: PLE0605 - told once, in _HOMES


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kvdock' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"kvdock.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names without loading them."""
    return __all__
