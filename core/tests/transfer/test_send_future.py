from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import numpy as np

from kvdock.batch import Outcome
from kvdock.transfer.messages import Ticket
from kvdock.transfer.send_future import SendFuture

if TYPE_CHECKING:
    from kvdock.transfer.leases import Lease


def test_a_send_is_quiet_only_once_its_pages_are_free() -> None:
    ticket = Ticket(request="r", sender=0, digests=False, pools={})
    future = SendFuture(ticket, ("kv",), time.monotonic() + 60)
    seen: list[bool] = []

    class Watching:
        def end(self) -> None:
            seen.append(future.quiet)

    future.on_quiet(lambda: seen.append(future.quiet))
    future.hold(cast("Lease", Watching()))
    assert future.start()
    future.finish(np.array([Outcome.OK], np.uint8))
    assert seen == [False, True]
    assert future.wait_quiet(0)
