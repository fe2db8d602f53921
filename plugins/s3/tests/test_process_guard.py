"""A forked child is told so instead of hanging."""

from __future__ import annotations

import os

import pytest

from kvdock import KvdockError
from kvdock_s3.process_guard import ProcessGuard


def test_the_process_that_used_it_first_may_go_on() -> None:
    guard = ProcessGuard()
    guard.enter()
    guard.enter()


def test_a_forked_child_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = ProcessGuard()
    guard.enter()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(KvdockError, match="was forked"):
        guard.enter()


def test_a_child_of_a_process_that_did_not_use_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = ProcessGuard()
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    guard.enter()
