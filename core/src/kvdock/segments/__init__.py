"""Pages in segment files: one index and layout, exchangeable I/O engines.

For backends that keep bytes in files. Loaded only by plugins that ask for it;
nothing else of the core imports it. Names load when they are first used, so that
a plugin may import this package before numpy is needed.

A backend makes a store and hands it batches:

    where = StoreLocation(root=root, namespace=digest, pool="kv", object_bytes=[4096])
    store = SegmentStore(where, PosixIOEngine(threads=2), StoreLimits())
    store.run(batch)

An I/O engine of another kind inherits from `IOEngine`: see there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.segments.directory_store import DirectoryStore as DirectoryStore
    from kvdock.segments.inspect import Location as Location
    from kvdock.segments.inspect import NamespaceSurvey as NamespaceSurvey
    from kvdock.segments.inspect import PoolSurvey as PoolSurvey
    from kvdock.segments.inspect import clear as clear
    from kvdock.segments.inspect import describe_namespace as describe_namespace
    from kvdock.segments.inspect import gc as gc
    from kvdock.segments.inspect import locate as locate
    from kvdock.segments.inspect import namespaces as namespaces
    from kvdock.segments.inspect import resolve_prefix as resolve_prefix
    from kvdock.segments.io import DEADLINE as DEADLINE
    from kvdock.segments.io import UNREGISTERED as UNREGISTERED
    from kvdock.segments.io import IOEngine as IOEngine
    from kvdock.segments.io import IORequest as IORequest
    from kvdock.segments.io import IOResult as IOResult
    from kvdock.segments.io import Token as Token
    from kvdock.segments.io import address_space as address_space
    from kvdock.segments.io import checksums as checksums
    from kvdock.segments.io import preallocate_file as preallocate_file
    from kvdock.segments.limits import StoreLimits as StoreLimits
    from kvdock.segments.limits import StoreLocation as StoreLocation
    from kvdock.segments.oracle import SegmentOracle as SegmentOracle
    from kvdock.segments.ownership import WriterLiveness as WriterLiveness
    from kvdock.segments.paths import open_file as open_file
    from kvdock.segments.posix_io import PosixIOEngine as PosixIOEngine
    from kvdock.segments.root_check import RootFinding as RootFinding
    from kvdock.segments.root_check import check_root as check_root
    from kvdock.segments.store import SegmentStore as SegmentStore
    from kvdock.segments.store import Usage as Usage
    from kvdock.segments.trial import TrialStore as TrialStore
    from kvdock.segments.usage import cleanup_hint as cleanup_hint
    from kvdock.segments.verify import VerifyReport as VerifyReport
    from kvdock.segments.verify import verify_namespace as verify_namespace

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "directory_store": ("DirectoryStore",),
        "inspect": (
            "Location",
            "NamespaceSurvey",
            "PoolSurvey",
            "clear",
            "describe_namespace",
            "gc",
            "locate",
            "namespaces",
            "resolve_prefix",
        ),
        "io": (
            "DEADLINE",
            "UNREGISTERED",
            "IOEngine",
            "IORequest",
            "IOResult",
            "Token",
            "address_space",
            "checksums",
            "preallocate_file",
        ),
        "limits": (
            "StoreLimits",
            "StoreLocation",
        ),
        "oracle": ("SegmentOracle",),
        "ownership": ("WriterLiveness",),
        "paths": ("open_file",),
        "posix_io": ("PosixIOEngine",),
        "root_check": (
            "RootFinding",
            "check_root",
        ),
        "store": (
            "SegmentStore",
            "Usage",
        ),
        "trial": ("TrialStore",),
        "usage": ("cleanup_hint",),
        "verify": (
            "VerifyReport",
            "verify_namespace",
        ),
    },
)
