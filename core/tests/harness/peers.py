"""Processes that send pages to each other, over the reference of the kit.

What a token holds is kept in a canonical pool: one rank, one token a page, and
every layer for itself. Each peer, however it divides and orders its pages, is
filled from there and read back to there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
from peer_reference import PeerReference

from kvdock.config.core import CoreSettings
from kvdock.config.schema import structure
from kvdock.dock import Dock
from kvdock.geometry.matching import coalesce, match, move
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace
from kvdock.peers.transfers import PeerTransfers
from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import Candidate
from kvdock.plugin.loading import accept
from kvdock.pools.enums import Layout, Per
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import RouteRequirements
from kvdock.transfer.attachment import Attachment

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray, Int64Array
    from kvdock.geometry.grid import Grid
    from kvdock.pools.spec import PoolSpec

LONG_S = 60.0
"""A deadline that no test waits for."""


def settings(**given: Any) -> CoreSettings:
    """Patient settings of the core, some of them changed."""
    patient = dict.fromkeys(("send", "attach", "release", "close"), LONG_S)
    deadlines = {**patient, **given.pop("deadlines", {})}
    found: CoreSettings = structure(
        CoreSettings, {"deadlines": deadlines, **given}, where="test"
    )
    return found


def backend(plugin: PeerReference) -> Backend:
    """Load a plugin as discovery would, without an entry point."""
    candidate = Candidate(
        name=plugin.name, value="peers", distribution="tests", version="0"
    )
    return Backend(accept(plugin, candidate))


@attrs.define(eq=False)
class Peer:
    """One process's pools, attached to a backend with transfers to peers."""

    pools: Sequence[PoolSpec]
    pages: int = 16
    shard: Shard = attrs.field(factory=Shard)
    core: CoreSettings = attrs.field(factory=settings)
    plugin: PeerReference = attrs.field(factory=PeerReference)
    namespace: Namespace = attrs.field(factory=lambda: Namespace(model="m"))
    observers: Sequence[object] = ()
    memory: dict[str, ByteArray] = attrs.field(init=False)
    attachment: Attachment = attrs.field(init=False)
    transfers: PeerTransfers = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        loaded = backend(self.plugin)
        for observer in self.observers:
            loaded.plugin.manager.register(observer)
        dock = Dock({self.plugin.name: loaded})
        plan = dock.plan(self.pools, self.shard, needs=RouteRequirements(peers=True))
        self.memory = {
            pool.name: np.zeros(pool.page_bytes(self.shard) * self.pages, np.uint8)
            for pool in self.pools
        }
        regions = {
            pool.name: Region.of(
                pool,
                self.shard,
                [self.memory[pool.name]] if pool.physical else [],
                self.pages,
            )
            for pool in self.pools
        }
        self.attachment = Attachment.open(
            dock, plan, self.namespace, regions, core=self.core
        )
        self.transfers = PeerTransfers(self.attachment)

    def grid(self, pool: str) -> Grid:
        return self.transfers.pools[pool].grid

    def fill(self, content: Content, where: Mapping[str, npt.ArrayLike]) -> None:
        """Write what tokens hold into pages; `where` as for `send`."""
        for name, pages in where.items():
            grid = self.grid(name)
            own = np.asarray(pages, np.int64)
            count = content.counts[name]
            number = np.arange(count)
            slots = own[: len(number)]
            if grid.per is Per.TOKEN:
                page = own[number // grid.page_tokens]
                slots = page * grid.page_tokens + number % grid.page_tokens
                slots = np.where(page < 0, -1, slots)
            move(coalesce(match(content.grids[name], grid, number, slots)))

    def read(self, content: Content, slots: Mapping[str, npt.ArrayLike]) -> Content:
        """Return what the slots of a request hold."""
        found = content.blank()
        for name, given in slots.items():
            grid = self.grid(name)
            own = np.asarray(given, np.int64)
            number = np.arange(len(own))
            rows = match(found.grids[name], grid, number, own)
            move(coalesce(attrs.evolve(rows, local=rows.remote, remote=rows.local)))
        return found

    def close(self) -> None:
        assert self.attachment.close(LONG_S)


@attrs.define(eq=False)
class Content:
    """What every token of a request holds, in canonical pools."""

    pools: Sequence[PoolSpec]
    tokens: int
    states: int = 1
    seed: int | None = 0
    counts: dict[str, int] = attrs.field(init=False)
    memory: dict[str, ByteArray] = attrs.field(init=False)
    grids: dict[str, Grid] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.counts, self.memory, self.grids = {}, {}, {}
        for number, pool in enumerate(self.pools):
            by_page = {part.per for part in pool.parts} == {Per.PAGE}
            count = self.states if by_page else self.tokens
            one = attrs.evolve(pool, page_tokens=1, layout=Layout.LAYER_FIRST)
            nbytes = one.page_bytes(Shard()) * max(1, count)
            memory = np.zeros(nbytes, np.uint8)
            if self.seed is not None:
                rng = np.random.default_rng([self.seed, number])
                memory[:] = rng.integers(1, 256, nbytes)
            grid = Region.of(one, Shard(), [memory], max(1, count)).grid
            assert grid is not None
            self.counts[pool.name], self.memory[pool.name] = count, memory
            self.grids[pool.name] = grid

    def blank(self) -> Content:
        return Content(self.pools, self.tokens, self.states, seed=None)

    def equals(self, other: Content, *pools: str) -> bool:
        names = pools or tuple(self.memory)
        return all((self.memory[n] == other.memory[n]).all() for n in names)


def pages_for(
    tokens: int, page_tokens: int, rng: np.random.Generator, pages: int
) -> Int64Array:
    """Choose pages for so many tokens."""
    return rng.permutation(pages)[: -(-tokens // page_tokens)].astype(np.int64)


def slots_for(
    kind: str, tokens: int, room: int, rng: np.random.Generator
) -> Int64Array:
    """Choose slots: "contiguous", in "runs" of 8, or "scattered"."""
    if kind == "contiguous":
        return int(rng.integers(0, room - tokens + 1)) + np.arange(tokens)
    if kind == "runs":
        starts = rng.permutation(room // 8)[: -(-tokens // 8)] * 8
        return (starts[:, None] + np.arange(8)).ravel()[:tokens]
    return rng.permutation(room)[:tokens].astype(np.int64)
