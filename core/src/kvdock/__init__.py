"""kvdock: storage of an LLM engine's KV caches, through plugins.

Names load when they are first used, so that `import kvdock` costs next to
nothing and a listing of plugins never imports numpy.

Public are this package and the modules that the reference describes, page
"Python API". Others may change without notice.
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
    from kvdock.geometry.address_ranges import AddressRanges as AddressRanges
    from kvdock.geometry.peer_rows import send_rows as send_rows
    from kvdock.geometry.region import Block as Block
    from kvdock.geometry.region import Region as Region
    from kvdock.geometry.region import block_of as block_of
    from kvdock.hits import Hits as Hits
    from kvdock.hits import evaluate as evaluate
    from kvdock.keys import adapter_hashes as adapter_hashes
    from kvdock.keys import build_keys as build_keys
    from kvdock.keys import check_hashes as check_hashes
    from kvdock.keys import key_suffixes as key_suffixes
    from kvdock.models.assembly import Assembly as Assembly
    from kvdock.models.assembly import Deployment as Deployment
    from kvdock.models.assembly import assemble as assemble
    from kvdock.models.description import load_model as load_model
    from kvdock.models.memory_budget import HostBudget as HostBudget
    from kvdock.namespace import Namespace as Namespace
    from kvdock.namespace import canonical as canonical
    from kvdock.peers.expectation import Expectation as Expectation
    from kvdock.peers.expectation import PeerState as PeerState
    from kvdock.peers.expectation import RequestState as RequestState
    from kvdock.peers.messages import Completion as Completion
    from kvdock.peers.messages import Offer as Offer
    from kvdock.peers.messages import Ticket as Ticket
    from kvdock.peers.send_future import SendFuture as SendFuture
    from kvdock.peers.tickets import TicketError as TicketError
    from kvdock.peers.transfers import BusyError as BusyError
    from kvdock.peers.transfers import PeerTransfers as PeerTransfers
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
    from kvdock.pools.enums import ContextSplit as ContextSplit
    from kvdock.pools.enums import DType as DType
    from kvdock.pools.enums import HitPolicy as HitPolicy
    from kvdock.pools.enums import Layout as Layout
    from kvdock.pools.enums import Per as Per
    from kvdock.pools.enums import PoolKind as PoolKind
    from kvdock.pools.enums import PoolName as PoolName
    from kvdock.pools.enums import Sharding as Sharding
    from kvdock.pools.layout import stored_objects as stored_objects
    from kvdock.pools.part import Part as Part
    from kvdock.pools.rows import RowLayout as RowLayout
    from kvdock.pools.shard import Shard as Shard
    from kvdock.pools.sharing import sharing_limits as sharing_limits
    from kvdock.pools.spec import PoolSpec as PoolSpec
    from kvdock.routing.plan import Plan as Plan
    from kvdock.routing.plan import Route as Route
    from kvdock.routing.plan import plan_routes as plan_routes
    from kvdock.routing.verdicts import RouteOption as RouteOption
    from kvdock.routing.verdicts import RouteRequirements as RouteRequirements
    from kvdock.strict_enum import StrictEnum as StrictEnum
    from kvdock.throttled_log import ThrottledLog as ThrottledLog
    from kvdock.transfer.attached_pool import AttachedPool as AttachedPool
    from kvdock.transfer.attachment import Attachment as Attachment
    from kvdock.transfer.futures import TransferFuture as TransferFuture
    from kvdock.transfer.leases import Lease as Lease
    from kvdock.transfer.leases import PageLeases as PageLeases
    from kvdock.transfer.manager import TransferManager as TransferManager
    from kvdock.transfer.result import NO_PAGE as NO_PAGE
    from kvdock.transfer.result import TransferResult as TransferResult

__getattr__, __dir__, __all__ = lazy_names(__name__)
