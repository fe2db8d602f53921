"""Join a cluster: everything between settings and a store that works.

The library waits up to 90 s for a master that is away and, before 0.3.14,
holds the interpreter's lock meanwhile. So the master is looked for first, the
library's own patience is cut down before it is asked, and its answer is waited
for with a deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from kvdock.errors import KvdockError
from kvdock.resilience import LateError, run_within
from kvdock_mooncake.error_codes import MASTER_LOST, sentence_of
from kvdock_mooncake.master import ClusterError
from kvdock_mooncake.preconditions import check_before_setup
from kvdock_mooncake.settings import MooncakeSettings, Protocol, split_address
from kvdock_mooncake.shutdown import STORES
from kvdock_mooncake.teardown import end_store, handshake_ports
from kvdock_mooncake.transfer_limits import TIMEOUTS

if TYPE_CHECKING:
    from kvdock_mooncake.library import Library

log = logging.getLogger("kvdock")

_STANDALONE_BUFFER_BYTES = 16 << 20
_OTHER_RELEASE = (-300, MASTER_LOST[0])
"""What a master of another release answers with: -900 was measured with clients of
0.3.9 to 0.3.11.post1 and a master of 0.3.13.post1. The library's own comparison of
versions (-300) does not notice it, since these releases share one."""

_OURS: dict[str, str] = {}
"""Variables that were set here and not by the user: the next store's are others."""

_SET_UP_BY: list[int] = []
"""The process that set a store up first, as a forked child finds it too."""


def reject_fork() -> None:
    """Reject setting a store up in a child of a process that has set one up.

    The library would wait for threads that the child does not have, with the
    interpreter's lock held: no deadline would end it.
    """
    if _SET_UP_BY and os.getpid() not in _SET_UP_BY:
        raise KvdockError(
            "this process was forked after the Mooncake library was set up",
            fix='Start it with "spawn" (multiprocessing), or attach only in children.',
        )


def own_address(settings: MooncakeSettings) -> str:
    """Return the name under which peers are to reach this process."""
    if settings.host:
        return settings.host
    if "://" in settings.master or not settings.master:
        return socket.gethostname()
    host, port = split_address(settings.master)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only asks which of our addresses leads there.
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def limit_patience(
    settings: MooncakeSettings, environ: MutableMapping[str, str] | None = None
) -> None:
    """Set the library's own limits where the user has not set them.

    The library reads most of them whenever a store is set up, and the level
    of its log when it is loaded.
    """
    environ = os.environ if environ is None else environ
    milliseconds = str(int(settings.rpc_timeout_s * 1000))
    limits = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        # With the default, some 1024 pieces outstanding to one peer make
        # 0.3.13 block for 60 s and leave the store unusable for ever.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_LOG_LEVEL": "ERROR",
    }
    if settings.protocol is Protocol.TCP:
        limits |= TIMEOUTS
    if settings.ssd_offload:
        # By default a bucket is written when it has 256 MB or 500 objects:
        # less than that never reaches the disk and is lost when evicted.
        limits["MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES"] = str(16 << 20)
        limits["MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT"] = "16"
        limits["MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"] = "1"
    for name, value in limits.items():
        if name not in environ or environ[name] == _OURS.get(name):
            environ[name] = _OURS[name] = value


def join(library: Library, settings: MooncakeSettings, spill: str = "") -> Any:  # noqa: ANN401 - the library's own class
    """Set a store up, within `setup_timeout_s`.

    `spill` is the directory for objects that its segment does not hold.

    Raises:
        KvdockError: If the master is away, the library rejects it, or this is a
            forked child.
    """
    reject_fork()
    check_before_setup(library, settings)
    _SET_UP_BY[:] = [os.getpid()]
    return _within(
        settings.setup_timeout_s,
        library.store_class,
        _setup(settings, spill),
        lambda status: _advice(status, library, settings),
    )


def _advice(status: int, library: Library, settings: MooncakeSettings) -> str:
    """Say what to do about the number that a set-up was answered with."""
    if settings.standalone:
        return "Look whether `standalone` names the port of a mooncake_client."
    if status in _OTHER_RELEASE:
        # Its port was reached just before: it listens, and does not understand.
        return (
            f"`master` {settings.master} listens, and does not understand this "
            f"client ({library.wheel}). Give both the same release: the older one of "
            "the two is often the client. Or the port is not the master's RPC port."
        )
    return (
        "Look whether `master` names the RPC port of a mooncake_master of this "
        f"version ({library.wheel}), and at its log; with ssd_offload it needs "
        "-enable_offload."
    )


def _setup(settings: MooncakeSettings, spill: str) -> Callable[[Any], int]:
    """Return the call that sets a store up."""
    if settings.standalone:
        size = settings.standalone_bytes
        address = settings.standalone
        return lambda store: int(
            store.setup_dummy(size, _STANDALONE_BUFFER_BYTES, address)
        )
    options: dict[str, object] = {}
    if spill:
        options["enable_ssd_offload"] = True
        options["ssd_offload_path"] = spill
    if settings.tenant:
        options["tenant_id"] = settings.tenant
    host = own_address(settings)
    return lambda store: int(
        store.setup(
            host,
            settings.metadata_server,
            settings.segment_bytes,
            0,  # only calls that move whole values by themselves need a buffer
            settings.protocol,
            settings.devices,
            settings.master,
            **options,
        )
    )


def _within(
    timeout_s: float,
    make: Callable[[], Any],
    setup: Callable[[Any], int],
    advise: Callable[[int], str],
) -> Any:  # noqa: ANN401 - the library's own class
    """Run a setup in a thread of its own and wait for it.

    `setup` returns 0 or the library's number; `advise` says what to do about that.
    """

    def work() -> tuple[int, Any, frozenset[int]]:
        store = None
        try:
            with STORES.setup():
                before = handshake_ports()
                store = make()
                status = setup(store)
                ports = handshake_ports() - before
            return status, None if status else store, ports
        finally:
            # The traceback of an error would keep it alive, with the memory it lends.
            store = None

    def discard(late: tuple[int, Any, frozenset[int]]) -> None:
        if late[1] is not None:
            STORES.add(*late[1:])
            end_store(late[1])

    what, deadline_s = "joining the Mooncake cluster", time.monotonic() + timeout_s
    try:
        status, store, ports = run_within(deadline_s, work, what, discard)
    except LateError as late:
        fix = "Look at the master's log; setup_timeout_s allows more time."
        raise ClusterError(late.what, fix=fix) from None
    except Exception as error:
        raise ClusterError(
            f"the Mooncake library refused its settings: {error}",
            fix="Check sizes, ssd_path and devices.",
        ) from error
    if not status:
        STORES.add(store, ports)
        return store
    raise ClusterError(
        f"the Mooncake library could not join: {sentence_of(status)}",
        fix=advise(status),
    )
