"""The conformance kit: tests that prove what a backend declares.

Needs the extra `kvdock[testing]`. A plugin's test file:

    from kvdock.testing import BackendContract

    class TestMine(BackendContract):
        plugin = "mine"

Names load when they are first used: `kvdock check` must be able to say that
pytest is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.testing.contract import BackendContract as BackendContract
    from kvdock.testing.contract import FaultContract as FaultContract
    from kvdock.testing.contract.final_tests import SealedError as SealedError
    from kvdock.testing.oracles import Oracle as Oracle

__all__ = ["BackendContract", "FaultContract", "Oracle", "SealedError"]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'kvdock.testing' has no attribute {name!r}")
    if name == "Oracle":
        from kvdock.testing import oracles  # noqa: PLC0415 - see above

        return oracles.Oracle
    from kvdock.testing import contract  # noqa: PLC0415 - needs pytest

    return getattr(contract, name)
