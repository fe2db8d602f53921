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

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.testing.contract import BackendContract as BackendContract
    from kvdock.testing.contract import FaultContract as FaultContract
    from kvdock.testing.contract import TierContract as TierContract
    from kvdock.testing.contract.final_tests import SealedError as SealedError
    from kvdock.testing.loading import oracle_of as oracle_of
    from kvdock.testing.oracles import Oracle as Oracle
    from kvdock.testing.report import CheckReport as CheckReport
    from kvdock.testing.report import check as check
    from kvdock.testing.subprocess import FinishedRun as FinishedRun
    from kvdock.testing.subprocess import Progress as Progress

__getattr__, __dir__, __all__ = lazy_names(__name__)
