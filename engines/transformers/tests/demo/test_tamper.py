"""Pages are harmed through their backend's hooks alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import attrs
import numpy as np
import pytest

from kvdock import Batch, BatchResult, Operation, Outcome
from kvdock_transformers.demo import damage as tampering
from kvdock_transformers.demo.damage import Hand, Harm, tamper
from kvdock_transformers.demo.records import PoolRecord

NBYTES = 4096
KEYS = tuple(f"{'a' * 64}/{page:064x}.kv" for page in range(4))
RECORD = PoolRecord(
    stored=tuple(range(4)),
    loaded_pages=0,
    page_bytes=NBYTES,
    backend="own",
    keys=KEYS,
    object_bytes=NBYTES,
)


@attrs.frozen
class Shelf:
    """Objects of a backend that keeps no files."""

    objects: dict[str, bytes] = attrs.field(factory=dict)

    def batch_io(self, handle: object, batch: Batch) -> BatchResult:
        assert handle == "a handle"
        (key,) = batch.keys
        return BatchResult.of(batch, [self.answer(key, batch)])

    def answer(self, key: str, batch: Batch) -> Outcome:
        if batch.operation is Operation.PUT:
            address, nbytes = int(batch.addresses[0, 0]), int(batch.sizes[0, 0])
            self.objects.setdefault(key, ctypes.string_at(address, nbytes))
        elif key not in self.objects:
            return Outcome.ABSENT
        elif batch.operation is Operation.DELETE:
            del self.objects[key]
        elif batch.operation is Operation.GET:
            ctypes.memmove(int(batch.addresses[0, 0]), self.objects[key], NBYTES)
        return Outcome.OK


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    backend: Any = Shelf(dict.fromkeys(KEYS, b"7" * NBYTES))

    @contextmanager
    def attached(name: str, given: object, nbytes: int) -> Iterator[Hand]:
        assert (name, given) == ("own", {"a": 1})
        yield Hand(backend, "a handle", np.zeros(nbytes, np.uint8))

    monkeypatch.setattr(tampering, "_attached", attached)
    monkeypatch.setattr(tampering, "_SOON_S", 0.0)
    return cast("Shelf", backend)


GIVEN = {"own": {"a": 1}}


def test_each_harm_is_what_the_next_reader_finds(shelf: Shelf) -> None:
    harms = (Harm.FLIP, Harm.TRUNCATE, Harm.DELETE, Harm.EXTEND)
    targets = [("kv", page, harm) for page, harm in enumerate(harms)]
    damage = tamper({"kv": RECORD}, targets, GIVEN)
    assert damage.done == tuple(targets)
    assert damage.lost == {("kv", 0), ("kv", 1), ("kv", 2)}
    assert damage.doubtful == {("kv", 3)}
    whole = b"7" * NBYTES
    flipped = shelf.objects[KEYS[0]]
    assert sum(a != b for a, b in zip(flipped, whole, strict=True)) == 1
    assert shelf.objects[KEYS[1]] == whole[: NBYTES // 2]
    assert KEYS[2] not in shelf.objects
    assert shelf.objects[KEYS[3]].startswith(whole)
    assert len(shelf.objects[KEYS[3]]) > NBYTES


def test_a_page_that_is_not_there_is_not_counted(shelf: Shelf) -> None:
    shelf.objects.clear()
    assert tamper({"kv": RECORD}, [("kv", 1, Harm.FLIP)], GIVEN).done == ()


def test_backends_without_settings_are_left_alone(shelf: Shelf) -> None:
    assert tamper({"kv": RECORD}, [("kv", 1, Harm.FLIP)], {}).done == ()
    assert set(shelf.objects) == set(KEYS)
