from __future__ import annotations

import threading
import time

from kvdock.resilience.pending_deletes import Drops


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_a_key_is_dropped_by_one_deletion_at_a_time() -> None:
    drops = Drops()
    first = drops.begin(["a", "b"], soon())
    second = drops.begin(["b", "c"], soon())
    assert first is not None
    assert first.keys == ("a", "b")
    assert second is not None
    assert second.keys == ("c",)
    assert drops.begin(["a", "c"], soon()) is None
    assert drops.among(["c", "x", "a"]).tolist() == [True, False, True]
    assert drops.end(first)
    assert drops.among(["c", "x", "a"]).tolist() == [True, False, False]
    assert drops.end(second)
    assert not drops


def test_who_waits_goes_on_once_his_keys_are_gone() -> None:
    drops = Drops()
    mine, other = drops.begin(["a"], soon()), drops.begin(["b"], soon())
    assert mine is not None
    assert other is not None
    ending = threading.Timer(0.05, drops.end, (mine,))
    ending.start()
    drops.wait(["a"], soon(5))
    assert drops.among(["a", "b"]).tolist() == [False, True]
    ending.join()


def test_a_deletion_that_hangs_is_given_up_and_told_of_once() -> None:
    drops = Drops()
    hung = drops.begin(["a"], soon(0.05))
    assert drops.overdue() == []
    drops.wait(["a"], soon(5))
    assert not drops.among(["a"]).any()
    assert drops.overdue() == [hung]
    assert drops.overdue() == []
    assert hung is not None
    assert not drops.end(hung)


def test_the_late_end_of_a_deletion_does_not_end_the_next_one() -> None:
    drops = Drops()
    hung = drops.begin(["a", "b"], soon(-1))
    again = drops.begin(["a"], soon())
    assert hung is not None
    assert again is not None
    assert drops.end(hung)
    assert drops.among(["a", "b"]).tolist() == [True, False]
