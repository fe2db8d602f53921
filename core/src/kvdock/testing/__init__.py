"""The conformance kit: what makes a stranger's backend trustworthy.

Needs the extra `kvdock[testing]`. A plugin's test file:

    from kvdock.testing import BackendContract

    class TestMine(BackendContract):
        plugin = "mine"
"""

from __future__ import annotations

import pytest

# Before the tests are imported: their assertions then explain themselves.
pytest.register_assert_rewrite(
    "kvdock.testing.contract", "kvdock.testing.memory", "kvdock.testing.rigs"
)

from kvdock.testing.contract import BackendContract, FaultContract, SealedError  # noqa: E402
from kvdock.testing.oracles import Oracle  # noqa: E402

__all__ = ["BackendContract", "FaultContract", "Oracle", "SealedError"]
