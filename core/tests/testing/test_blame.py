"""A failure leads to a line of the plugin, not of the kit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvdock.pools.enums import PoolKind
from kvdock.testing.blame import Blame
from kvdock.testing.harness import Harness
from kvdock.testing.loading import load_backend
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from tiny import Shelf

SOURCE = """
from kvdock import hookimpl
import reference


class Plugin(reference.MemoryReference):
    name = "blamed"

    @hookimpl
    def kvdock_key_suffix(self, pool, shard):
        return self.suffixes(pool, shard)

    @hookimpl
    def kvdock_batch_io(self, store, batch):
        return self.run(store, self.checked(batch))

    def checked(self, batch):
        if batch.operation == "get":
            raise ValueError("broken")
        return batch


plugin = Plugin()
"""


@pytest.fixture
def harness(shelf: Shelf) -> Any:
    shelf.add("blamed", SOURCE, attribute="plugin")
    harness = Harness("blamed", {}, load_backend("blamed"))
    yield harness
    harness.close()


def test_an_error_leads_to_the_innermost_line_of_the_plugin(harness: Harness) -> None:
    blame = Blame.of(harness.backend)
    setup = harness.rig(Sample(kind=PoolKind.MHA).pool())
    with pytest.raises(ValueError, match="broken") as caught:
        setup.get(page_hashes(1))
    assert blame.where(caught.value).endswith("kvdock_blamed.py:19 in checked")


def test_a_wrong_answer_leads_to_the_hook_that_gave_it(harness: Harness) -> None:
    blame = Blame.of(harness.backend)
    setup = harness.rig(Sample(kind=PoolKind.MHA).pool())
    setup.put(page_hashes(1))
    wrong = AssertionError("wrong bytes")
    assert blame.where(wrong).endswith("kvdock_blamed.py:13 in kvdock_batch_io")
    harness.backend.key_suffix(setup.pool, setup.config.shard)
    assert blame.where(wrong).endswith("kvdock_blamed.py:9 in kvdock_key_suffix")
    assert blame.where(None).endswith("kvdock_blamed.py:9 in kvdock_key_suffix")
