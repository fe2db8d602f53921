"""Move pages between an engine and its backends: attach, store, load, verify."""

from __future__ import annotations

from kvdock.transfer.attachment import Attachment
from kvdock.transfer.futures import TransferFuture
from kvdock.transfer.leases import Lease, PageLeases
from kvdock.transfer.manager import TransferManager
from kvdock.transfer.result import NO_PAGE, TransferResult

__all__ = [
    "NO_PAGE",
    "Attachment",
    "Lease",
    "PageLeases",
    "TransferFuture",
    "TransferManager",
    "TransferResult",
]
