"""Settings that a cluster cannot fulfil, and what its master says of it."""

from __future__ import annotations

from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from kvdock import Capacity
from kvdock_mooncake import probe_cluster
from kvdock_mooncake.connect import limit_patience
from kvdock_mooncake.master_status import MasterStatus
from kvdock_mooncake.server import start_owner
from kvdock_mooncake.settings import MooncakeSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvdock import Finding

METRICS = """# HELP master_allocated_bytes Bytes
master_allocated_bytes 70
master_total_capacity_bytes 1e+2
segment_total_capacity_bytes{segment="a"} 999
master_total_file_capacity_bytes 9223372036854775807
master_allocated_file_size_bytes 5
"""
ANSWERS: dict[str, tuple[int, str]] = {}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, text = ANSWERS.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def http() -> Iterator[str]:
    """The HTTP side of a master with two segments."""
    ANSWERS.clear()
    ANSWERS.update(
        {
            "/get_all_segments": (200, "10.0.0.1:1\n10.0.0.2:2\n"),
            "/metrics": (200, METRICS),
            "/api/v1/tenant_quotas": (409, ""),
        }
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def wrong(http: str, **given: Any) -> list[Finding]:
    settings = MooncakeSettings(master="127.0.0.1:1", master_http=http, **given)
    found = probe_cluster.probe_cluster(None, settings)  # type: ignore[arg-type]
    return [one for one in found if not one.ok or one.warning]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"preferred_segment": "10.0.0.9:1,self,10.0.0.2:2"},
            "names 10.0.0.9:1, which",
        ),
        ({"replicas": 4}, "has 3 owners of memory with this process"),
        ({"replicas": 3, "segment_bytes": 0}, "has 2 owners"),
        ({"tenant": "blue"}, "tenant 'blue' is ignored"),
        ({"host": "no-such-host.invalid:99"}, "cannot be resolved"),
    ],
)
def test_a_setting_that_cannot_work_is_a_problem_with_its_name(
    http: str, given: dict[str, Any], said: str
) -> None:
    (found,) = wrong(http, **given)
    assert not found.ok
    assert said in found.what
    assert found.hint


def test_settings_that_the_cluster_fulfils_are_not_mentioned(http: str) -> None:
    ANSWERS["/api/v1/tenant_quotas"] = (200, "{}")
    given = {"preferred_segment": "self,10.0.0.1:1", "replicas": 3}
    assert not wrong(http, tenant="blue", host="127.0.0.1", **given)


def test_a_master_without_http_is_a_warning_where_a_setting_needs_it() -> None:
    (found,) = wrong("127.0.0.1:9", replicas=2)
    assert found.warning
    assert "are not checked" in found.what
    assert not wrong("127.0.0.1:9")


def test_the_capacity_of_a_cluster_is_what_its_master_reports(http: str) -> None:
    status = MasterStatus.of(MooncakeSettings(master="h:1", master_http=http))
    assert status is not None
    assert status.capacity() == Capacity(70, 100)
    ANSWERS["/metrics"] = (200, METRICS.replace("9223372036854775807", "50"))
    assert status.capacity() == Capacity(75, 150)
    ANSWERS["/metrics"] = (200, "nonsense")
    assert status.capacity() is None
    assert MasterStatus.of(MooncakeSettings(standalone="h:1")) is None


def test_a_disk_without_room_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil has it
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(9, 8, 1 << 20))
    found = probe_cluster.probe_disk(tmp_path / "spill")
    assert (found.ok, "1.0 MiB free" in found.what) == (False, True)


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_real_master_reports_segments_capacity_and_that_it_takes_no_disks(
    library: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    # One of its own: the shared one has what other tests lend.
    master = serve()
    owner = start_owner(master.address, 64 << 20)
    try:
        settings = MooncakeSettings(
            master=master.address,
            master_http=f"127.0.0.1:{master.http_port}",
            segment_bytes=16 << 20,
            ssd_offload=True,
            ssd_path=str(tmp_path),
            tenant="blue",
        )
        limit_patience(settings)
        status = MasterStatus.of(settings)
        assert status is not None
        assert status.segments()
        assert status.capacity() == Capacity(0, 64 << 20)
        tenant, disk = probe_cluster.probe_cluster(library, settings)
        assert "keeps no tenants apart" in tenant.what
        assert not disk.ok
        assert "SSD offload is on here but off in the master" in disk.what
        assert "-enable_offload" in disk.hint
    finally:
        owner.stop()
