"""The example over LMDB holds the contract; it declines every fault of a server."""

import pytest
from repeated import OF_RANKS

from kvdock.testing import BackendContract, Oracle

lmdb = pytest.importorskip("lmdb")


class Library(Oracle):
    """An embedded store has no process that could be taken away."""

    def frozen(self):
        raise NotImplementedError("freeze it: it is a library of this process")

    def stopped(self):
        raise NotImplementedError("stop it: it is a library of this process")


@pytest.mark.slow
@pytest.mark.repeats(*OF_RANKS)
class TestLMDB(BackendContract):
    plugin = "kvdock_lmdb_example.plugin"

    @pytest.fixture
    def config(self, tmp_path):
        return {"root": tmp_path}

    @pytest.fixture
    def oracle(self):
        return Library()
