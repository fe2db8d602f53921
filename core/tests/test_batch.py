from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvdock.batch import (
    Batch,
    BatchResult,
    MemoryGate,
    Operation,
    Outcome,
    validate_result,
)
from kvdock.errors import BatchError


def batch(rows: int, *, operation: Operation = Operation.GET) -> Batch:
    keys = [f"ns/{row}.kv" for row in range(rows)]
    addresses = np.arange(rows * 2).reshape(rows, 2)
    return Batch(operation, keys, addresses, np.tile([100, 28], (rows, 1)))


def test_rows_of_memory_must_belong_to_the_keys() -> None:
    with pytest.raises(BatchError, match="2 keys with 3 rows"):
        Batch(Operation.PUT, ["a", "b"], np.zeros((3, 1)), np.zeros((3, 1)))
    with pytest.raises(BatchError, match="not both"):
        Batch(Operation.PUT, ["a"], np.zeros((1, 2)), np.zeros((1, 1)))


def scattered(
    memory: np.ndarray[Any, Any], pieces: int, gate: MemoryGate | None = None
) -> Batch:
    """Return a batch of one key whose pieces lie two bytes apart, and one pads."""
    starts = memory.ctypes.data + 5 * np.arange(pieces + 1)
    sizes = [[3] * pieces + [0]]
    return Batch(Operation.GET, ["a"], [starts], sizes, gate=gate)


@pytest.mark.parametrize("pieces", [1, 2, 33, 2000])
def test_the_bytes_of_a_key_are_taken_and_landed_piece_by_piece(pieces: int) -> None:
    memory = np.zeros(5 * pieces + 5, np.uint8)
    data = np.random.default_rng(pieces).bytes(3 * pieces)
    one = scattered(memory, pieces)
    assert one.land(0, data) is Outcome.OK
    assert one.take(0) == data
    assert one.land(0, memoryview(bytearray(3 * pieces))) is Outcome.OK
    # Between the pieces, and behind them, nothing has changed.
    assert not memory.any()


def test_bytes_of_another_length_are_a_miss_and_touch_nothing() -> None:
    memory = np.zeros(40, np.uint8)
    one = scattered(memory, 4)
    assert one.land(0, b"x" * 11) is Outcome.SHORT
    assert one.land(0, b"x" * 13) is Outcome.LONG
    assert one.land(0, b"") is Outcome.SHORT
    assert not memory.any()


def test_no_bytes_are_moved_behind_a_closed_gate_and_an_open_one_is_left() -> None:
    memory, gate = np.zeros(40, np.uint8), MemoryGate()
    one = scattered(memory, 4, gate)
    assert one.land(0, b"x" * 12) is Outcome.OK
    assert one.take(0) == b"x" * 12
    assert gate.close(time.monotonic()), "a thread is still inside"
    memory[:] = 0
    assert one.land(0, b"x" * 12) is Outcome.TIMEOUT
    assert one.take(0) is None
    assert not memory.any()


def test_an_answer_moves_the_bytes_of_what_is_ok_and_no_others() -> None:
    result = BatchResult.of(batch(3), [Outcome.OK, Outcome.ABSENT, Outcome.OK])
    assert result.nbytes.tolist() == [128, 0, 128]
    assert result.ok.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("nbytes", "outcome"),
    [(127, Outcome.SHORT), (128, Outcome.OK), (129, Outcome.LONG)],
)
def test_a_claim_of_success_is_held_against_the_bytes(
    nbytes: int, outcome: Outcome
) -> None:
    claimed = BatchResult(np.zeros(2, np.uint8), np.array([128, nbytes]))
    assert validate_result(batch(2), claimed).outcomes.tolist() == [Outcome.OK, outcome]


def test_a_longer_answer_does_not_hide_an_earlier_failure() -> None:
    claimed = BatchResult([Outcome.CORRUPT], [500])
    assert validate_result(batch(1), claimed).outcomes.tolist() == [Outcome.CORRUPT]


def test_an_unknown_code_is_an_error_and_not_a_success() -> None:
    strange = BatchResult([0, 77], [128, 128])
    assert validate_result(batch(2), strange).outcomes.tolist() == [
        Outcome.OK,
        Outcome.ERROR,
    ]


@pytest.mark.parametrize(
    "answer", [None, True, [True, True], BatchResult([0], [128]), BatchResult([], [])]
)
def test_what_is_no_answer_per_key_is_refused(answer: object) -> None:
    with pytest.raises(BatchError):
        validate_result(batch(2), answer)


@pytest.mark.parametrize("outcomes", [[True, False], [0.0, 1.0], ["0", "0"]])
def test_an_answer_of_flags_is_no_answer_of_outcomes(outcomes: Any) -> None:
    with pytest.raises(BatchError, match="of type"):
        BatchResult(outcomes, [0, 0])


def test_no_code_becomes_ok_by_being_cut_to_a_byte() -> None:
    result = BatchResult([256, -256, 4096, 0], [0, 0, 0, 0])
    assert result.outcomes.tolist() == [Outcome.ERROR] * 3 + [Outcome.OK]
    assert not len(BatchResult([], []).outcomes)


@pytest.mark.parametrize(
    "operation", [Operation.EXISTS, Operation.DELETE, Operation.CLEAR]
)
def test_what_moves_no_bytes_has_a_row_without_segments_for_each_key(
    operation: Operation,
) -> None:
    batch = Batch(operation, ["a", "b", "c"])
    assert (batch.addresses.shape, batch.sizes.shape) == ((3, 0), (3, 0))
    assert batch.object_bytes.tolist() == [0, 0, 0]
    assert batch.part(1, 3).addresses.shape == (2, 0)
    with pytest.raises(BatchError, match="3 keys with 0 rows"):
        Batch(operation, ["a", "b", "c"], np.zeros((0, 0)), np.zeros((0, 0)))


@pytest.mark.parametrize("operation", [Operation.PUT, Operation.GET])
def test_what_moves_bytes_says_where_they_are(operation: Operation) -> None:
    with pytest.raises(BatchError, match="2 keys with 0 rows"):
        Batch(operation, ["a", "b"])
