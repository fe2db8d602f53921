"""`kvdock top`: what an engine's metrics say of its storage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from golden import check_report
from prometheus_client import CollectorRegistry, generate_latest

from kvdock import Operation, Outcome
from kvdock.capacity import TenantUse
from kvdock.errors import KvdockError, SettingsError
from kvdock.events import (
    BatchEnded,
    BreakerMoved,
    CallsBehind,
    Event,
    LoadDecided,
    Origin,
    PagesCopied,
    PagesHeld,
    PagesRestored,
    PoolRouted,
    StoreFilled,
)
from kvdock.observers.metrics import Metrics
from kvdock_cli.commands.top import top
from kvdock_cli.exposition import Samples, fetch
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports import top as report

GIB = 1 << 30


def batch(operation: Operation, nbytes: int = 0, **outcomes: int) -> BatchEnded:
    ended = {Outcome[name.upper()]: count for name, count in outcomes.items()}
    return BatchEnded(
        backend="file", pool="kv", operation=operation, outcomes=ended,
        nbytes=nbytes, seconds=0.1,
    )  # fmt: skip


def exposed(*events: Event, ranks: int = 2) -> str:
    """Return what an engine of some ranks serves after these events in each."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for rank in range(ranks):
        for event in events:
            metrics.kvdock_observe(event, Origin(rank=f"tp{rank}", model='a"b'))
    return generate_latest(registry).decode()


GOOD = (
    PoolRouted(pool="kv", backend="file", enabled=True, reason="zero copy"),
    batch(Operation.EXISTS, ok=3, absent=1),
    batch(Operation.GET, nbytes=GIB, ok=3),
    BreakerMoved(backend="file", operation=Operation.GET, state="closed"),
    PagesHeld(pool="kv", pages=24, leased=1),
    StoreFilled(backend="file", used_bytes=48, limit_bytes=50),
    PagesRestored(pages={"kv": 3}, target=3, draft=None),
)
BAD = (
    *GOOD,
    PoolRouted(pool="draft", backend="", enabled=False, reason="none takes it"),
    batch(Operation.GET, corrupt=2),
    BreakerMoved(backend="file", operation=Operation.PUT, state="open"),
    CallsBehind(backend="file", calls=4),
)


def viewed(now: Samples, before: Samples | None = None) -> report.View:
    """Return the view of an engine; rates are over two seconds."""
    last = report.Look("u", 1.0, before) if before else None
    return report.view_of(report.Look("u", 3.0, now), last)


def test_ranks_are_summed_up() -> None:
    view = viewed(Samples(exposed(*GOOD)))
    (pool,), (backend,) = view["pools"], view["backends"]
    assert (pool["looked_up"], pool["found"], pool["restored_pages"]) == (8, 6, 6)
    assert (pool["pages"], pool["leased"], pool["stored"]) == (48, 2, True)
    assert backend["read_bytes"] == 2 * GIB
    # One store, seen by two ranks.
    assert (backend["used_bytes"], backend["limit_bytes"]) == (48, 50)
    assert report.report([view]).as_data()["ok"] is True


def test_what_is_wrong_is_shown_and_is_not_ok() -> None:
    view = viewed(Samples(exposed(*BAD)))
    shown = report.report([view]).text()
    assert "put open" in shown
    assert "96% of 50 B" in shown
    draft, kv = view["pools"]
    assert (draft["stored"], kv["wrong"]) == (False, 4)
    assert report.report([view]).as_data()["ok"] is False


def decided(choice: str, pace: float, rate: float) -> LoadDecided:
    return LoadDecided(
        request="r", choice=choice, acted=True, found=4, pages=4, wait_s=0.0,
        load_s=1.0, compute_s=1.0, tokens_per_s=pace,
        curves={("disk", "kv"): (0.0123, rate)},
    )  # fmt: skip


def test_what_was_learned_of_loading_and_computing_is_shown() -> None:
    events = (*GOOD, decided("all", 4000.0, 5e8), decided("compute", 5000.0, 1 << 30))
    view = viewed(Samples(exposed(*events)))
    (load,) = view["loads"]
    assert (load["backend"], load["pool"], load["latency_s"]) == ("disk", "kv", 0.0123)
    assert (load["bytes_per_s"], view["compute_tokens_per_s"]) == (GIB, 5000)
    assert view["decisions"] == {"all": 2, "compute": 2}
    lines = [" ".join(one.split()) for one in report.report([view]).text().splitlines()]
    assert "disk kv 12.3 ms 1.0 GiB/s" in lines
    assert "computing: 5000 tokens/s" in lines
    assert "decisions: 2 all, 2 compute" in lines


def test_the_slowest_rank_stands_for_all() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for rank, (pace, rate) in enumerate(((0.0, 9e9), (4e3, 5e8), (5e3, 6e8))):
        origin = Origin(rank=f"tp{rank}", model="m")
        metrics.kvdock_observe(decided("all", pace, rate), origin)
    view = viewed(Samples(generate_latest(registry).decode()))
    assert [one["bytes_per_s"] for one in view["loads"]] == [5e8]
    assert view["compute_tokens_per_s"] == 4000


def test_a_rate_that_is_not_known_is_shown_as_such() -> None:
    """Loads of one size alone do not tell it; JSON has no infinity."""
    first = decided("unknown", 0.0, float("inf"))
    view = viewed(Samples(exposed(*GOOD, first)))
    assert "computing: not known yet" in report.report([view]).text()
    (shown,) = json.loads(json.dumps(report.report([view]).as_data(), allow_nan=False))[
        "engines"
    ]
    assert shown["loads"] == [
        {"backend": "disk", "pool": "kv", "latency_s": 0.0123, "bytes_per_s": None}
    ]
    bare = report.report([viewed(Samples(exposed(*GOOD)))]).text()
    assert "computing" not in bare
    assert "LOADS" not in bare


def test_two_looks_make_rates_and_a_restart_makes_none() -> None:
    before, now = Samples(exposed(*GOOD)), Samples(exposed(*GOOD, *GOOD))
    view = viewed(now, before)
    assert view["backends"][0]["read_per_s"] == GIB
    assert view["pools"][0]["restored_per_s"] == 3
    assert "1.0 GiB/s" in report.report([view]).text()
    assert viewed(before, now)["backends"][0]["read_per_s"] == 0


def copied(target: str, queued_bytes: int = 0, **outcomes: int) -> PagesCopied:
    return PagesCopied(
        pool="kv", source="file", target=target, promoted=False, outcomes=outcomes,
        nbytes=0, queued_bytes=queued_bytes,
    )  # fmt: skip


TIERS = (
    *GOOD,
    copied("disk", copied=5),
    copied("far", GIB, copied=2, dropped=3, gone=1, present=7),
)


def test_tiers_show_loads_copies_drops_and_what_waits() -> None:
    before, now = Samples(exposed(*TIERS)), Samples(exposed(*TIERS, *TIERS))
    near, disk, far = viewed(before)["tiers"]
    assert (near["tier"], near["loaded"], near["copied"]) == ("file", 6, 0)
    assert (disk["copied"], disk["lost"], disk["queued_bytes"]) == (10, {}, 0)
    assert (far["copied"], far["lost"]) == (4, {"dropped": 6, "gone": 2})
    assert far["queued_bytes"] == 2 * GIB
    shown = report.report([viewed(now, before)]).text()
    assert [" ".join(line.split()) for line in shown.splitlines()[-4:]] == [
        "TIER LOADED COPIED TO IT NOT COPIED QUEUE",
        "file 12 0.0/s - 0 B",
        "disk 0 5.0/s - 0 B",
        "far 0 2.0/s 12 dropped, 4 gone 2.0 GiB",
    ]
    # Without tiers there is no such table.
    assert "TIER" not in report.report([viewed(Samples(exposed(*GOOD)))]).text()


def test_the_view_reads_as_it_did_and_fits() -> None:
    view = viewed(Samples(exposed(*BAD, *TIERS)))
    golden = Path(__file__).with_name("golden") / "top.txt"
    check_report(golden, report.report([view]))


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
def engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_scripts_get_one_object_and_an_exit_code(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for events, code in ((GOOD, 0), (BAD, 1)):
        ANSWERS["/metrics"] = (200, exposed(*events))
        assert top((engine,), once=True, json=True) == code
        shown = json.loads(capsys.readouterr().out)
        assert shown["schema"] == "kvdock.top/2"
        assert [one["source"] for one in shown["engines"]] == [engine]


def test_several_engines_are_shown_one_below_the_other(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in which something is wrong is enough for the exit code."""
    ANSWERS["/metrics"] = (200, exposed(*GOOD))
    ANSWERS["/bad"] = (200, exposed(*BAD))
    assert top((engine, f"{engine}/bad"), once=True) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"{engine}, since the start")
    assert f"\n\n{engine}/bad, since the start" in shown


def test_an_engine_that_does_not_answer_hides_no_other(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ANSWERS["/metrics"] = (200, exposed(*GOOD))
    assert top((engine, "127.0.0.1:9"), once=True, json=True) == 1
    answered, silent = json.loads(capsys.readouterr().out)["engines"]
    assert (answered["error"], bool(answered["pools"])) == ("", True)
    assert "no metrics come from 127.0.0.1:9" in silent["error"]
    assert top((engine, "127.0.0.1:9"), once=True) == 1
    assert "no metrics come from 127.0.0.1:9" in capsys.readouterr().out
    with pytest.raises(KvdockError, match="no metrics come from"):
        top(("127.0.0.1:9",), once=True)
    with pytest.raises(SettingsError):
        top((engine, "ftp://host"), once=True)


def test_what_serves_no_metrics_of_kvdock_is_an_error_that_says_so(
    engine: str,
) -> None:
    ANSWERS["/metrics"] = (200, "python_info 1\n")
    with pytest.raises(KvdockError, match="serves no metrics of kvdock"):
        fetch(engine)
    with pytest.raises(KvdockError, match="status 404"):
        fetch(f"http://{engine}/other")
    with pytest.raises(KvdockError, match="no metrics come from"):
        fetch("127.0.0.1:9")
    for url in ("ftp://host", "http://[::1", "http://[::1]:x", "http://a:99999999"):
        with pytest.raises(SettingsError, match="is not an address to ask for metrics"):
            fetch(url)


def test_metrics_of_vllm_are_read_behind_their_prefix() -> None:
    theirs = re.sub("^kvdock", "vllm:kvdock", exposed(*GOOD), flags=re.MULTILINE)
    assert "\nvllm:kvdock_keys_total{" in theirs
    wanted = viewed(Samples(exposed(*GOOD)))
    assert viewed(Samples(theirs)) == wanted


def test_a_live_view_needs_a_terminal(engine: str) -> None:
    with pytest.raises(UsageProblem, match="--once"):
        top((engine,))


def test_tenants_are_shown_with_what_they_take() -> None:
    uses = {"acme": TenantUse(3 * GIB, 2 * GIB, GIB), "default": TenantUse(GIB)}
    filled = StoreFilled(
        backend="file", used_bytes=4 * GIB, limit_bytes=0, tenants=uses
    )
    view = viewed(Samples(exposed(*GOOD, filled)))
    assert [
        (one["tenant"], one["used_bytes"], one["quota_bytes"])
        for one in view["tenants"]
    ] == [
        ("acme", 3 * GIB, 2 * GIB),
        ("default", GIB, 0),
    ]
    text = report.report([view]).text()
    assert re.search(r"acme +file +3.0 GiB +2.0 GiB +1.0 GiB", text)
    assert re.search(r"default +file +1.0 GiB +- +0 B", text)
    without = report.report([viewed(Samples(exposed(*GOOD)))]).text()
    assert "TENANT" not in without
