"""Each cause is provoked through an attachment, and read back from its journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import numpy as np
import pytest
from shelf import (
    Engine,
    Heard,
    Shelf,
    attention,
    draft,
    hashes,
    hasty,
    patient,
    states,
    until,
)

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.events import (
    BatchEnded,
    HostMemoryShared,
    LookupSkipped,
    Origin,
    PagesAnswered,
    PagesHeld,
    PagesRestored,
    requested_by,
)
from kvdock.generations import Generation
from kvdock.journal import Cause, JournalRecord, explain, read_journal, requests
from kvdock.journal.observer import Journal, JournalSettings, _Files
from kvdock.journal.records import encode
from kvdock.namespace import Namespace
from kvdock.pays.policy import LoadLimit, limited_by
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import Manifest, Support
from kvdock.pools.objects import Coordinate
from kvdock.retention import Retention
from kvdock.transfer.manager import TransferManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.journal import RequestAnswer

NAMES = hashes(6)
PAGES = list(range(6))


@attrs.define(eq=False)
class Trial:
    """Engines that share a journal."""

    folder: Path
    journal: Journal = attrs.field(init=False)

    @journal.default
    def _open(self) -> Journal:
        return Journal(JournalSettings(dir=self.folder))

    def engine(self, **more: Any) -> Engine:
        given = {"core": patient(), "observers": [self.journal], **more}
        return Engine(**given)

    def why(self, request: str = "", **more: Any) -> RequestAnswer:
        assert self.journal.flush(10)
        return explain(partial(read_journal, self.folder), request=request, **more)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def ask(engine: Engine, request: str, *, load: bool = True) -> None:
    """Look a prefix up as a request does, and load what could be restored."""
    with requested_by(request):
        best = engine.attachment.exists(NAMES).best
        if load and best:
            pages = {pool.name: PAGES[:best] for pool in engine.pools}
            engine.attachment.get(NAMES[:best], pages)


def store(engine: Engine, pages: int = 6, request: str = "writer") -> None:
    engine.fill(NAMES, PAGES)
    given = {pool.name: PAGES[:pages] for pool in engine.pools}
    with requested_by(request):
        engine.attachment.put(NAMES[:pages], given)


def lose(shelf: Shelf, page: int, pool: str = "") -> None:
    """Delete a page behind the engine's back, as eviction does."""
    gone = [one for one in shelf.objects if NAMES[page] in one and pool in one]
    assert gone
    for one in gone:
        del shelf.objects[one]


def answers(outcome: Outcome, operation: Operation) -> Callable[[Batch], Any]:
    return lambda batch: (
        BatchResult.all(batch, outcome) if batch.operation is operation else None
    )


def test_what_could_be_restored_has_no_cause(trial: Trial) -> None:
    engine = trial.engine()
    store(engine)
    ask(engine, "r")
    answer = trial.why("r")
    assert (answer.restorable, answer.pages) == (6, 6)
    assert answer.pools[0].loaded == 6
    assert answer.pools[0].cause is None
    assert answer.verdict == "All 6 pages could be restored."


@pytest.mark.parametrize(
    ("change", "causes"),
    [
        (lambda engine: lose(engine.shelf, 2), {Cause.EVICTED: 1}),
        (lambda engine: engine.attachment.clear(), {Cause.CLEARED: 6}),
        (
            lambda engine: engine.attachment.delete([*NAMES[1:], "ab" * 32]),
            {Cause.REMOVED: 5},
        ),
    ],
)
def test_what_became_of_stored_pages_is_said(
    trial: Trial, change: Callable[[Engine], object], causes: dict[Cause, int]
) -> None:
    engine = trial.engine()
    store(engine)
    change(engine)
    ask(engine, "r")
    (pool,) = trial.why("r").pools
    assert pool.causes == causes
    assert trial.why("r").restorable == pool.first


def test_damage_is_said_of_the_request_that_met_it_and_of_the_next(
    trial: Trial,
) -> None:
    engine = trial.engine()
    store(engine)
    for key in list(engine.shelf.objects):
        if NAMES[1] in key:
            engine.shelf.objects[key] = bytes(len(engine.shelf.objects[key]))
    ask(engine, "first")
    assert trial.why("first").pools[0].cause is Cause.DAMAGED
    ask(engine, "second", load=False)
    answer = trial.why("second")
    assert (answer.restorable, answer.pools[0].cause) == (1, Cause.DAMAGED)


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (Outcome.REFUSED, Cause.DECLINED),
        (Outcome.TIMEOUT, Cause.TOO_LATE),
        (Outcome.UNAVAILABLE, Cause.UNREACHABLE),
        (Outcome.ERROR, Cause.FAILED),
    ],
)
def test_a_store_that_was_not_taken_is_said(
    trial: Trial, outcome: Outcome, cause: Cause
) -> None:
    engine = trial.engine()
    engine.shelf.trouble = answers(outcome, Operation.PUT)
    store(engine)
    engine.shelf.trouble = None
    ask(engine, "r")
    assert trial.why("r").pools[0].causes == {cause: 6}


def test_a_breaker_that_is_open_is_said_of_a_lookup_and_of_a_store(
    trial: Trial,
) -> None:
    engine = trial.engine(core=hasty())
    engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.ERROR)
    for _ in range(50):
        store(engine)
        ask(engine, "before")
        states_of = engine.attachment.breakers()["shelf"]
        if states_of[Operation.PUT] == states_of[Operation.EXISTS] == "open":
            break
    ask(engine, "r")
    assert trial.why("r").pools[0].causes == {Cause.BREAKER_OPEN: 6}


def test_a_queue_that_was_full_is_said(trial: Trial) -> None:
    few = attrs.evolve(patient().transfers, writers=1, queue=1)
    engine = trial.engine(core=attrs.evolve(patient(), transfers=few))
    engine.fill(NAMES, PAGES)
    manager, busy, goes_on = (
        TransferManager(engine.attachment),
        threading.Event(),
        threading.Event(),
    )

    def hold(batch: Batch) -> None:
        if batch.operation is Operation.PUT:
            busy.set()
            assert goes_on.wait(20)

    engine.shelf.trouble = hold
    first = manager.write("kv", NAMES[:1], PAGES[:1])
    assert busy.wait(20)
    second = manager.write("kv", NAMES[1:2], PAGES[1:2])
    third = manager.write("kv", NAMES[2:3], PAGES[2:3])
    assert third.outcomes.tolist() == [Outcome.REFUSED]
    goes_on.set()
    assert first.wait(20)
    assert second.wait(20)
    engine.shelf.trouble = None
    ask(engine, "r")
    answer = trial.why("r")
    assert (answer.restorable, answer.pools[0].cause) == (2, Cause.QUEUE_FULL)


def test_a_write_after_the_end_did_not_meet_a_full_queue(trial: Trial) -> None:
    engine = trial.engine()
    manager = TransferManager(engine.attachment)
    assert manager.close()
    assert manager.write("kv", NAMES, PAGES).wait(20)
    ask(trial.engine(shelves=engine.shelves), "r")
    assert trial.why("r").pools[0].causes == {Cause.UNREACHABLE: 6}


def test_a_write_in_the_background_says_when_its_pages_expire(trial: Trial) -> None:
    engine = trial.engine()
    engine.fill(NAMES, PAGES)
    times = Retention(expire_at=4_000_000_000), lambda _: None
    with TransferManager(engine.attachment) as manager:
        assert manager.write("kv", NAMES, PAGES, times=times).wait(20)
    assert trial.journal.flush(10)
    stored = [one for one in read_journal(trial.folder) if one.operation == "put"]
    assert [one.expire_at for one in stored] == [4_000_000_000]


@pytest.mark.parametrize(
    ("expire_at", "cause"), [(0, Cause.TOO_LATE), (1, Cause.EXPIRED)]
)
def test_what_no_backend_was_asked_to_store_is_said(
    trial: Trial, expire_at: int, cause: Cause
) -> None:
    """The first of several batches takes all the time, or the pages' time is over."""
    engine = trial.engine(shelves=(Shelf(max_batch_keys=2),))
    engine.fill(NAMES, PAGES)
    pool, deadline_s = engine.attachment["kv"], time.monotonic() + 0.2

    def wait(batch: Batch) -> None:
        del batch
        until(lambda: time.monotonic() > deadline_s)

    engine.shelf.trouble = wait
    given = (NAMES, np.array(PAGES), deadline_s)
    if expire_at:
        pool.store(*given, Retention(expire_at=expire_at), lambda _: None)
    else:
        pool.transfer(Operation.PUT, *given)
    engine.shelf.trouble = None
    ask(engine, "r", load=False)
    causes = trial.why("r").pools[0].causes
    assert causes.keys() == {cause}


def test_a_load_that_ended_just_after_the_time_of_its_pages_did_not_store_them(
    trial: Trial,
) -> None:
    engine = trial.engine()
    engine.fill(NAMES, PAGES)
    pages = dict.fromkeys(engine.where(PAGES), PAGES)
    engine.attachment.put(NAMES, pages, expire_s=600)
    assert engine.attachment.get(NAMES, pages).pages == len(NAMES)
    for page in PAGES:
        lose(engine.shelf, page)
    ask(engine, "r", load=False)
    assert trial.journal.flush(10)
    records = list(read_journal(trial.folder))
    (end_s,) = {one.expire_at for one in records if one.operation == "put"}
    late = {"get": end_s + 0.5, "exists": end_s + 0.6}
    moved = [
        msgspec.structs.replace(one, at_s=late.get(one.operation, one.at_s))
        for one in records
    ]
    answer = explain(lambda: moved, request="r")
    assert answer.pools[0].causes == {Cause.EXPIRED: len(NAMES)}


def test_a_state_that_is_missing_cuts_the_prefix_and_is_named_first(
    trial: Trial,
) -> None:
    engine = trial.engine(pools=(attention(), states()))
    store(engine)
    for page in (3, 4, 5):
        lose(engine.shelf, page, "mamba")
    ask(engine, "r", load=False)
    answer = trial.why("r")
    assert answer.restorable == 3
    assert (answer.pools[0].pool, answer.pools[0].limits) == ("mamba", True)
    assert "pool mamba lacks page 6 of 6" in answer.verdict
    assert answer.pools[0].cause is Cause.EVICTED


def test_a_draft_that_is_attached_by_itself_is_said_beside_its_target(
    trial: Trial,
) -> None:
    target = trial.engine()
    alone = attrs.evolve(draft(), anchor=True, indices_from=None, required=True)
    other = trial.engine(pools=(alone,), shelves=target.shelves)
    store(target)
    store(other)
    lose(target.shelf, 0, "draft")
    for engine in (target, other):
        ask(engine, "r", load=False)
    answer = trial.why("r")
    assert answer.restorable == answer.pages == 6
    assert "Beside it, pool draft lacks page 1 of 6: it was stored" in answer.verdict


@attrs.define(eq=False)
class NoDraft(Shelf):
    """A shelf that takes no draft pool."""

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        whole = super().kvdock_manifest()
        kinds = {
            kind: attrs.evolve(one, draft=Support.NO)
            for kind, one in whole.kinds.items()
        }
        return attrs.evolve(whole, kinds=kinds)


def test_a_pool_without_a_backend_is_said(trial: Trial) -> None:
    engine = trial.engine(shelves=(NoDraft(),), pools=(attention(), draft()))
    with requested_by("writer"):
        engine.attachment.put(NAMES, {"kv": PAGES})
    ask_kv(engine, "r")
    causes = {one.pool: one.cause for one in trial.why("r").pools}
    assert causes == {"kv": None, "draft": Cause.POOL_NOT_STORED}


def ask_kv(engine: Engine, request: str) -> None:
    with requested_by(request):
        engine.attachment.exists(NAMES)


def test_pages_of_another_namespace_are_found_with_what_differs(trial: Trial) -> None:
    mine = trial.engine()
    theirs = trial.engine(pools=(attention(page_tokens=8),), shelves=mine.shelves)
    store(theirs)
    ask(mine, "r")
    answer = trial.why("r")
    assert answer.pools[0].causes == {Cause.OTHER_NAMESPACE: 6}
    assert any("page_tokens" in one.field for one in answer.differences)


@pytest.mark.parametrize(
    ("computed", "words"),
    [
        (Generation(run="r", version="7").text, "generation 7"),
        ("", "the weights of the start"),
    ],
)
def test_pages_of_other_weights_are_named_by_their_generation(
    computed: str, words: str, trial: Trial
) -> None:
    asked = Namespace(model="m", generation=Generation(run="r", version="8").text)
    mine = trial.engine(namespace=asked)
    theirs = trial.engine(
        namespace=Namespace(model="m", generation=computed), shelves=mine.shelves
    )
    store(theirs)
    ask(mine, "r")
    answer = trial.why("r")
    assert answer.pools[0].causes == {Cause.OTHER_GENERATION: 6}
    assert f"(computed with {words}, asked in generation 8)" in answer.verdict


def test_hashes_are_explained_without_a_request(trial: Trial) -> None:
    engine = trial.engine()
    store(engine, 4)
    answer = trial.why(hashes=NAMES)
    assert (answer.restorable, answer.pages) == (4, 6)
    assert answer.pools[0].cause is Cause.NEVER_STORED


def test_requests_are_listed(trial: Trial) -> None:
    engine = trial.engine()
    store(engine, 4)
    ask(engine, "r")
    assert trial.journal.flush(10)
    found = requests(read_journal(trial.folder))
    assert {name: one[1:] for name, one in found.items()} == {"r": (6, 4)}


def test_a_request_that_asked_for_nothing_is_said(trial: Trial) -> None:
    store(trial.engine())
    with pytest.raises(KvdockError, match="no lookup of request 'other'"):
        trial.why("other")


def test_a_folder_without_a_journal_is_said(tmp_path: Path) -> None:
    with pytest.raises(KvdockError, match="holds no journal"):
        list(read_journal(tmp_path))


def test_nothing_is_sent_where_no_observer_wants_pages() -> None:
    heard = Heard(object)
    engine = Engine(core=patient(), observers=[heard])
    store(engine)
    assert heard.events
    assert not [one for one in heard.events if isinstance(one, PagesAnswered)]


def test_nothing_is_measured_for_a_journal_alone() -> None:
    seen: list[object] = []

    class Pages:
        observes_pages = True
        observes_calls = Journal.observes_calls

        @hookimpl
        def kvdock_observe(self, event: object) -> None:
            seen.append(event)

    engine = Engine(core=patient(), observers=[Pages()])
    store(engine)
    ask(engine, "r")
    assert [one for one in seen if isinstance(one, PagesAnswered)]
    measured = BatchEnded | PagesHeld | PagesRestored
    assert not [one for one in seen if isinstance(one, measured)]


# --- The files -------------------------------------------------------------------


def hold_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[threading.Event, threading.Event]:
    """Let writes of journals wait; return what says so, and what lets them go on."""
    begun, goes_on, write = threading.Event(), threading.Event(), os.write

    def hold(file: int, data: bytes) -> int:
        begun.set()
        assert goes_on.wait(60)
        return write(file, data)

    monkeypatch.setattr("kvdock.journal.observer.os.write", hold)
    return begun, goes_on


def event(pages: int = 3) -> PagesAnswered:
    return PagesAnswered(
        backend="shelf",
        pool="kv",
        operation=Operation.EXISTS,
        hashes=hashes(pages),
        outcomes=np.zeros(pages, np.uint8),
        request="r",
    )


ORIGIN = Origin(rank="0", model="m", namespace="0" * 64)


def test_files_stay_within_their_limit_and_the_newest_are_kept(
    tmp_path: Path,
) -> None:
    journal = Journal(JournalSettings(dir=tmp_path, max_bytes=1 << 20, queue=8))
    for at in range(400):
        journal.kvdock_observe(
            event=attrs.evolve(event(200), request=str(at)), origin=ORIGIN
        )
        assert journal.flush(10)
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 1 << 20
    kept = [int(one.request) for one in read_journal(tmp_path)]
    assert kept == list(range(kept[0], 400))
    assert kept[0] > 0


def test_records_whose_pages_find_the_queue_full_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(JournalSettings(dir=tmp_path, queue=2))
    begun, goes_on = hold_writes(monkeypatch)
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert begun.wait(20)
    for _ in range(5):
        journal.kvdock_observe(event=event(), origin=ORIGIN)
    goes_on.set()
    assert journal.flush(20)
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert journal.flush(20)
    records = list(read_journal(tmp_path))
    assert (len(records), sum(one.dropped for one in records)) == (3, 4)


def test_a_torn_line_and_lines_of_others_are_left_out(tmp_path: Path) -> None:
    record = JournalRecord(
        version=1, at_s=1.0, operation="exists", namespace="n", request="r"
    )
    newer = JournalRecord(version=2, at_s=1.0, operation="exists", namespace="n")
    lines = encode([record, newer]) + b"not json\n" + encode([record])[:-9]
    (tmp_path / "one.jsonl").write_bytes(lines)
    assert list(read_journal(tmp_path)) == [record]


_KILLED = """
import sys
from test_journal import ORIGIN, event
import attrs
from pathlib import Path
from kvdock.journal.observer import Journal, JournalSettings, _Files
journal = Journal(JournalSettings(dir=Path(sys.argv[1])))
at = 0
while True:
    given = attrs.evolve(event(50), request=str(at))
    journal.kvdock_observe(event=given, origin=ORIGIN)
    at += 1
    if at % 10 == 0:
        assert journal.flush(10)
        print(at, flush=True)
"""


def test_a_journal_survives_a_kill(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        while (flushed := int(process.stdout.readline())) < 200:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = [int(one.request) for one in read_journal(tmp_path)]
    assert found == list(range(len(found)))
    assert len(found) >= flushed


def test_the_end_of_an_attachment_writes_what_waits(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdock.journal.observer._GATHER_S", 60.0)
    monkeypatch.setattr("kvdock.journal.observer._DETACH_S", 20.0)
    engine = trial.engine()
    ask(engine, "r")
    assert engine.attachment.close()
    assert "r" in requests(read_journal(trial.folder))


def test_the_end_of_an_attachment_does_not_wait_for_a_disk_that_hangs(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, goes_on = hold_writes(monkeypatch)
    engine = trial.engine()
    ask(engine, "r")
    began_s = time.monotonic()
    assert engine.attachment.close()
    assert time.monotonic() - began_s < 20
    goes_on.set()
    assert trial.journal.flush(20)


def test_a_batch_larger_than_a_file_stays_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(JournalSettings(dir=tmp_path, max_bytes=1 << 20))
    begun, goes_on = hold_writes(monkeypatch)
    for at in range(400):
        given = attrs.evolve(event(200), request=str(at))
        journal.kvdock_observe(event=given, origin=ORIGIN)
        assert begun.wait(60)
    huge = event(16_000)  # more than a file may have
    journal.kvdock_observe(event=huge, origin=ORIGIN)
    goes_on.set()
    assert journal.flush(60)
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 1 << 20
    assert list(read_journal(tmp_path))[-1].request == "399"
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert journal.flush(60)
    assert list(read_journal(tmp_path))[-1].dropped == 1


def pages_stored(at: int, pages: int) -> JournalRecord:
    return JournalRecord(1, float(at), "put", "n", pages="f" * 16 * pages)


def test_a_journal_deletes_no_file_that_no_journal_has_written(tmp_path: Path) -> None:
    foreign = ["billing.jsonl", "a-b-c.jsonl", "0-12-34ab-1.jsonl", "x.txt"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"x" * (1 << 20))
    old = tmp_path / "0-12-34ab-000001.jsonl"
    old.write_bytes(b"x" * (1 << 20))
    files = _Files(JournalSettings(dir=tmp_path, max_bytes=1 << 20))
    for at in range(600):
        files.write([pages_stored(at, 250)], "0")
    assert not old.exists()
    assert all((tmp_path / name).stat().st_size == 1 << 20 for name in foreign)
    assert len(list(tmp_path.iterdir())) > len(foreign) + 4


@pytest.mark.parametrize("pages", [pytest.param(300, marks=pytest.mark.slow), 900])
def test_many_writers_together_keep_the_limit_of_a_journal(
    tmp_path: Path, pages: int
) -> None:
    most = 1 << 20
    settings = JournalSettings(dir=tmp_path, max_bytes=most)
    writers = [_Files(settings) for _ in range(32)]
    taken, at = 0, 0
    while taken < 2 * most:
        for rank, files in enumerate(writers):
            record = pages_stored(at := at + 1, pages)
            taken += len(encode([record]))
            assert not files.write([record], str(rank))
            if not at % 40:
                every = [one.stat().st_size for one in tmp_path.iterdir()]
                assert sum(every) <= most
    # The latest of each is there.
    left = [record.at_s for record in read_journal(tmp_path)]
    assert {*range(at - 31, at + 1)} <= {int(at_s) for at_s in left}
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) > most // 2


def test_a_file_that_another_process_deleted_is_begun_anew(tmp_path: Path) -> None:
    journal = Journal(JournalSettings(dir=tmp_path))
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert journal.flush(60)
    for one in tmp_path.iterdir():
        one.unlink()
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert journal.flush(60)
    assert len(list(read_journal(tmp_path))) == 1


def test_a_write_that_is_cut_short_does_not_tear_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(JournalSettings(dir=tmp_path))
    monkeypatch.setattr("kvdock.journal.observer._RETRY_S", 0.0)
    write, calls = os.write, [0]

    def fills_up(file: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        return write(file, data[:20])

    monkeypatch.setattr("kvdock.journal.observer.os.write", fills_up)
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert journal.flush(60)
    journal.kvdock_observe(event=event(), origin=ORIGIN)
    assert journal.flush(60)
    assert [one.dropped for one in read_journal(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("kv.L0-4.H0-8", "kv.L0-4.H0-4", True),
        ("kv.L0-4.H0-4", "kv.L0-4.H4-8", False),
        ("kv.L0-4", "kv.L2-4", True),
        ("kv.L0-2", "kv.L2-4", False),
        ("m.R0of2", "m.R1of2", False),
        ("m.R0of2", "m.R1of4", True),
        ("kv", "kv.D1of2", True),
    ],
)
def test_parts_of_a_page_overlap_where_they_share_bytes(
    one: str, other: str, *, same: bool
) -> None:
    mine, theirs = Coordinate.parse(one), Coordinate.parse(other)
    assert mine.overlaps(theirs) is same
    assert theirs.overlaps(mine) is same


def test_what_did_not_pay_is_said(trial: Trial) -> None:
    engine = trial.engine()
    store(engine)
    ask(engine, "r", load=False)
    engine.attachment.notify(LookupSkipped(request="r", reason="pays"))
    answer = trial.why("r")
    assert answer.restorable == 6
    assert "Not all of it was loaded: computing was expected" in answer.verdict


def test_what_host_memory_has_no_room_for_is_said(trial: Trial) -> None:
    engine = trial.engine()
    store(engine)
    for name, computed in (("cut", 32), ("waited", 0)):
        ask(engine, name, load=False)
        engine.attachment.notify(
            HostMemoryShared(
                request=name, rows=4, pages=6, waited_s=0.5, computed_tokens=computed
            )
        )
    answer = trial.why("cut")
    assert (
        "Not all of it was loaded: host memory has 4 rows, and the " in answer.verdict
    )
    assert "needs 6" in answer.verdict
    assert not answer.ok
    assert trial.why("waited").ok


def test_a_load_that_is_cut_where_computing_is_faster_is_said(trial: Trial) -> None:
    engine = trial.engine(shelves=(Shelf(max_batch_keys=2),))
    store(engine)
    limit, deadline_s = LoadLimit(np.zeros(7)), time.monotonic() + 60
    limit.until(deadline_s)
    with requested_by("r"), limited_by(limit):
        engine.attachment.exists(NAMES)
        call = (Operation.GET, NAMES, np.array(PAGES), deadline_s)
        engine.attachment["kv"].transfer(*call)
    answer = trial.why("r")
    assert (answer.restorable, answer.pools[0].causes) == (2, {Cause.PAYS: 4})
