"""Room for each tenant: who stored a page, how much it takes, and who loses first."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdock.batch import Batch, Operation, Outcome
from kvdock.capacity import TenantUse
from kvdock.config.tenants import TenantRoom, Tenants
from kvdock.namespace import canonical
from kvdock_segments import (
    PosixIOEngine,
    SegmentSettings,
    SegmentStore,
    StoreLocation,
    elsewhere,
    eviction,
)
from kvdock_segments.allocator import SegmentAllocator
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.room import tenants_in
from kvdock_segments.tenant_count import TenantCount, sums
from kvdock_segments.walk import segments

OpenDepot = Callable[..., Any]
ACME, BELL = 7, 2**32 - 1
QUOTA = 2 << 20
PAGE = 8192
TORTURE = os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1"
NAMESPACE = hashlib.sha256(b"{}").hexdigest()


def tenants_on_disk(depot: Any) -> dict[int, int]:
    """Count the pages of each tenant as the records of all namespaces say."""
    found: dict[int, int] = {}
    for namespace in {depot.store.place.namespace}:
        for segment in segments(depot.root, namespace):
            live = segment.contents.records[segment.live]
            for number in live["tenant"].tolist():
                found[number] = found.get(number, 0) + 1
    return found


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_page_is_recorded_with_the_tenant_of_its_batch(
    open_depot: OpenDepot, count: int
) -> None:
    depot = open_depot()
    depot.put(range(count), tenant=ACME)
    depot.put(range(100, 100 + count), tenant=BELL)
    depot.put(range(200, 200 + count))
    # What is there already keeps its tenant.
    depot.put(range(count), tenant=BELL)
    assert tenants_on_disk(depot) == {ACME: count, BELL: count, 0: count}
    again = open_depot()
    assert again.get(range(count)) == [0] * count
    assert again.get(range(200, 200 + count)) == [0] * count


def test_a_page_without_a_tenant_has_that_of_its_namespace(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(tenant=BELL)
    depot.put(range(3))
    depot.put(range(10, 14), tenant=ACME)
    assert tenants_on_disk(depot) == {BELL: 3, ACME: 4}


def test_a_retained_page_keeps_its_tenant(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(5), tenant=ACME, expire_at=np.full(5, 2**32 - 2))
    assert tenants_on_disk(depot) == {ACME: 5}


def rooms(**quotas: int) -> Tenants:
    """Return tenants of which some have quotas, and the numbers ACME and BELL."""
    digests = {"acme": f"{ACME:08x}" + "0" * 56, "bell": f"{BELL:08x}" + "0" * 56}
    return Tenants(
        digests, {name: TenantRoom(quota=quota) for name, quota in quotas.items()}
    )


def fresh(start: int, count: int, calls: int) -> Iterator[range]:
    for call in range(calls):
        yield range(start + call * count, start + (call + 1) * count)


def used(depot: Any) -> dict[str, int]:
    found = depot.store.capacity().tenants
    return {name: one.used_bytes for name, one in found.items() if one.used_bytes}


def test_a_tenant_above_its_quota_pays_for_everyone(open_depot: OpenDepot) -> None:
    half = QUOTA // 2
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=half, bell=half // 2))
    depot.put(range(60), tenant=ACME)
    for numbers in fresh(10_000, 20, 40):
        depot.put(numbers, tenant=BELL)
    assert depot.there(range(60)) == [True] * 60
    assert used(depot)["bell"] > half // 2  # room that no one uses is lent
    # Who lent it gets it back, from the one that is above its quota.
    stored = depot.put(range(60, 110), tenant=ACME)
    assert stored.ok.all()
    assert depot.there(range(110)) == [True] * 110
    assert depot.get(range(110)) == [0] * 110


def on_disk(depot: Any) -> dict[int, set[bytes]]:
    """Return the digests of each tenant's pages, in all namespaces of the root."""
    found: dict[int, set[bytes]] = {}
    for namespace in DirectoryStore(depot.root).namespaces():
        for segment in segments(depot.root, namespace):
            live = segment.contents.records[segment.live]
            for one in live:
                where = f"{namespace}{segment.folder}".encode() + one.tobytes()[:16]
                found.setdefault(int(one["tenant"]), set()).add(where)
    return found


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of other pools be looked at whenever they may have changed."""
    monkeypatch.setattr(elsewhere, "_LOOK_S", 0)
    monkeypatch.setattr(elsewhere, "_PATIENCE", 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "delete", "clear", "reopen"]),
        st.integers(0, 2),  # which store
        st.sampled_from([ACME, BELL, 0]),
        st.integers(0, 150),
        st.integers(1, 40),
    ),
    max_size=25,
)


def law(open_depot: OpenDepot, root: Path, steps: Any, quota: int = 1 << 20) -> None:
    """Hold what is counted, and who pays, against the records on disk."""
    shares = {ACME: quota // 2, BELL: quota // 4}
    limits = {
        "quota": quota,
        "tenants": rooms(acme=shares[ACME], bell=shares[BELL]),
        "segment_bytes": 128 << 10,
    }
    where: list[dict[str, Any]] = [{}, {"pool": "other"}, {"namespace": "ab" * 32}]
    depots = [open_depot(root, **one, **limits) for one in where]
    for what, at, tenant, first, count in steps:
        depot = depots[at]
        numbers = [tenant % 97 * 1000 + n for n in range(first, first + count)]
        before = on_disk(depot)
        if what == "reopen":
            depot.store.close()
            depots[at] = open_depot(root, **where[at], **limits)
        else:
            done = {
                "put": partial(depot.put, numbers, tenant=tenant),
                "get": partial(depot.get, numbers),
                "delete": partial(depot.delete, numbers),
                "clear": depot.clear,
            }
            done[what]()
        after = on_disk(depot)
        expected = {
            name: len(after.get(number, ())) * depot.page_bytes
            for name, number in (("acme", ACME), ("bell", BELL), ("default", 0))
        }
        for one in depots:
            one.there([0])
            found = one.store.capacity().tenants
            assert {name: use.used_bytes for name, use in found.items()} == expected
        if what == "put":
            hold_innocents(before, after, shares, tenant)


def hold_innocents(
    before: Any, after: Any, shares: dict[int, int], writer: int
) -> None:
    """Hold that no one else loses a page below its quota."""
    for number, share in shares.items():
        lost = len(before.get(number, set()) - after.get(number, set()))
        if number != writer and lost:
            assert len(after.get(number, ())) >= share // PAGE


@pytest.mark.usefixtures("looks_at_once")
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_room_is_what_the_records_say(
    open_depot: OpenDepot,
    tmp_path_factory: pytest.TempPathFactory,
    steps: Any,
) -> None:
    law(open_depot, tmp_path_factory.mktemp("law"), steps)


def test_no_tenant_within_its_quota_pays_for_one_above_its_own(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=QUOTA // 4))
    mine = range(50)
    depot.put(mine, tenant=ACME)
    for numbers in fresh(10_000, 25, 60):
        depot.put(numbers, tenant=BELL)  # has no quota, so all it has is lent
    assert depot.get(mine) == [0] * len(mine)
    depot.clear()
    depot.store.close()
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=QUOTA // 4, bell=QUOTA // 4))
    depot.put(mine, tenant=ACME)
    for numbers in fresh(10_000, 25, 60):
        assert depot.put(numbers, tenant=BELL).ok.all()
        assert all(depot.there(mine[-1:]))
    assert depot.get(mine) == [0] * len(mine)


SHARE = 14 * QUOTA // 64
FLOOD = range(10_000, 10_000 + 18 * QUOTA // 16 // PAGE)
"""A prompt that is longer than the whole store."""


@pytest.mark.parametrize("rooms_of_flood", [{"default": SHARE}, {}], ids=str)
@pytest.mark.parametrize("looks", ["never", "once", "before each call"])
@pytest.mark.parametrize("count", [4, 16, len(FLOOD)])
@pytest.mark.parametrize("pools", [("kv", "kv"), ("kv", "draft")])
@pytest.mark.usefixtures("looks_at_once")
def test_a_flood_takes_nothing_of_the_room_of_others(
    open_depot: OpenDepot,
    rooms_of_flood: dict[str, int],
    looks: str,
    count: int,
    pools: tuple[str, str],
) -> None:
    tenants = rooms(acme=SHARE, bell=SHARE, **rooms_of_flood)
    limits = {"quota": QUOTA, "segment_bytes": 128 << 10, "tenants": tenants}
    others, flooder = (open_depot(pool=pool, **limits) for pool in pools)
    mine = {ACME: range(48), BELL: range(100, 148)}
    for tenant, numbers in mine.items():
        for at in range(0, len(numbers), 6):
            # In turns, so that tenants share segments.
            assert others.put(numbers[at : at + 6], tenant=tenant).ok.all()
    if looks == "once":
        flooder.there(FLOOD)
    for at in range(0, len(FLOOD), count):
        if looks == "before each call":
            flooder.there(FLOOD)
        flooder.put(FLOOD[at : at + count])
    for numbers in mine.values():
        assert others.get(numbers) == [0] * len(numbers)
    assert used(flooder)["default"] >= QUOTA // 4
    if looks != "never":
        assert flooder.restorable(FLOOD) * PAGE >= SHARE


@pytest.mark.usefixtures("looks_at_once")
def test_a_tenant_gets_its_room_back_from_one_whose_prompt_goes_on(
    open_depot: OpenDepot,
) -> None:
    tenants = rooms(acme=SHARE, bell=SHARE, default=SHARE)
    depot = open_depot(quota=QUOTA, segment_bytes=128 << 10, tenants=tenants)
    # What was looked up first is stored last: all that was stored since is warmer.
    depot.there(mine := range(40))
    depot.there(FLOOD)
    for at in range(0, len(FLOOD), 16):
        depot.put(FLOOD[at : at + 16])
    for first in range(0, len(mine), 4):
        assert depot.put(mine[first : first + 4], tenant=ACME).ok.all()
    assert depot.get(mine) == [0] * len(mine)


@pytest.mark.usefixtures("looks_at_once")
def test_no_whole_segment_goes_of_a_tenant_that_has_little_above_its_quota(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = rooms(acme=1 << 20, bell=60 * PAGE)
    other = open_depot(namespace="ab" * 32, tenant=BELL, tenants=tenants)
    assert other.put(range(61)).ok.all()
    other.store.close()
    disk = disk_usage(other.root)
    monkeypatch.setattr(
        SegmentAllocator, "free_bytes", lambda _: disk - disk_usage(other.root)
    )
    depot = open_depot(pool="late", tenants=tenants)
    assert not depot.put(range(30), tenant=ACME).ok.any()
    assert used(depot)["bell"] == 61 * PAGE


def counts_twice(self: TenantCount, records: Any, object_bytes: Any) -> None:
    """Count what comes twice: where it is written, and where it is read."""
    for number, nbytes in sums(self.owners(records["tenant"]), object_bytes):
        self.nbytes[number] += 2 * nbytes


def counts_until_it_is_gone_twice(*_: Any) -> None:
    """Go on counting what went: a page that comes back is there twice."""


def evicts_the_innocent(_index: Any, _rows: Any, may_go: Any, *_: Any) -> Any:
    """Take the coldest pages, of any tenant."""
    return may_go


def evicts_below_the_quota(
    index: Any, rows: Any, may_go: Any, _before: Any, shares: Any
) -> Any:
    """Take all that a tenant has once it is above its quota."""
    whose = index.tenants.owners(index.records["tenant"][rows])
    return may_go & np.isin(whose, list(shares.over))


STEPS_OF_MUTANTS = [
    ("put", 0, ACME, 0, 30),
    ("delete", 0, ACME, 0, 10),
    ("put", 0, BELL, 0, 40),
    *[("put", 0, BELL, 40 + 30 * at, 30) for at in range(8)],
]


@pytest.mark.usefixtures("looks_at_once")
@pytest.mark.parametrize(
    ("where", "name", "mutant", "caught_by"),
    [
        (TenantCount, "add", counts_twice, "law"),
        (TenantCount, "remove", counts_until_it_is_gone_twice, "law"),
        (
            eviction,
            "_taxed",
            evicts_the_innocent,
            "test_no_tenant_within_its_quota_pays_for_one_above_its_own",
        ),
        (
            eviction,
            "_taxed",
            evicts_below_the_quota,
            "test_a_tenant_loses_no_more_than_it_has_above_its_quota",
        ),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_mutant_is_caught(
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    where: Any,
    name: str,
    mutant: Any,
    caught_by: str,
) -> None:
    monkeypatch.setattr(where, name, mutant)
    held = partial(law, root=tmp_path / "law", steps=STEPS_OF_MUTANTS)
    tests = {**globals(), "law": held}
    with pytest.raises(AssertionError):
        tests[caught_by](open_depot)


def test_a_tenant_loses_no_more_than_it_has_above_its_quota(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=QUOTA, bell=QUOTA))
    for numbers in fresh(10_000, 25, 20):
        depot.put(numbers, tenant=BELL)
    quota = used(depot)["bell"] - 4 * PAGE
    depot.store.close()
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=QUOTA, bell=quota))
    for numbers in fresh(0, 1, 60):
        depot.put(numbers, tenant=ACME)
        if used(depot)["bell"] < quota + 4 * PAGE:
            break
    assert quota - PAGE <= used(depot)["bell"] < quota + 4 * PAGE


def disk_usage(root: Path) -> int:
    return sum(one.stat().st_size for one in root.rglob("*") if one.is_file())


@pytest.mark.usefixtures("looks_at_once")
def test_other_namespaces_pay_where_the_disk_is_the_bound(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = rooms(acme=1 << 20, bell=1 << 20)
    flooder = open_depot(namespace="ab" * 32, tenant=BELL, tenants=tenants)
    for numbers in fresh(10_000, 25, 16):
        assert flooder.put(numbers).ok.all()
    flooder.store.close()
    assert used(open_depot(tenants=tenants)) == {"bell": 400 * PAGE}
    # From now on the disk has no more room than this.
    disk = disk_usage(flooder.root)
    monkeypatch.setattr(
        SegmentAllocator, "free_bytes", lambda _: disk - disk_usage(flooder.root)
    )
    depot = open_depot(pool="late", tenants=tenants)
    assert depot.put(range(30), tenant=ACME).ok.all()
    assert used(depot)["bell"] < 400 * PAGE
    assert depot.get(range(30)) == [0] * 30
    # One within its quota has nothing to pay.
    assert not depot.put(range(100, 3000), tenant=ACME).ok.all()
    assert used(depot)["bell"] >= (1 << 20) - (256 << 10)


def test_limits_that_change_and_tenants_that_come_and_go_count_at_once(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=QUOTA))
    depot.put(range(80), tenant=ACME)
    depot.put(range(100, 150), tenant=BELL)
    depot.put(range(200, 230))
    depot.store.close()
    tenants = rooms(default=1 << 20)
    del tenants["acme"]
    depot = open_depot(quota=QUOTA, tenants=tenants)
    assert used(depot) == {"default": 110 * PAGE, "bell": 50 * PAGE}
    depot.store.close()
    # Smaller by now, so who was within its quota is above it.
    depot = open_depot(quota=QUOTA, tenants=rooms(acme=1 << 18, bell=QUOTA))
    for numbers in fresh(1000, 10, 12):
        depot.put(numbers, tenant=BELL)
    assert sum(depot.there(range(80))) < 80
    assert all(depot.there(range(100, 150)))


@pytest.mark.usefixtures("looks_at_once")
def test_a_namespace_of_before_belongs_to_the_tenant_of_its_salt(
    open_depot: OpenDepot,
) -> None:
    tenants = rooms(acme=QUOTA)
    record = canonical({"salt_sha256": tenants["acme"]})
    namespace = hashlib.sha256(record).hexdigest()
    depot = open_depot(namespace=namespace, record=record)
    depot.put(range(7))
    depot.store.close()
    assert used(open_depot(tenants=tenants)) == {"acme": 7 * PAGE}
    assert tenants_in(depot.root, tenants)["acme"] == TenantUse(7 * PAGE, QUOTA, 0)


def test_a_tenant_promises_a_share_of_its_own_quota(open_depot: OpenDepot) -> None:
    tenants = rooms(acme=40 * PAGE, bell=40 * PAGE)
    tenants.rooms["acme"] = TenantRoom(quota=40 * PAGE, retained_share=0.25)
    depot = open_depot(quota=QUOTA, tenants=tenants)
    soon = int(time.time()) + 3600
    assert int(depot.put(range(20), tenant=ACME, keep_until=soon).kept.sum()) == 10
    assert depot.put(range(100, 120), tenant=BELL, keep_until=soon).kept.all()
    assert depot.store.capacity().tenants["acme"].promised_bytes == 10 * PAGE
    keys = depot.keys([15, 105])
    retained = depot.store.run(Batch(Operation.RETAIN, keys, keep_until=soon + 9))
    assert retained.outcomes.tolist() == [int(Outcome.REFUSED), int(Outcome.OK)]
    retained = depot.store.run(Batch(Operation.RETAIN, keys[:1], keep_until=0))
    assert retained.ok.all()
    # Its room is spent; what is promised already can be extended.
    keys = depot.keys(range(10))
    assert depot.store.run(Batch(Operation.RETAIN, keys, keep_until=soon + 60)).ok.all()
    assert depot.store.capacity().tenants["acme"].promised_bytes == 10 * PAGE
    assert tenants_on_disk(depot) == {ACME: 20, BELL: 20}


def hits_of(depot: Any, tenant: int, rng: Any, draws: int, flood: Any) -> float:
    """Return the share of a tenant's pages that are found, of a set beyond its room."""
    hits = 0
    for at in range(draws):
        first = tenant % 97 * 100_000 + 8 * int(rng.zipf(1.3) % 60)
        numbers = range(first, first + 8)
        there = depot.there(numbers)
        hits += sum(there) if at > draws // 3 else 0
        depot.get([n for n, one in zip(numbers, there, strict=True) if one])
        depot.put(numbers, tenant=tenant)
        flood(at)
    return hits


@pytest.mark.slow
def test_one_that_floods_takes_no_hits_of_the_others(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    quota, draws = 2 << 20, 400
    for tenant in (ACME, BELL):
        alone = open_depot(
            tmp_path / f"alone-{tenant}",
            quota=quota,
            tenants=rooms(acme=quota, bell=quota),
        )
        own = hits_of(alone, tenant, np.random.default_rng(1), draws, lambda _: None)
        crowded = open_depot(
            tmp_path / f"crowded-{tenant}",
            quota=3 * quota,
            tenants=rooms(acme=quota, bell=quota, default=quota // 2),
        )

        def flood(at: int, depot: Any = crowded) -> None:
            depot.put(range(10**7 + 40 * at, 10**7 + 40 * at + 40))

        found = hits_of(crowded, tenant, np.random.default_rng(1), draws, flood)
        assert own
        assert found >= 0.97 * own, (found, own)


_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_room
test_room.store_until_killed(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""
KILLED: dict[str, Any] = {"quota": 4 << 20, "segment_bytes": 256 << 10}


def store_until_killed(root: Path, tenant: int, seed: int) -> None:
    """Store pages of one tenant, new ones each time; one line for each call."""
    place = StoreLocation(
        root=root,
        namespace=NAMESPACE,
        pool="kv",
        object_bytes=(PAGE,),
        tenants=rooms(acme=1 << 20, bell=1 << 20),
    )
    settings = SegmentSettings(root, free_space=0, **KILLED)
    store = SegmentStore(place, PosixIOEngine(2), settings)
    chance = np.random.default_rng(seed)
    memory = np.zeros((16, PAGE), np.uint8)
    at = (memory.ctypes.data + np.arange(16) * PAGE)[:, None]
    sizes = np.broadcast_to(np.int64(PAGE), (16, 1))
    while True:
        keys = [
            f"{NAMESPACE}/{one:032x}.kv"
            for one in chance.integers(1 << 40, 1 << 50, 16)
        ]
        store.run(Batch(Operation.PUT, keys, at, sizes, tenant=tenant))
        print(tenant, flush=True)  # noqa: T201 - the trial counts lines


def _killed_in_turn(open_depot: OpenDepot, root: Path, kills: int) -> None:
    """Kill writers while others go on; then hold room and innocents against records."""
    depot = open_depot(root, tenants=rooms(acme=1 << 20, bell=1 << 20), **KILLED)
    mine = range(100)
    assert depot.put(mine, tenant=ACME).ok.all()
    here = str(Path(__file__).parent)
    for seed in range(kills):
        command = [sys.executable, "-c", _KILLED, here, str(root), str(BELL)]
        with ExitStack() as running:
            floods = [
                running.enter_context(
                    subprocess.Popen([*command, str(one)], stdout=subprocess.PIPE)
                )
                for one in (2 * seed, 2 * seed + 1)
            ]
            for one in floods:
                assert one.stdout is not None
                for _ in range(30 + seed % 7):
                    assert one.stdout.readline()
                one.kill()
        # As a process finds it that begins now, with another limit each time.
        quota = (1 << 20) + seed % 3 * (256 << 10)
        again = open_depot(root, tenants=rooms(acme=quota, bell=quota), **KILLED)
        counts = tenants_on_disk(again)
        assert used(again) == {"acme": counts[ACME] * PAGE, "bell": counts[BELL] * PAGE}
        assert all(again.there(mine))
        assert again.put(mine, tenant=ACME).ok.all()
        assert again.get(mine) == [0] * len(mine)
        again.store.close()


@pytest.mark.slow
def test_room_survives_kills(open_depot: OpenDepot, tmp_path: Path) -> None:
    _killed_in_turn(open_depot, tmp_path / "killed", 1)


@pytest.mark.slow
def test_room_survives_many_kills(open_depot: OpenDepot, tmp_path: Path) -> None:
    _killed_in_turn(open_depot, tmp_path / "killed", 100 if TORTURE else 6)
