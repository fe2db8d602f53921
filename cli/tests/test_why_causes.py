"""Each cause is provoked through a real attachment, and `kvdock why` names it first."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from shelf import (
    Engine,
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
from kvdock.capacity import Capacity
from kvdock.events import LookupSkipped, requested_by
from kvdock.journal import Cause, read_journal
from kvdock.journal.observer import Journal, JournalSettings
from kvdock.namespace import Namespace
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import Manifest, Support
from kvdock.pools.enums import HitPolicy
from kvdock.pools.shard import Shard
from kvdock.transfer.manager import TransferManager
from kvdock_cli.main import _run

NAMES = hashes(6)
PAGES = list(range(6))


@attrs.define(eq=False)
class Trial:
    """Engines that share a journal, and the command that reads it."""

    folder: Path
    ask_why: Callable[..., tuple[int, str]]
    journal: Journal = attrs.field(init=False)
    engines: list[Engine] = attrs.field(factory=list)

    @journal.default
    def _open(self) -> Journal:
        return Journal(JournalSettings(dir=self.folder))

    def engine(self, **more: Any) -> Engine:
        engine = Engine(**{"core": patient(), "observers": [self.journal], **more})
        self.engines.append(engine)
        return engine

    def why(self, request: str = "r") -> str:
        """Return the sentences that come first."""
        assert self.journal.flush(20)
        code, out = self.ask_why("--journal", self.folder, "--request", request)
        assert code == 1, out
        return " ".join(out.partition("\n\n")[0].split())


@pytest.fixture
def trial(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Trial]:
    def command(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["kvdock", "why", *map(str, words)])
        code = _run(as_json="--json" in words)
        assert isinstance(code, int)
        return code, capsys.readouterr().out

    trial = Trial(tmp_path, command)
    yield trial
    for engine in trial.engines:
        assert engine.attachment.close()


def store(engine: Engine, pages: int = 6) -> None:
    engine.fill(NAMES, PAGES)
    with requested_by("writer"):
        given = dict.fromkeys(engine.where(PAGES), PAGES[:pages])
        engine.attachment.put(NAMES[:pages], given)


def ask(engine: Engine, request: str = "r") -> None:
    """Look a prefix up as a request does, and load what could be restored."""
    with requested_by(request):
        best = engine.attachment.exists(NAMES).best
        if best:
            given = dict.fromkeys(engine.where(PAGES), PAGES[:best])
            engine.attachment.get(NAMES[:best], given)


def lose(shelf: Shelf, *pages: int, pool: str = "") -> None:
    """Delete pages behind the engine's back, as eviction does."""
    for page in pages:
        gone = [one for one in shelf.objects if NAMES[page] in one and pool in one]
        assert gone
        for one in gone:
            del shelf.objects[one]


def refuse(batch: Batch) -> BatchResult | None:
    put = batch.operation is Operation.PUT
    return BatchResult.all(batch, Outcome.REFUSED) if put else None


def test_another_salt(trial: Trial) -> None:
    theirs = trial.engine(namespace=Namespace(model="m", salt="a secret"))
    store(theirs)
    ask(trial.engine(shelves=theirs.shelves))
    said = trial.why()
    assert said.startswith(
        "0 of 6 pages could be restored: pool kv lacks page 1 of 6: it is stored in "
        "another namespace (salt_sha256 differs)."
    )
    assert "a secret" not in said


def test_another_flag(trial: Trial) -> None:
    theirs = trial.engine(namespace=Namespace(model="m", page_format="fp8"))
    store(theirs)
    mine = Namespace(model="m", page_format="bf16")
    ask(trial.engine(shelves=theirs.shelves, namespace=mine))
    assert (
        "it is stored in another namespace (page_format is bf16 here and fp8 there)."
        in trial.why()
    )


def test_the_most_similar_namespace_is_compared(trial: Trial) -> None:
    far = Namespace(model="m", page_format="fp8", salt="a secret", revision="r")
    theirs = trial.engine(namespace=far)
    store(theirs)
    near = Namespace(model="m", page_format="fp8")
    store(trial.engine(shelves=theirs.shelves, namespace=near))
    mine = Namespace(model="m", page_format="bf16")
    ask(trial.engine(shelves=theirs.shelves, namespace=mine))
    assert "namespace (page_format is bf16 here and fp8 there)." in trial.why()


def test_another_tp_size(trial: Trial) -> None:
    wide = trial.engine()
    store(wide)
    narrow = Shard(tp_rank=1, tp_size=2)
    ask(trial.engine(shelves=wide.shelves, shard=narrow))
    assert "it is stored by ranks that divide pages in another way." in trial.why()


def test_a_rank_whose_own_part_was_not_stored(trial: Trial) -> None:
    objects: dict[str, bytes] = {}
    ranks = [
        trial.engine(
            shelves=(Shelf(objects=objects),), shard=Shard(tp_rank=rank, tp_size=2)
        )
        for rank in range(2)
    ]
    store(ranks[0])
    ranks[1].shelf.trouble = refuse
    store(ranks[1])
    for rank in ranks:
        ask(rank)
    assert "0 of 6 pages could be restored: pool kv lacks page 1" in trial.why()
    assert "the backend did not take it: over a limit, or busy." in trial.why()


def test_evicted(trial: Trial) -> None:
    engine = trial.engine()
    store(engine)
    lose(engine.shelf, 2, 4)
    ask(engine)
    assert trial.why().startswith(
        "2 of 6 pages could be restored: pool kv lacks page 3 of 6: it was stored, and "
        "made way for other pages since."
    )


def until_expired(engine: Engine) -> None:
    """Load the prefix until its time is over: then no page of it is served."""

    def over() -> bool:
        given = dict.fromkeys(engine.where(PAGES), PAGES)
        return engine.attachment.get(NAMES, given).pages == 0

    until(over)


@pytest.mark.parametrize("noticed", [False, True])
def test_past_its_time(trial: Trial, *, noticed: bool) -> None:
    engine = trial.engine()
    engine.fill(NAMES, PAGES)
    given = dict.fromkeys(engine.where(PAGES), PAGES)
    engine.attachment.put(NAMES, given, expire_s=1)
    reader = trial.engine(shelves=(Shelf(objects=dict(engine.shelf.objects)),))
    until_expired(engine)
    # Without a backend's own clock a load is the first to see it, and deletes the page.
    ask(engine if noticed else reader)
    assert trial.why().startswith(
        "0 of 6 pages could be restored: pool kv lacks page 1 of 6: its time was over: "
        "it was stored until then, or is older than `max_age`."
    )


def test_older_than_the_age_that_is_served(trial: Trial) -> None:
    engine = trial.engine(core=patient(retention={"max_age": "1 s"}))
    store(engine)
    until_expired(engine)
    ask(engine)
    assert "its time was over: " in trial.why()


def test_evicted_before_its_time(trial: Trial) -> None:
    engine = trial.engine(core=patient(retention={"max_age": "1 h"}))
    store(engine)
    lose(engine.shelf, 0)
    ask(engine)
    assert "it was stored, and made way for other pages since." in trial.why()


@attrs.define(eq=False)
class Full(Shelf):
    """A shelf that has no room left, and says so."""

    room: Capacity = attrs.field(factory=lambda: Capacity(990, 1000))

    def capacity(self, pool: str) -> Capacity:
        del pool
        return self.room


@pytest.mark.parametrize("room", [Capacity(990, 1000), Capacity(0, 1)])
def test_quota(trial: Trial, room: Capacity) -> None:
    # A limit of one byte is that of an empty store on a full disk.
    engine = trial.engine(shelves=(Full(trouble=refuse, room=room),))
    ask(engine, "before")
    until(lambda: bool(trial.journal._full))
    store(engine)
    ask(engine)
    assert "its store was full when it was to be stored." in trial.why()


def test_a_limit_of_the_backend(trial: Trial) -> None:
    engine = trial.engine(shelves=(Shelf(trouble=refuse),))
    store(engine)
    ask(engine)
    assert "the backend did not take it: over a limit, or busy." in trial.why()


def test_an_open_breaker(trial: Trial) -> None:
    engine = trial.engine(core=hasty())
    engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.ERROR)

    def opened() -> bool:
        store(engine)
        ask(engine, "before")
        return engine.attachment.breakers()["shelf"][Operation.EXISTS] == "open"

    until(opened)
    ask(engine)
    assert "its backend was cut off after failures." in trial.why()


def test_damaged(trial: Trial) -> None:
    engine = trial.engine()
    store(engine)
    for key, data in list(engine.shelf.objects.items()):
        if NAMES[1] in key:
            engine.shelf.objects[key] = bytes(len(data))
    ask(engine)
    assert "lacks page 2 of 6: its bytes were wrong and it was deleted." in trial.why()


def test_a_load_that_is_too_late(trial: Trial) -> None:
    engine = trial.engine(core=hasty("get"))
    store(engine)
    goes_on = threading.Event()

    def hang(batch: Batch) -> None:
        if batch.operation is Operation.GET:
            assert goes_on.wait(60)

    engine.shelf.trouble = hang
    ask(engine)
    goes_on.set()
    assert "the call did not end by its deadline." in trial.why()


def test_a_load_in_the_background_that_is_too_late(trial: Trial) -> None:
    engine = trial.engine(core=hasty("get"))
    store(engine)
    goes_on = threading.Event()

    def hang(batch: Batch) -> None:
        if batch.operation is Operation.GET:
            assert goes_on.wait(60)

    engine.shelf.trouble = hang
    manager = TransferManager(engine.attachment)
    with requested_by("r"):
        engine.attachment.exists(NAMES)
        load = manager.read("kv", NAMES, PAGES)

    def given_up() -> bool:
        assert trial.journal.flush(20)
        return any(one.operation == "get" for one in read_journal(trial.folder))

    until(given_up)
    goes_on.set()
    assert load.wait(60)
    assert "the call did not end by its deadline." in trial.why()


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.TIMEOUT, "the call did not end by its deadline."),
        (Outcome.UNAVAILABLE, "the backend could not be reached."),
        (Outcome.ERROR, "the call failed."),
    ],
)
def test_a_store_that_failed(trial: Trial, outcome: Outcome, said: str) -> None:
    engine = trial.engine()
    engine.shelf.trouble = lambda batch: (
        BatchResult.all(batch, outcome) if batch.operation is Operation.PUT else None
    )
    store(engine)
    engine.shelf.trouble = None
    ask(engine)
    assert said in trial.why()


def test_never_stored(trial: Trial) -> None:
    engine = trial.engine()
    store(engine, 4)
    ask(engine)
    assert (
        "4 of 6 pages could be restored: pool kv lacks page 5 of 6: no process has "
        "stored it, as far back as the journal goes." in trial.why()
    )


def test_a_full_queue(trial: Trial) -> None:
    few = attrs.evolve(patient().transfers, writers=1, queue=1)
    engine = trial.engine(core=attrs.evolve(patient(), transfers=few))
    engine.fill(NAMES, PAGES)
    manager = TransferManager(engine.attachment)
    busy, goes_on = threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        if batch.operation is Operation.PUT:
            busy.set()
            assert goes_on.wait(60)

    engine.shelf.trouble = hold
    first = manager.write("kv", NAMES[:1], PAGES[:1])
    assert busy.wait(60)
    second = manager.write("kv", NAMES[1:2], PAGES[1:2])
    manager.write("kv", NAMES[2:3], PAGES[2:3])
    goes_on.set()
    assert first.wait(60)
    assert second.wait(60)
    engine.shelf.trouble = None
    ask(engine)
    assert (
        "lacks page 3 of 6: it was not moved, because too many transfers waited."
        in trial.why()
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("rate_limit", "the engine did not ask: it limits how much is loaded at once."),
        ("too_short", "the engine did not ask: what is left of the prompt is too shor"),
    ],
)
def test_a_lookup_that_the_engine_left_out(
    trial: Trial, reason: str, said: str
) -> None:
    engine = trial.engine()
    store(engine)
    engine.attachment.notify(LookupSkipped(request="r", reason=reason))
    assert trial.why().startswith("Storage was not asked for this request: " + said)


def test_a_page_that_the_prompt_does_not_fill(trial: Trial) -> None:
    """A prompt one token short of a page: no engine stores its last page."""
    engine = trial.engine()
    tokens = len(NAMES) * 4 - 1
    store(engine, tokens // 4)
    ask(engine)
    assert "lacks page 6 of 6: no process has stored it" in trial.why()


def window() -> Any:
    return attrs.evolve(
        attention(),
        name="swa",
        anchor=False,
        indices_from="kv",
        hit_policy=HitPolicy.TRAILING_PAGES,
        window_pages=2,
    )


def test_the_tail_of_a_window(trial: Trial) -> None:
    engine = trial.engine(pools=(attention(), window()))
    store(engine)
    # No prefix of six pages needs the first ones; evicted is what counts.
    lose(engine.shelf, 0, 1, 4, pool=".swa")
    ask(engine)
    assert trial.why().startswith(
        "4 of 6 pages could be restored: pool swa lacks page 5 of 6: it was stored, "
        "and made way for other pages since."
    )


def test_a_state(trial: Trial) -> None:
    engine = trial.engine(pools=(attention(), states()))
    store(engine)
    lose(engine.shelf, 3, 4, 5, pool="mamba")
    ask(engine)
    assert "3 of 6 pages could be restored: pool mamba lacks page 6" in trial.why()


def test_a_draft(trial: Trial) -> None:
    engine = trial.engine(pools=(attention(), draft()))
    store(engine)
    lose(engine.shelf, 0, pool="draft")
    ask(engine)
    code, out = ask_all(trial)
    assert code == 0, "the target has all it needs"
    assert out.startswith(
        "All 6 pages could be restored. Beside it, pool draft lacks page 1 of 6: it "
        "was stored, and made way for other pages since."
    )


def ask_all(trial: Trial) -> tuple[int, str]:
    assert trial.journal.flush(20)
    code, out = trial.ask_why("--journal", trial.folder, "--request", "r")
    return code, " ".join(out.split())


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


def test_a_pool_that_no_backend_takes(trial: Trial) -> None:
    engine = trial.engine(shelves=(NoDraft(),), pools=(attention(), draft()))
    with requested_by("r"):
        engine.attachment.put(NAMES, {"kv": PAGES})
        engine.attachment.exists(NAMES)
    code, out = ask_all(trial)
    assert code == 0
    assert "Beside it, pool draft is not stored: " in out


def test_another_tier(trial: Trial) -> None:
    near, far = Shelf("near"), Shelf("far")
    store(trial.engine(shelves=(near,)))
    ask(trial.engine(shelves=(far,)))
    assert "it is stored in a tier that was not asked." in trial.why()


def test_cleared(trial: Trial) -> None:
    engine = trial.engine()
    store(engine)
    engine.attachment.clear()
    ask(engine)
    assert "its namespace was cleared." in trial.why()


def test_the_guide_has_every_cause() -> None:
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "why.md"
    table = (
        guide.read_text().partition("## What it can say")[2].partition("\n\nThe ")[0]
    )
    named = {name for line in table.splitlines() for name in line.split("`")[1:4:2]}
    assert not {str(one) for one in Cause} - named


def test_the_journal_has_neither_tokens_nor_salts(trial: Trial) -> None:
    engine = trial.engine(namespace=Namespace(model="m", salt="a secret"))
    store(engine)
    assert trial.journal.flush(20)
    lines = [
        line
        for file in trial.folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert lines
    assert "a secret" not in "".join(lines)
    known = {name for line in lines for name in json.loads(line)}
    assert not {name for name in known if "token" in name or "salt" in name}
