"""Pages in segment files: one index and layout, exchangeable I/O engines.

For backends that keep bytes in files. Names load when they are first used, so that
a plugin may import this package before numpy is needed.

A backend makes a store and hands it batches:

    where = StoreLocation(root=root, namespace=digest, pool="kv", object_bytes=[4096])
    store = SegmentStore(where, PosixIOEngine(threads=2), SegmentSettings(root=root))
    store.run(batch)

An I/O engine of another kind inherits from `IOEngine`: see there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.native import address_space as address_space
    from kvdock.native import checksums as checksums
    from kvdock_segments.directory_store import DirectoryStore as DirectoryStore
    from kvdock_segments.io import DEADLINE as DEADLINE
    from kvdock_segments.io import UNREGISTERED as UNREGISTERED
    from kvdock_segments.io import IOEngine as IOEngine
    from kvdock_segments.io import IORequest as IORequest
    from kvdock_segments.io import IOResult as IOResult
    from kvdock_segments.io import Token as Token
    from kvdock_segments.limits import StoreLocation as StoreLocation
    from kvdock_segments.opening import open_store as open_store
    from kvdock_segments.oracle import SegmentOracle as SegmentOracle
    from kvdock_segments.ownership import WriterLiveness as WriterLiveness
    from kvdock_segments.paths import open_data as open_data
    from kvdock_segments.paths import open_file as open_file
    from kvdock_segments.posix_io import PosixIOEngine as PosixIOEngine
    from kvdock_segments.root_check import RootFinding as RootFinding
    from kvdock_segments.root_check import check_root as check_root
    from kvdock_segments.settings import SegmentSettings as SegmentSettings
    from kvdock_segments.store import SegmentStore as SegmentStore
    from kvdock_segments.store import Usage as Usage
    from kvdock_segments.trial import TrialStore as TrialStore
    from kvdock_segments.usage import cleanup_hint as cleanup_hint
    from kvdock_segments.walk import Location as Location
    from kvdock_segments.walk import locate as locate

__getattr__, __dir__, __all__ = lazy_names(__name__)
