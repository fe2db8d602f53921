"""The contract of a backend, as tests that its author inherits.

PYTEST_DONT_REWRITE: this module has no assertions, and the rewriting of its
package, which it asks for, would come too late for itself.
"""

from __future__ import annotations

import sys

import pytest

# Before the tests are imported: their assertions then explain themselves.
pytest.register_assert_rewrite(
    *{
        __name__,
        "kvdock.testing.memory",
        "kvdock.testing.harness",
        "kvdock.testing.trial_engine",
    }
    - ({*sys.modules} - {__name__})
)

from kvdock.testing.contract.away import AwayTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.damage import DamageTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.declared import DeclaredTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.expiry import ExpiryTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.faulty import FaultTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.final_tests import SealedError  # noqa: E402 - after the rewriting
from kvdock.testing.contract.keys import KeyTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.late import LateTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.lifecycle import LifecycleTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.limits import LimitTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.memory import MemoryTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.neighbours import NeighbourTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.pages import PageTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.peers import PeerTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.races import RaceTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.reports import ReportTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.retention import RetentionTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.sharding import RankTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.stateful import MachineTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.suite import Suite, groups, proofs, slow_tests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.tenants import TenantTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.tiers import TierTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.write_faults import WriteFaultTests  # noqa: E402 - after the rewriting
from kvdock.testing.contract.writes import WriteTests  # noqa: E402 - after the rewriting

__all__ = [
    "BackendContract",
    "FaultContract",
    "SealedError",
    "TierContract",
    "groups",
    "proofs",
    "slow_tests",
]


class BackendContract(
    DeclaredTests,
    KeyTests,
    PageTests,
    WriteTests,
    RankTests,
    RaceTests,
    DamageTests,
    AwayTests,
    LimitTests,
    WriteFaultTests,
    LateTests,
    LifecycleTests,
    NeighbourTests,
    MemoryTests,
    PeerTests,
    ReportTests,
    RetentionTests,
    TenantTests,
    ExpiryTests,
    MachineTests,
    Suite,
    sealed=True,
):
    """Inherit, name the plugin, give it settings: the tests come by themselves.

    A whole test file::

        class TestMine(BackendContract):
            plugin = "mine"

            @pytest.fixture
            def config(self, tmp_path):
                return {"root": str(tmp_path)}

    Each test function gets a store that no other test has used. A test that
    your backend cannot pass yet is overridden by one that says so::

            @pytest.mark.xfail(reason="the server has no delete, issue 12")
            def test_a_deleted_page_is_gone_and_can_be_stored_again(self): ...

    Any other override is rejected: one without a reason, one with a condition,
    one from another base class, a mark on the whole class. An override that
    passes fails, whatever pytest's settings say.
    """


class FaultContract(FaultTests, Suite, sealed=True):
    """The same for the core over the backend, while faults are injected."""


class TierContract(TierTests, Suite, sealed=True):
    """A chain of backends, or of instances of one.

    `tiers` has their names, near first, and `config` the settings of each, with
    `plugin` where the name is that of an instance. `oracle` is that of the last tier.
    """
