"""The client and threads that the pools of one attachment share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from kvdock_s3.client import ObjectClient
    from kvdock_s3.threads import RequestThreads


@attrs.define(eq=False)
class SharedClient:
    """A client, its threads, and how many pools use them.

    Args:
        client: Makes the requests.
        threads: Make them at once.
        users: Pools that are attached.
    """

    client: ObjectClient
    threads: RequestThreads
    users: int = 0

    def release(self) -> None:
        """Take a pool's leave; the last one ends the threads."""
        self.users -= 1
        if not self.users:
            self.threads.close()
            self.client.close()
