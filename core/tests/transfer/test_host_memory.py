"""Memory that a backend brings, under everything that the core puts in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from shelf import (
    PAGES,
    Shelf,
    ShelfPool,
    attention,
    hashes,
    hasty,
    held_by,
    patient,
    until,
)

from kvdock import (
    AttachConfig,
    Attachment,
    Dock,
    HostMemory,
    Manifest,
    Namespace,
    Operation,
    Outcome,
    PoolSpec,
    Region,
    Shard,
    Support,
    hookimpl,
)
from kvdock.errors import AttachError, KvdockError, PluginError
from kvdock.routing.verdicts import RouteRequirements, TransferMode

if TYPE_CHECKING:
    from kvdock.config.core import CoreSettings

GONE = 0xDD
"""What memory holds that was given back."""


@attrs.define(eq=False)
class Brought:
    """One piece of memory, and whether it may still be touched."""

    array: Any
    back: int = 0

    def give_back(self) -> None:
        self.array[:] = GONE
        self.back += 1


@attrs.define(eq=False)
class Bringer(Shelf):
    """A shelf that reaches only what it has brought."""

    wants: bool = True
    pieces: list[Brought] = attrs.field(factory=list)
    order: list[str] = attrs.field(factory=list)

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        plain = super().kvdock_manifest()
        return attrs.evolve(plain, host_allocator=Support.NATIVE)

    @hookimpl
    def kvdock_allocate(self, nbytes: int, config: AttachConfig) -> HostMemory | None:
        del config
        if not self.wants:
            return None
        piece = Brought(np.full(nbytes, 0xAB, np.uint8))
        self.pieces.append(piece)

        def give_back() -> None:
            piece.give_back()
            self.order.append("memory")

        return HostMemory(piece.array, give_back)

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ShelfPool:
        for block in region.blocks if self.wants else ():
            if not any(_holds(piece, block.address) for piece in self.pieces):
                raise KvdockError("memory of another process")
        return super().kvdock_register_pool(pool, region, config)

    def close(self, pool: str) -> None:
        self.order.append("pool")
        super().close(pool)


def _holds(piece: Brought, address: int) -> bool:
    at = int(piece.array.ctypes.data)
    return not piece.back and at <= address < at + len(piece.array)


def opened(shelf: Shelf, core: CoreSettings, memory: object, owner: str) -> Attachment:
    pool = attention()
    dock = Dock({shelf.name: shelf.backend()})
    needs = RouteRequirements(integrity=core.integrity, allocator=owner)
    plan = dock.plan([pool], Shard(), needs=needs)
    region = Region.of(pool, Shard(), [memory], PAGES)
    return Attachment.open(dock, plan, Namespace(model="m"), {"kv": region}, core=core)


def plain_memory() -> Any:
    return np.zeros(PAGES * attention().page_bytes(Shard()), np.uint8)


def there_and_back(attachment: Attachment, memory: Any) -> None:
    view = np.frombuffer(memory, np.uint8)
    view[:] = np.random.default_rng(3).integers(0, 256, len(view), np.uint8)
    wanted = view.copy()
    places = {"kv": np.arange(PAGES)}
    assert attachment.put(hashes(PAGES), places).pages == PAGES
    view[:] = 0
    assert attachment.get(hashes(PAGES), places).pages == PAGES
    assert np.array_equal(view, wanted)


WAYS = list(product(("auto", "off"), ("routed", "always"), (True, False)))


@pytest.mark.parametrize(("integrity", "staging", "brought"), WAYS)
def test_whatever_the_core_needs_lies_in_memory_of_the_backend(
    integrity: str, staging: str, *, brought: bool
) -> None:
    shelf = Bringer()
    core = patient(integrity=integrity, calls={"staging": staging}, self_test=True)
    dock = Dock({"shelf": shelf.backend()})
    memory = dock.allocate("shelf", plain_memory().nbytes) if brought else None
    bytes_ = memory.buffer if memory else plain_memory()
    with opened(shelf, core, bytes_, "shelf" if brought else "") as attachment:
        route = attachment.plan.anchor
        assert (route.mode is TransferMode.ZERO_COPY) == brought
        there_and_back(attachment, bytes_)
        taken = len(shelf.pieces)
    assert [piece.back for piece in shelf.pieces[brought:]] == [1] * (taken - brought)
    assert shelf.order == ["pool"] + ["memory"] * (taken - brought)
    if memory:
        assert not shelf.pieces[0].back, "an engine's memory is the engine's"


def test_a_backend_that_takes_any_memory_is_given_the_cores_own() -> None:
    shelf = Bringer(wants=False)
    memory = plain_memory()
    with opened(shelf, patient(), memory, "shelf") as attachment:
        there_and_back(attachment, memory)
    assert not shelf.pieces


def test_a_late_call_keeps_the_memory_until_it_ends() -> None:
    shelf = Bringer()
    memory = plain_memory()
    attachment = opened(shelf, hasty("get", "close"), memory, "")
    there_and_back(attachment, memory)
    goes_on = threading.Event()

    shelf.trouble = held_by(goes_on, Operation.GET)
    moved = attachment.get(hashes(2), {"kv": [0, 1]})
    assert set(moved.outcomes["kv"]) == {Outcome.TIMEOUT}
    assert not attachment.close()
    assert not any(piece.back for piece in shelf.pieces)
    goes_on.set()
    until(lambda: all(piece.back == 1 for piece in shelf.pieces))
    assert shelf.order[0] == "pool"


def test_an_attachment_that_fails_gives_everything_back() -> None:
    shelf = Bringer()
    memory = plain_memory()
    with pytest.raises(AttachError, match="memory of another process"):
        opened(shelf, patient(), memory, "shelf")
    assert shelf.pieces
    assert all(piece.back == 1 for piece in shelf.pieces)


ANSWERS: dict[str, tuple[Callable[[], object], str]] = {
    "nothing left": (lambda: 1 / 0, "ZeroDivisionError"),
    "an array": (lambda: np.zeros(4, np.uint8), "returned array"),
    "too little": (
        lambda: HostMemory(np.zeros(4, np.uint8), lambda: None),
        "asked for .* bytes and brought 4",
    ),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_backend_that_brings_no_memory_is_an_error_with_its_name(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = ANSWERS[answer]
    shelf = Bringer()
    backend = shelf.backend()
    hooks = backend.plugin.manager.hook
    monkeypatch.setattr(hooks, "kvdock_allocate", lambda **_: make())
    dock = Dock({"shelf": backend})
    pool = attention()
    region = Region.of(pool, Shard(), [plain_memory()], PAGES)
    plan = dock.plan([pool], Shard())
    with pytest.raises(AttachError, match=words) as caught:
        Attachment.open(dock, plan, Namespace(model="m"), {"kv": region})
    assert "'shelf'" in str(caught.value)
    assert "'kv'" in str(caught.value)


class Tensor:
    """Memory by address alone, as torch has it."""

    nbytes = 4

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return 4096


@pytest.mark.parametrize("buffer", [b"four", Tensor()])
def test_what_is_no_memory_is_given_back(
    buffer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, back = Bringer().backend(), list[int]()
    brought = HostMemory(buffer, lambda: back.append(1))
    hooks = backend.plugin.manager.hook
    monkeypatch.setattr(hooks, "kvdock_allocate", lambda **_: brought)
    with pytest.raises(PluginError, match=r"not memory: .*buffer protocol"):
        backend.allocate(4, AttachConfig())
    assert back == [1]


def test_a_batch_that_comes_after_the_end_touches_nothing() -> None:
    """A thread may have taken its pool before the attachment was closed."""
    for staging in ("routed", "always"):
        shelf = Bringer()
        dock = Dock({"shelf": shelf.backend()})
        memory = dock.allocate("shelf", plain_memory().nbytes).buffer
        core = patient(calls={"staging": staging})
        attachment = opened(shelf, core, memory, "shelf")
        attached = attachment.pools_by_name["kv"]
        assert attachment.close()
        before = [piece.array.copy() for piece in shelf.pieces]
        for operation in (Operation.PUT, Operation.GET):
            codes = attached.transfer(operation, hashes(2), np.arange(2), np.inf)
            assert not (codes == Outcome.OK).any()
        for piece, was in zip(shelf.pieces, before, strict=True):
            assert np.array_equal(piece.array, was)
        assert attached.leases.leased_pages == 0


def test_a_self_test_that_comes_after_the_end_touches_nothing() -> None:
    shelf = Bringer()
    attachment = opened(shelf, patient(), plain_memory(), "")
    probe = attachment["kv"].nearest.health_check
    assert all(finding.ok for finding in probe.self_test(5.0))
    assert attachment.close()
    with pytest.raises(KvdockError, match="is closed"):
        probe.self_test(5.0)
    assert all((piece.array == GONE).all() for piece in shelf.pieces)
