"""Host memory that a backend allocates, where it reaches no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvdock.plugin.hookspecs import AttachConfig
from kvdock.plugin.manifest import Capability, Support
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import RouteRequirements, from_manifest
from kvdock.testing.cases import contract_test, graded
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from kvdock.plugin.hookspecs import HostMemory
    from kvdock.testing.harness import Harness

PAGES = page_hashes(6)
NBYTES = 12345
JUNK = 0x5A


def takes_any(harness: Harness) -> bool:
    """Return whether the plugin accepts any memory."""
    backend = harness.backend
    allocates, pool, shard = Capability.HOST_ALLOCATOR, harness.any_pool(), Shard()
    said = backend.check_capability(
        allocates, pool, shard, backend.settings(harness.settings)
    )
    if said is None:
        said = from_manifest(
            allocates, pool, shard, backend.manifest, RouteRequirements()
        )
    return bool(said)


def allocated(harness: Harness, nbytes: int = NBYTES) -> HostMemory | None:
    """Ask the plugin for memory as an engine does."""
    backend = harness.backend
    config = AttachConfig(settings=backend.settings(harness.settings))
    return backend.allocate(nbytes, config)


class MemoryTests:
    """Memory is allocated and accepted as declared."""

    @contract_test(graded("host_allocator"))
    def test_memory_is_brought_where_no_other_will_do(
        self, harness: Harness, case: Support
    ) -> None:
        any_memory = takes_any(harness)
        assert case or any_memory, "its verdict says what its manifest denies"
        memory = allocated(harness)
        if any_memory:
            assert memory is None, "it brings memory, although any will do"
        else:
            assert memory is not None, "only its own memory will do, and it brings none"
            view = np.frombuffer(memory.buffer, np.uint8)
            view[:] = JUNK
            assert (view == JUNK).all()
            memory.give_back()
        # The rig takes what is brought, and otherwise plain memory.
        setup = harness.plain()
        setup.kept(PAGES)

    @contract_test(graded("host_allocator"))
    def test_memory_that_was_given_back_stays_until_its_pool_is_released(
        self, harness: Harness, case: Support
    ) -> None:
        if not case or takes_any(harness):
            pytest.skip("with these settings any memory will do")
        setup = harness.plain()
        setup.stored(PAGES)
        setup.give_back()
        setup.memory.blank(*setup.own)
        others = [allocated(harness, len(block)) for block in setup.memory.blocks * 2]
        for other in others:
            assert other is not None
            np.frombuffer(other.buffer, np.uint8)[:] = JUNK
        setup.memory.check_untouched((), *setup.own)
        setup.loaded(PAGES)
        setup.stored(page_hashes(2, "more"))
        setup.release()
        for other in others:
            if other is not None:
                assert (np.frombuffer(other.buffer, np.uint8) == JUNK).all()
                other.give_back()
        again = harness.plain()
        again.kept(page_hashes(2, "again"))
