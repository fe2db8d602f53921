"""Connections to the server are made once, and used again."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from object_server import ObjectServer

if TYPE_CHECKING:
    from kvdock_s3.client import ObjectClient

THREADS = 2
AT_ONCE = 4
"""Requests under way at once where each thread waits for an idle connection."""
ROUNDS = 8
LONG_S = 60.0


@pytest.mark.slow
def test_more_connections_than_threads_are_kept_and_used_again(
    client: Callable[..., ObjectClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    serve, answer = ObjectServer._serve, ObjectServer._answer
    together = Barrier(AT_ONCE, timeout=LONG_S)

    def counted(self: ObjectServer, connection: Any) -> None:
        made.append(connection)
        serve(self, connection)

    def answered(self: ObjectServer, connection: Any, request: Any) -> None:
        if request.method == "GET":
            together.wait()
        answer(self, connection, request)

    mine = client(threads=THREADS)
    mine.put("page", [b"bytes"], time.monotonic() + LONG_S)
    monkeypatch.setattr(ObjectServer, "_serve", counted)
    monkeypatch.setattr(ObjectServer, "_answer", answered)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(ROUNDS):
            until = time.monotonic() + LONG_S
            got = pool.map(lambda _: mine.get("page", 5, until), range(AT_ONCE))  # noqa: B023
            assert [bytes(one) for one in got] == [b"bytes"] * AT_ONCE
    # What was made beside those that were not idle yet is kept as well.
    assert len(made) <= THREADS * 4, "connections are closed and made again"
