from __future__ import annotations

import os

from kvdock.synchronization import ProcessGuard


def test_a_guard_tells_a_forked_child_from_its_process() -> None:
    guard = ProcessGuard()
    child = os.fork()
    if not child:
        # A new guard is the child's own.
        os._exit(int(guard.forked) + 2 * int(ProcessGuard().forked))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert not guard.forked
