"""What observers, journals and engines are told of pages in tiers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from shelf import Shelf, held_by, patient, until
from tiered import NAMES, WHERE, Tiers

from kvdock.batch import BatchResult, Operation, Outcome
from kvdock.events import PageEvent, requested_by
from kvdock.journal import Cause, RequestAnswer, explain, read_journal
from kvdock.journal.observer import Journal, JournalSettings
from kvdock.observers.metrics import Metrics
from kvdock.plugin.manifest import Scope


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(JournalSettings(dir=tmp_path))


def why(journal: Journal, folder: Path) -> RequestAnswer:
    assert journal.flush(10)
    return explain(partial(read_journal, folder), request="r")


def ask(tiers: Tiers) -> None:
    with requested_by("r"):
        best = tiers.cache.exists(NAMES).best
        if best:
            tiers.get(NAMES[:best], list(range(best)))


def lose(shelf: Shelf, name: str) -> None:
    for key in [key for key in shelf.objects if name in key]:
        del shelf.objects[key]


def test_a_page_is_evicted_when_its_last_tier_lost_it(
    journal: Journal, tmp_path: Path
) -> None:
    near, far = Shelf("near"), Shelf("far")
    tiers = Tiers((near, far), observers=(journal,))
    tiers.stored()
    lose(near, NAMES[3])
    lose(near, NAMES[5])
    lose(far, NAMES[5])
    ask(tiers)
    answer = why(journal, tmp_path)
    assert answer.restorable == 5, "the far tier has page 3"
    assert answer.pools[0].causes == {Cause.EVICTED: 1}
    assert answer.pools[0].backends == ("near", "far")
    tiers.cache.close()


def test_the_look_of_a_copy_is_no_sign_of_an_eviction(
    journal: Journal, tmp_path: Path
) -> None:
    near, far = Shelf("near"), Shelf("far")
    tiers = Tiers((near, far), observers=(journal,))
    far.trouble = lambda batch: (
        BatchResult.all(batch, Outcome.REFUSED) if batch.operation == "put" else None
    )
    tiers.put()  # a copy looks for each page in the far tier, which has none
    tiers.settle()
    near.trouble = lambda batch: BatchResult.all(batch, Outcome.UNAVAILABLE)
    ask(tiers)
    assert why(journal, tmp_path).pools[0].causes == {Cause.UNREACHABLE: 6}
    near.trouble = None
    tiers.cache.close()


def test_a_page_in_a_tier_that_was_not_asked_is_called_so(
    journal: Journal, tmp_path: Path
) -> None:
    near, far, disk = Shelf("near"), Shelf("far"), Shelf("disk")
    writer = Tiers((near, far), observers=(journal,))
    writer.put()
    writer.settle()
    writer.cache.close()
    reader = Tiers((disk,), observers=(journal,))
    ask(reader)
    assert why(journal, tmp_path).pools[0].causes == {Cause.OTHER_TIER: 6}
    reader.cache.close()


def test_metrics_count_copies_by_tier_and_loads_where_they_came_from() -> None:
    near, far = Shelf("near"), Shelf("far")
    registry = CollectorRegistry()
    tiers = Tiers((near, far), observers=(Metrics(registry),))
    origin = {"rank": "0", "model": "m"}

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, {**labels, **origin}) or 0

    tiers.stored()
    copied = {"pool": "kv", "source": "near", "target": "far"}
    assert value("kvdock_copied_pages_total", outcome="copied", **copied) == 6
    assert value("kvdock_copied_bytes_total", **copied) == 6 * near_page(tiers)
    assert value("kvdock_copy_queue_bytes", target="far") == 0
    loads = {"pool": "kv", "operation": "get"}
    assert value("kvdock_bytes_total", backend="near", **loads) == 0, "a copy's"
    near.objects.clear()
    assert tiers.get() == 6
    assert value("kvdock_keys_total", backend="far", outcome="ok", **loads) == 6
    assert value("kvdock_bytes_total", backend="far", **loads) == 6 * near_page(tiers)
    tiers.cache.close()


def test_what_waits_to_be_copied_is_counted_by_tier() -> None:
    gate = threading.Event()
    near, disk, far = Shelf("near"), Shelf("disk"), Shelf("far")
    far.trouble = held_by(gate, Operation.PUT)
    tiers = Tiers((near, disk, far))
    page = near_page(tiers)
    for name, where in zip(NAMES[:3], WHERE, strict=False):
        tiers.put([name], [where])
    listener = tiers.listener
    until(lambda: sum(one.target == "disk" for one in listener.copies) == 3)
    assert [one.queued_bytes for one in listener.copies][-1] == 0
    gate.set()
    tiers.settle()
    to_far = [one.queued_bytes for one in listener.copies if one.target == "far"]
    assert to_far == [2 * page, page, 0]
    tiers.cache.close()


def near_page(tiers: Tiers) -> int:
    return tiers.cache["kv"].page_bytes


def test_each_tier_reports_what_it_stored_and_lost_itself() -> None:
    near, far = Shelf("near"), Shelf("far")
    tiers = Tiers((near, far), core=patient(page_events=100))
    tiers.stored()

    def event(backend: str, names: Sequence[str], *, stored: bool) -> PageEvent:
        pages = tuple(names)
        return PageEvent(pool="kv", stored=stored, hashes=pages, backend=backend)

    assert tiers.cache.take_page_events() == (
        event("near", NAMES, stored=True),
        event("far", NAMES, stored=True),
    )
    until_s = tiers.cache.core.deadlines.until("delete")
    near_one, far_one = tiers.cache["kv"].placements
    near_one.delete(NAMES[:2], until_s)
    far_one.delete(NAMES[1:3], until_s)
    assert tiers.cache.take_page_events() == (
        event("near", NAMES[:2], stored=False),
        event("far", NAMES[1:3], stored=False),
    )
    tiers.cache.close()


@pytest.mark.parametrize(
    ("sharing", "said", "remote"),
    [
        (Scope.HOST, "auto", []),
        (Scope.CLUSTER, "auto", ["far"]),
        (Scope.CLUSTER, "local", []),
        (Scope.HOST, "remote", ["far"]),
    ],
)
def test_a_tier_is_remote_where_its_table_or_else_its_manifest_says_so(
    sharing: Scope, said: str, remote: list[str]
) -> None:
    tiers = Tiers(
        (Shelf("near"), Shelf("far", sharing=sharing)),
        tiers=["near", {"backend": "far", "locality": said}],
    )
    placements = tiers.cache["kv"].placements
    assert [one.backend for one in placements if one.remote] == remote
    tiers.cache.close()
