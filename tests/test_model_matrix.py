"""Every shipped model, with and without its drafts, stored and restored by ranks.

Each cell stores two pages by every rank of one deployment, ends it, and restores
them by every rank of another one over the same store: right bytes, none, or wrong
bytes. Pools keep at most four of their layers; everything else is as in the model.
All cells of a backend share one store, and each has a namespace of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import attrs
import pytest

from kvdock.dock import Dock
from kvdock.errors import KvdockError, PoolError
from kvdock.models.assembly import Assembly, Deployment, assemble
from kvdock.models.description import ModelDescription, load_model, shipped_models
from kvdock.namespace import Namespace
from kvdock.pools import Layout
from kvdock.testing.memory import PageMemory
from kvdock.testing.samples import page_hashes
from kvdock.transfer import Attachment

if TYPE_CHECKING:
    from kvdock.pools import PoolSpec, Shard

PAGES = page_hashes(2)
KEPT_LAYERS = 4

DEPLOYMENTS = {
    "tp1": [Deployment()],
    "layer_first": [Deployment(layout=Layout.LAYER_FIRST)],
    "tp2>tp4": [
        Deployment(tp_size=2, share_tp=(4,), layout=Layout.PAGE_HEAD),
        Deployment(tp_size=4, share_tp=(2,), layout=Layout.PAGE_HEAD),
    ],
    "tp2+pp2": [Deployment(tp_size=2, pp_size=2)],
    "tp2+dcp2": [Deployment(tp_size=2, dcp_size=2)],
}
"""What stores, and what restores where that is another deployment."""

IMPOSSIBLE = "-"
"""The model cannot be deployed like this: its heads and tokens do not divide."""


def rows() -> Iterator[tuple[str, str]]:
    """Yield every model with each of its drafts, and without one."""
    for name in shipped_models():
        for draft in ("", *load_model(name).drafts):
            yield name, draft


def thinned(assembly: Assembly) -> Assembly:
    """Keep the first and the last layers of every pool, some for each stage."""

    def thin(pool: PoolSpec) -> PoolSpec:
        half = KEPT_LAYERS // 2
        kept = {*pool.layers[:half], *pool.layers[-half:]}
        return attrs.evolve(pool, layers=tuple(sorted(kept)))

    return attrs.evolve(assembly, pools=tuple(map(thin, assembly.pools)))


@attrs.frozen
class Store:
    """What all cells of one backend are kept in.

    Args:
        dock: Its plugin.
        backend: Its name.
        settings: Its settings.
    """

    dock: Dock
    backend: str
    settings: Mapping[str, object]


@pytest.fixture(params=["file", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """A backend with an empty store; a server of its own where it needs one."""
    name = request.param
    dock = Dock.load(require=[name])
    servers = metadata.entry_points(group="kvdock.servers", name=name)
    if not servers:
        yield Store(dock, name, {"root": str(tmp_path_factory.mktemp("store"))})
        return
    try:
        pytest.importorskip("kvdock_mooncake.library").load()
    except KvdockError as error:
        pytest.skip(f"{error}")
    (point,) = servers
    with point.load()({}) as (settings, _):
        yield Store(dock, name, settings)


@attrs.frozen(eq=False)
class Rank:
    """One process: its memory, and the store that it is attached to."""

    attachment: Attachment
    memory: dict[str, PageMemory]

    @classmethod
    def of(cls, store: Store, assembly: Assembly, shard: Shard, cell: str) -> Rank:
        plan = store.dock.plan(assembly.pools, shard, [store.backend])
        memory = {
            route.pool.name: PageMemory.of(route.pool, shard, len(PAGES))
            for route in plan.accepted
        }
        attachment = Attachment.open(
            store.dock,
            plan,
            Namespace(model="matrix", salt=cell),
            {name: one.region() for name, one in memory.items()},
            {store.backend: store.settings},
        )
        return cls(attachment, memory)

    def store(self) -> None:
        for memory in self.memory.values():
            for page, name in enumerate(PAGES):
                memory.write(page, name)
        everything = dict.fromkeys(self.memory, range(len(PAGES)))
        self.attachment.put(PAGES, everything)

    def restore(self, pages: int) -> bool:
        """Load pages; return whether all of their bytes are right."""
        wanted = dict.fromkeys(self.memory, range(pages))
        if self.attachment.get(PAGES[:pages], wanted).pages != pages:
            return False
        # Of pools with a window, only the last pages are loaded.
        return all(
            memory.holds(page, PAGES[page], stored)
            for memory in self.memory.values()
            for page in range(pages)
            if not memory.pool.window_pages or page >= pages - memory.pool.window_pages
            for stored in memory.region().objects
        )


def cell(store: Store, model: ModelDescription, draft: str, name: str) -> str:
    """Store, restore, and say what came of it."""
    deployments = DEPLOYMENTS[name]
    try:
        writers, readers = (
            thinned(assemble(model, one, draft=draft))
            for one in (deployments[0], deployments[-1])
        )
    except PoolError:
        return IMPOSSIBLE
    label = f"{model.name} {draft} {name}"
    for shard in writers.shards():
        rank = Rank.of(store, writers, shard, label)
        with rank.attachment:
            rank.store()
    ranks = [Rank.of(store, readers, shard, label) for shard in readers.shards()]
    try:
        # As an engine does it: what every rank can restore.
        found = min(rank.attachment.exists(PAGES).best for rank in ranks)
        if not found:
            return "miss"
        right = [rank.restore(found) for rank in ranks]
        return f"{found} of {len(PAGES)}" if all(right) else "WRONG"
    finally:
        for rank in ranks:
            rank.attachment.close()


@pytest.mark.slow
def test_every_shipped_model_is_restored_after_every_deployment(store: Store) -> None:
    sys.stdout.write(f"\n{store.backend}\n")
    table: list[list[str]] = [["model", "draft", *DEPLOYMENTS]]
    for name, draft in rows():
        model = load_model(name)
        cells = [cell(store, model, draft, one) for one in DEPLOYMENTS]
        table.append([name, draft or "-", *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")
    found = Counter(one for row in table[1:] for one in row[2:])
    # Heads are not divided by token, so these have no tp2+dcp2.
    assert found == {f"{len(PAGES)} of {len(PAGES)}": 99, IMPOSSIBLE: 11}
