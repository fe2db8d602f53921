"""Pages are harmed through their backend's hooks alone."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import attrs
import numpy as np
import pytest

from kvdock import Batch, BatchResult, Operation, Outcome
from model_demo import damage as tampering
from model_demo.damage import Hand, Harm

NBYTES = 4096
KEYS = tuple(f"{'a' * 64}/{page:064x}.kv" for page in range(3))


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
    monkeypatch.setattr(tampering, "_SOON_S", 0.0)
    return Shelf(dict.fromkeys(KEYS, b"7" * NBYTES))


def hand_of(shelf: Shelf) -> Hand:
    return Hand(cast("Any", shelf), "a handle", np.zeros(NBYTES, np.uint8))


def test_each_harm_is_what_the_next_reader_finds(shelf: Shelf) -> None:
    harms = (Harm.FLIP, Harm.TRUNCATE, Harm.DELETE)
    for key, harm in zip(KEYS, harms, strict=True):
        assert hand_of(shelf).harm(key, NBYTES, harm)
    whole = b"7" * NBYTES
    flipped = shelf.objects[KEYS[0]]
    assert sum(a != b for a, b in zip(flipped, whole, strict=True)) == 1
    assert shelf.objects[KEYS[1]] == whole[: NBYTES // 2]
    assert KEYS[2] not in shelf.objects


def test_a_page_that_is_not_there_is_not_counted(shelf: Shelf) -> None:
    shelf.objects.clear()
    assert not hand_of(shelf).harm(KEYS[1], NBYTES, Harm.FLIP)
