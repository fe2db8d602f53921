"""Pages are harmed through their backend's hooks alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvdock import Batch, Operation
from kvdock.batches import Outcome
from kvdock_transformers import tamper as tampering
from kvdock_transformers.damage import Harm
from kvdock_transformers.records import PoolRecord
from kvdock_transformers.tamper import Hand, tamper

NBYTES = 4096
KEYS = tuple(f"{'a' * 64}/{page:064x}.kv" for page in range(4))
RECORD = PoolRecord(
    stored=range(4),
    stored_bytes=4 * NBYTES,
    loaded_pages=0,
    loaded_bytes=0,
    window_pages=0,
    draft=False,
    page_bytes=NBYTES,
    ends=(),
    backend="file",
    keys=KEYS,
    object_bytes=NBYTES,
)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, dict[str, object]]:
    return {"file": {"root": str(tmp_path)}}


@contextmanager
def attached(given: dict[str, dict[str, object]]) -> Iterator[Hand]:
    with tampering._attached("file", given["file"], NBYTES) as hand:
        yield hand


def outcome(hand: Hand, key: str) -> Outcome:
    hand.memory[:] = 0
    place = np.array([[hand.memory.ctypes.data]])
    batch = Batch(
        Operation.GET, [key], place, np.array([[NBYTES]]), time.monotonic() + 20
    )
    return Outcome(int(hand.backend.batch_io(hand.handle, batch).outcomes[0]))


def test_each_harm_is_what_the_next_reader_finds(
    given: dict[str, dict[str, object]],
) -> None:
    with attached(given) as hand:
        hand.memory[:] = 7
        assert all(hand.call(Operation.PUT, key, NBYTES) for key in KEYS)
    harms = (Harm.FLIP, Harm.TRUNCATE, Harm.DELETE, Harm.EXTEND)
    targets = [("kv", page, harm) for page, harm in enumerate(harms)]
    damage = tamper({"kv": RECORD}, targets, given)
    assert damage.done == tuple(targets)
    assert damage.lost == {("kv", 0), ("kv", 1), ("kv", 2)}
    assert damage.doubtful == {("kv", 3)}
    with attached(given) as hand:
        assert outcome(hand, KEYS[0]) is Outcome.OK
        assert np.flatnonzero(hand.memory != 7).tolist() == [NBYTES // 2]
        assert outcome(hand, KEYS[1]) is Outcome.SHORT
        assert outcome(hand, KEYS[2]) is Outcome.ABSENT
        assert outcome(hand, KEYS[3]) is Outcome.LONG


def test_a_page_that_is_not_there_is_not_counted(
    given: dict[str, dict[str, object]],
) -> None:
    assert tamper({"kv": RECORD}, [("kv", 1, Harm.FLIP)], given).done == ()


def test_backends_without_settings_are_left_alone() -> None:
    assert tamper({"kv": RECORD}, [("kv", 1, Harm.FLIP)], {}).done == ()
