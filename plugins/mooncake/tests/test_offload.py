"""More pages than the segment holds: the rest is on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvdock import Outcome
from kvdock.errors import KvdockError
from kvdock_mooncake.settings import MooncakeSettings

pytestmark = pytest.mark.mooncake

OK = Outcome.OK
PAGES = 192
MASTER = (
    "-enable_offload=true",
    "-offload_on_evict=true",
    "-eviction_high_watermark_ratio=0.5",
    "-eviction_ratio=0.2",
    "-client_ttl=3",
)
ENVIRON = {
    "PEER_ROW_BYTES": str(1 << 20),
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(256 << 20),
}


def spilling(start_peer: Any, address: str, folder: Path) -> Any:
    return start_peer(
        environ=ENVIRON,
        master=address,
        segment_bytes="64 MiB",
        ssd_offload=True,
        ssd_path=str(folder),
        full_wait_s=10,
        client_ttl_s=4,
    )


@pytest.mark.slow
def test_what_spills_is_read_back_and_most_of_it_outlives_its_owner(
    serve: Any, start_peer: Any, eventually: Any, tmp_path: Path
) -> None:
    address = serve(*MASTER).address
    peer = spilling(start_peer, address, tmp_path)
    pages = (0, PAGES)

    def stored() -> Any:
        told = peer.ask(do="put", pages=pages)["outcomes"]
        return told.count(OK) == PAGES

    eventually(stored, within_s=90)
    written = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert written > 64 << 20
    told = peer.ask(do="get", pages=pages)
    assert (told["outcomes"].count(OK), told["wrong"]) == (PAGES, 0)

    peer.kill()
    again = spilling(start_peer, address, tmp_path)

    def most() -> Any:
        told = again.ask(do="get", pages=pages)
        assert told["wrong"] == 0
        return told["outcomes"].count(OK) > PAGES // 2

    eventually(most, within_s=60)


@pytest.mark.slow
def test_spilling_to_a_master_that_does_not_offload_is_refused(
    attached: Any, master: Any, tmp_path: Path
) -> None:
    settings = MooncakeSettings(
        master=master.address,
        segment_bytes=16 << 20,
        ssd_offload=True,
        ssd_path=str(tmp_path),
    )
    with pytest.raises(KvdockError, match="off in the master") as told:
        attached(settings)
    assert "-enable_offload" in told.value.fix
