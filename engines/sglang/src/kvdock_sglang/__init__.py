"""SGLang's storage tier through kvdock.

SGLang loads `KvdockStorage` by name as its `dynamic` storage backend. Importing
this package imports neither SGLang nor torch, so that a command line or a
doctor can look at it where no engine is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock_sglang.storage import KvdockStorage as KvdockStorage

__all__ = ["KvdockStorage"]


def __getattr__(name: str) -> object:
    """Load the storage class, and with it SGLang, when it is asked for."""
    if name != "KvdockStorage":
        raise AttributeError(f"module 'kvdock_sglang' has no attribute {name!r}")
    from kvdock_sglang.storage import KvdockStorage  # noqa: PLC0415 - imports SGLang

    return KvdockStorage
