"""A real Prometheus scrapes a real run of two processes: `make test-prometheus`.

Every query of the dashboard and every alert expression is asked of it. Prometheus is
Debian's; TESTS_OF_KVDOCK_PROMETHEUS names the directory of its programs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

PROGRAMS = os.environ.get("TESTS_OF_KVDOCK_PROMETHEUS", "/none")
DOCS = Path(__file__).parents[1] / "docs"
ALERTS = DOCS / "prometheus" / "alerts.yml"
DEADLINE_S = 90.0
TAKE_HOURS = {
    "KvdockCopiesBehind",
    "KvdockHitRateFalling",
    "KvdockMetricsAbsent",
    "KvdockNothingFound",
    "KvdockSlow",
}
"""Alerts on what is not wrong here, or shows only after hours."""

pytestmark = pytest.mark.skipif(
    not all(Path(PROGRAMS, one).exists() for one in ("prometheus", "promtool")),
    reason="needs Debian's prometheus",
)

ENGINE = """
import os, sys, time
from kvdock.batch import Operation, Outcome
from kvdock.capacity import TenantUse
from kvdock.events import *
from kvdock.observers.metrics import Metrics

metrics = Metrics()
origin = Origin(rank=sys.argv[1], model="org/model")

def tell(event):
    metrics.kvdock_observe(event, origin)

tell(PluginLoaded(kind="backend", name="b", distribution="d", version="1", path="p"))
tell(PoolRouted(pool="draft", backend="b", enabled=True, reason="fits"))
tell(PoolsDetached())
tell(PoolRouted(pool="kv", backend="b", enabled=True, reason="fits"))
tell(PoolRouted(pool="draft", backend="", enabled=False, reason="refused"))
tell(BreakerMoved(backend="b", operation=Operation.GET, state="open"))
tell(CallsBehind(backend="b", calls=3))
tell(MemoryHeld(backend="b", batches=2))
tell(PagesHeld(pool="kv", pages=8, leased=2))
room = {"acme": TenantUse(used_bytes=10, quota_bytes=10, promised_bytes=1)}
full = dict(failed_bytes=1, promised_bytes=9, promise_limit_bytes=9, other_bytes=999)
full |= dict(limit_bytes=100, tenants=room)
tell(StoreFilled(backend="b", used_bytes=9999, **full))
tell(SlotsExpected(pool="kv", expected=4, held=1, landing_bytes=9, landing_used=1))
while True:
    if os.path.exists(sys.argv[2]):
        tell(StoreFilled(backend="b", used_bytes=99, **full))
    tell(RowsSent(pool="kv", rows=8, descriptors=2))
    tell(RequestArrived(outcome="arrived", nbytes=100))
    tell(MessageRefused(message="ticket", reason="used"))
    for operation in (Operation.PUT, Operation.EXISTS):
        lost = dict(backend="b", pool="swa", nbytes=100, seconds=0.01)
        tell(BatchEnded(operation=operation, outcomes={Outcome.OK: 1024}, **lost))
    common = dict(backend="b", pool="kv", nbytes=100, seconds=0.01)
    for operation in Operation:
        ended = {Outcome.OK: 5, Outcome.CORRUPT: 1, Outcome.REFUSED: 1}
        ended |= {Outcome.TIMEOUT: 1}
        tell(BatchEnded(operation=operation, outcomes=ended, **common))
    copy = dict(pool="kv", source="b", target="far", nbytes=100, queued_bytes=9)
    tell(PagesCopied(promoted=False, outcomes={"copied": 4, "dropped": 1}, **copy))
    tell(PagesRestored(pages={"kv": 4}, target=4, draft=1))
    hint = dict(request="r", action="kvdock.retain")
    tell(HintAnswered(outcome="taken", **hint))
    tell(HintAnswered(pool="kv", pages={"accepted": 4, "clipped": 1}, **hint))
    known = dict(tokens_per_s=900.0, curves={("b", "kv"): (0.001, 1e9)})
    spent = dict(wait_s=0.0, load_s=0.1, compute_s=0.2)
    tell(LoadDecided(
        request="r", choice="all", acted=True, found=4, pages=4, **spent, **known
    ))
    tell(GenerationOpened(kind="private"))
    tell(HostMemoryShared(
        request="r", rows=4, pages=6, waited_s=0.5, computed_tokens=32
    ))
    time.sleep(0.2)
"""
SERVER = """
import sys, time
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
start_http_server(int(sys.argv[1]), "127.0.0.1", registry)
time.sleep(600)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Two ranks, what serves their metrics, and Prometheus; returns its API."""
    folder = tmp_path_factory.mktemp("prometheus")
    metrics, api = free_port(), free_port()
    shared, deleted = folder / "metrics", folder / "deleted"
    shared.mkdir()
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ALERTS)],
                "scrape_configs": [
                    {
                        "job_name": "engine",
                        "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}],
                    }
                ],
            }
        )
    )
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(shared)}
    python = [sys.executable, "-W", "error", "-c"]
    commands = [
        [*python, ENGINE, "tp0", str(deleted)],
        [*python, ENGINE, "tp1", str(deleted)],
        [*python, SERVER, str(metrics)],
        [
            f"{PROGRAMS}/prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{api}",
        ],
    ]
    running = [
        subprocess.Popen(one, env=environ, stderr=subprocess.DEVNULL)
        for one in commands
    ]

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{api}{path}") as answer:
            return json.load(answer)["data"]

    try:
        until(lambda: len(get("/api/v1/query?query=up==1")["result"]) == 1)
        # Rates need several scrapes.
        scraped = "/api/v1/query?query=count_over_time(kvdock_breaker_state[1m])>5"
        until(lambda: len(get(scraped)["result"]) == 2)
        deleted.touch()  # the stores, once their size before is known
        yield get
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait(30)


def until(done: Callable[[], bool], seen: Callable[[], object] = str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if done():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline_s, seen()
        time.sleep(0.2)


def test_the_rules_pass_promtool() -> None:
    done = subprocess.run(
        [f"{PROGRAMS}/promtool", "check", "rules", str(ALERTS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "rules found" in done.stdout) == (0, True), done.stderr


def test_each_rule_fires_when_it_should_and_none_on_a_healthy_day() -> None:
    done = subprocess.run(
        [f"{PROGRAMS}/promtool", "test", "rules", str(ALERTS.with_stem("alerts_test"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def query(ask: Callable[[str], Any], expression: str) -> list[Any]:
    path = "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    found: list[Any] = ask(path)["result"]
    return found


def test_every_panel_has_an_answer(ask: Callable[[str], Any]) -> None:
    board = json.loads((DOCS / "grafana" / "kvdock.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s")
            expression = re.sub(r'"\$\w+"', '".*"', expression)
            assert query(ask, expression), (panel["title"], expression)


def test_the_pool_that_is_refused_is_shown_with_its_reason_for_each_rank(
    ask: Callable[[str], Any],
) -> None:
    board = json.loads((DOCS / "grafana" / "kvdock.json").read_text())
    (panel,) = [one for one in board["panels"] if "not stored" in one["title"]]
    expression = re.sub(r'"\$\w+"', '".*"', panel["targets"][0]["expr"])
    found = [one["metric"] for one in query(ask, expression)]
    shown = sorted((one["pool"], one["reason"], one["rank"]) for one in found)
    assert shown == [("draft", "refused", "tp0"), ("draft", "refused", "tp1")]


def test_every_rule_can_be_asked_and_what_is_wrong_now_is_pending_or_fires(
    ask: Callable[[str], Any],
) -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    known = {rule["alert"] for rule in group["rules"]}

    def rules() -> list[Any]:
        found: list[Any] = ask("/api/v1/rules")["groups"][0]["rules"]
        return found

    until(lambda: all(one["health"] == "ok" for one in rules()))
    assert {one["name"] for one in rules()} == known
    wanted = known - TAKE_HOURS

    def raised() -> set[str]:
        return {one["labels"]["alertname"] for one in ask("/api/v1/alerts")["alerts"]}

    until(lambda: raised() == wanted, lambda: raised() ^ wanted)
