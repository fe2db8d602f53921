"""kvdock: storage of an LLM engine's KV caches, through plugins.

Names load when they are first used, so that `import kvdock` costs next to
nothing and a listing of plugins never imports numpy.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.assembly import Assembly as Assembly
    from kvdock.assembly import Deployment as Deployment
    from kvdock.assembly import assemble as assemble
    from kvdock.batches import Batch as Batch
    from kvdock.batches import BatchResult as BatchResult
    from kvdock.batches import Operation as Operation
    from kvdock.batches import Outcome as Outcome
    from kvdock.budget import HostBudget as HostBudget
    from kvdock.discovery import PluginProblem as PluginProblem
    from kvdock.dock import Backend as Backend
    from kvdock.dock import Dock as Dock
    from kvdock.errors import KvdockError as KvdockError
    from kvdock.errors import NoRoute as NoRoute
    from kvdock.hits import Hits as Hits
    from kvdock.hookspecs import AttachConfig as AttachConfig
    from kvdock.hookspecs import Capacity as Capacity
    from kvdock.hookspecs import Finding as Finding
    from kvdock.hookspecs import HostMemory as HostMemory
    from kvdock.hookspecs import hookimpl as hookimpl
    from kvdock.keys import Namespace as Namespace
    from kvdock.keys import key_suffixes as key_suffixes
    from kvdock.manifest import API_VERSION as API_VERSION
    from kvdock.manifest import Capability as Capability
    from kvdock.manifest import KindSupport as KindSupport
    from kvdock.manifest import Manifest as Manifest
    from kvdock.manifest import Scope as Scope
    from kvdock.manifest import Support as Support
    from kvdock.manifest import Verdict as Verdict
    from kvdock.models import load_model as load_model
    from kvdock.pools import ContextSplit as ContextSplit
    from kvdock.pools import DType as DType
    from kvdock.pools import HitPolicy as HitPolicy
    from kvdock.pools import Layout as Layout
    from kvdock.pools import Part as Part
    from kvdock.pools import Per as Per
    from kvdock.pools import PoolKind as PoolKind
    from kvdock.pools import PoolName as PoolName
    from kvdock.pools import PoolSpec as PoolSpec
    from kvdock.pools import Shard as Shard
    from kvdock.pools import Sharding as Sharding
    from kvdock.regions import Block as Block
    from kvdock.regions import Region as Region
    from kvdock.routing import Needs as Needs
    from kvdock.routing import Plan as Plan
    from kvdock.routing import plan_routes as plan_routes
    from kvdock.sessions import Attachment as Attachment
    from kvdock.sessions import Session as Session

_HOMES = MappingProxyType(
    {
        "assembly": ("Assembly", "Deployment", "assemble"),
        "batches": ("Batch", "BatchResult", "Operation", "Outcome"),
        "budget": ("HostBudget",),
        "discovery": ("PluginProblem",),
        "dock": ("Backend", "Dock"),
        "errors": ("KvdockError", "NoRoute"),
        "hits": ("Hits",),
        "hookspecs": ("AttachConfig", "Capacity", "Finding", "HostMemory", "hookimpl"),
        "keys": ("Namespace", "key_suffixes"),
        "manifest": (
            "API_VERSION",
            "Capability",
            "KindSupport",
            "Manifest",
            "Scope",
            "Support",
            "Verdict",
        ),
        "models": ("load_model",),
        "pools": (
            "ContextSplit",
            "DType",
            "HitPolicy",
            "Layout",
            "Part",
            "Per",
            "PoolKind",
            "PoolName",
            "PoolSpec",
            "Shard",
            "Sharding",
        ),
        "regions": ("Block", "Region"),
        "routing": ("Needs", "Plan", "plan_routes"),
        "sessions": ("Attachment", "Session"),
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
