"""What `kvdock store` does with a bucket, past any engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from object_server import Fault, ObjectServer

from kvdock import Dock
from kvdock.errors import KvdockError, NamespaceError
from kvdock.former_generations import FormerGenerations
from kvdock.generations import Generation
from kvdock.namespace import canonical
from kvdock.stores import QUIET_S
from kvdock_s3.admin import BucketStore, open_store
from kvdock_segments.directory_store import DirectoryStore

PAGE_BYTES = (64 << 10) + 40
OTHER = "f" * 64


@pytest.fixture
def stored(server: ObjectServer, engine: Callable[..., Any]) -> tuple[Any, BucketStore]:
    """Eight pages of one namespace, an object of another, and a stranger's."""
    mine = engine()
    mine.put()
    some = next(iter(server.objects.values()))
    for name in (
        f"tests/{OTHER}/0123.kv.L0-1",
        "tests/notes.txt",
        "tests/more/x",
        "elsewhere/x",
    ):
        server.objects[name] = some
    given = server.settings()
    found = open_store(str(given.pop("url")), given)
    assert isinstance(found, BucketStore)
    return mine, found


def test_a_directory_is_not_a_bucket() -> None:
    assert open_store("/var/cache/kvdock", {}) is None


def test_a_url_of_another_kind_is_left_to_other_backends() -> None:
    assert open_store("ftp://host/kv", {}) is None
    assert open_store("http://[::1", {}) is None


def test_namespaces_are_those_below_the_prefix(stored: Any) -> None:
    mine, store = stored
    assert store.namespaces() == tuple(sorted([mine.attachment.namespace, OTHER]))


def test_a_survey_counts_pages_by_pool(stored: Any) -> None:
    mine, store = stored
    found = store.survey(mine.attachment.namespace)
    assert (found.model, found.recorded, found.pages) == ("tests", True, 8)
    (pool,) = found.pools
    assert (pool.pool, pool.object_bytes) == ("kv", PAGE_BYTES)
    assert found.file_bytes == 8 * PAGE_BYTES
    assert found.used_ns > 0
    bare = store.survey(OTHER)
    assert (bare.model, bare.recorded, bare.pages) == ("", False, 1)


def test_pages_are_found_by_their_keys(stored: Any) -> None:
    mine, store = stored
    namespace = mine.attachment.namespace
    assert store.record(namespace)["model"] == "tests"
    assert store.record(OTHER) == {}
    holds = store.finder(namespace)
    assert holds([mine.key(0), mine.key(7), f"{namespace}/absent.kv.L0-1"]) == [
        True, True, False,
    ]  # fmt: skip


def test_verify_finds_every_kind_of_damage_and_heals(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    namespace = mine.attachment.namespace
    assert store.verify(namespace).ok
    keys = [f"tests/{mine.key(page)}" for page in range(8)]
    flip = bytearray(server.objects[keys[0]].data)
    flip[100] ^= 1
    bodies = {
        keys[0]: bytes(flip),
        keys[1]: server.objects[keys[1]].data[:-1],
        keys[2]: b"x",
        keys[3]: server.objects[keys[4]].data,
    }
    for key, data in bodies.items():
        server.objects[key] = attrs.evolve(server.objects[key], data=data)
    seen: list[int] = []
    found = store.verify(namespace, seen.append)
    assert not found.ok
    assert found.good == 4
    assert [f"tests/{one.key}" for one in found.bad] == keys[:4]
    assert sum(seen) == 5 * PAGE_BYTES + PAGE_BYTES * 2
    healed = store.verify(namespace, heal=True)
    assert healed.forgotten == 4
    assert store.verify(namespace).good == 4
    assert set(mine.get()[4:]) == {0}


def test_clear_deletes_one_namespace_and_keeps_its_record(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    namespace = mine.attachment.namespace
    assert store.clear(namespace) == 8 * PAGE_BYTES
    assert sorted(server.objects) == sorted(
        [
            f"tests/{namespace}/_namespace.json",
            f"tests/{OTHER}/0123.kv.L0-1",
            "tests/notes.txt",
            "tests/more/x",
            "elsewhere/x",
        ]
    )


def test_pages_are_deleted_by_their_age(server: ObjectServer, stored: Any) -> None:
    mine, store = stored
    for page in (1, 5):
        key = f"tests/{mine.key(page)}"
        old = server.objects[key].modified - timedelta(hours=2)
        server.objects[key] = attrs.evolve(server.objects[key], modified=old)
    namespace = mine.attachment.namespace
    assert store.collect(namespace, older_s=3 * 3600) == 0
    assert store.collect(namespace, older_s=3600) == 2 * PAGE_BYTES
    found = mine.get()
    assert [page for page, outcome in enumerate(found) if outcome] == [1, 5]
    assert store.survey(OTHER).pages == 1


@pytest.mark.parametrize("hours", [-240, -1, 240])
def test_ages_are_by_the_clock_of_the_server_and_not_of_this_host(
    server: ObjectServer, engine: Callable[..., Any], hours: int
) -> None:
    server.clock_ahead = timedelta(hours=hours)
    mine = engine()
    mine.put()
    given = server.settings()
    store = open_store(str(given.pop("url")), given)
    assert isinstance(store, BucketStore)
    namespace = mine.attachment.namespace
    before = set(server.objects)
    assert store.collect(namespace, older_s=1800) == 0
    assert set(server.objects) == before, "what is stored to see the time goes"
    server.clock_ahead += timedelta(hours=1)
    assert store.collect(namespace, older_s=1800) == 8 * PAGE_BYTES
    name = f"tests/{namespace}/_namespace.json"
    assert name in server.objects
    server.clock_ahead += timedelta(hours=25)
    store.collect(namespace)
    assert name not in server.objects


def test_nothing_is_deleted_by_its_age_where_the_time_cannot_be_seen(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    server.clock_ahead = timedelta(hours=2)
    server.fail(Fault.FORBIDDEN, "PUT")
    with pytest.raises(KvdockError, match="to see the server's time"):
        store.collect(mine.attachment.namespace, older_s=1800)
    assert store.survey(mine.attachment.namespace).pages == 8


def test_the_oldest_pages_go_where_few_may_stay(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    for page in range(8):
        key = f"tests/{mine.key(page)}"
        then = server.objects[key].modified - timedelta(hours=8 - page)
        server.objects[key] = attrs.evolve(server.objects[key], modified=then)
    store.collect(mine.attachment.namespace, to_bytes=3 * PAGE_BYTES)
    assert [bool(one) for one in mine.get()] == [True] * 5 + [False] * 3


def test_the_record_of_a_namespace_without_pages_goes_once_it_is_old(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    namespace = mine.attachment.namespace
    name = f"tests/{namespace}/_namespace.json"
    store.clear(namespace)
    store.collect(namespace)
    assert name in server.objects
    old = server.objects[name].modified - timedelta(hours=25)
    server.objects[name] = attrs.evolve(server.objects[name], modified=old)
    store.collect(namespace)
    assert name not in server.objects


def test_a_record_that_was_altered_is_not_believed_and_stops_an_engine(
    server: ObjectServer, stored: Any, engine: Callable[..., Any]
) -> None:
    mine, store = stored
    name = f"tests/{mine.attachment.namespace}/_namespace.json"
    other = re.sub(rb"tests", b"other", server.objects[name].data)
    server.objects[name] = attrs.evolve(server.objects[name], data=other)
    assert not store.survey(mine.attachment.namespace).recorded
    with pytest.raises((KvdockError, NamespaceError), match="does not fit its name"):
        engine()


def test_more_objects_than_one_listing_and_one_deletion_take(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    namespace = mine.attachment.namespace
    small = attrs.evolve(next(iter(server.objects.values())), data=b"")
    for number in range(2500):
        server.objects[f"tests/{namespace}/{number:064x}.many.L0-1"] = small
    assert store.survey(namespace).pages == 8 + 2500
    store.clear(namespace)
    assert store.survey(namespace).pages == 0


def test_a_missing_permission_is_an_error_with_a_way_out(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    server.fail(Fault.FORBIDDEN, "LIST", "GET", "DELETEMANY")
    for call in (
        store.namespaces,
        lambda: store.survey(mine.attachment.namespace),
        lambda: store.clear(mine.attachment.namespace),
    ):
        with pytest.raises(KvdockError, match="cannot be listed") as raised:
            call()
        assert "doctor" in raised.value.fix


def test_objects_that_cannot_be_read_are_an_error_and_not_called_wrong(
    server: ObjectServer, stored: Any
) -> None:
    mine, store = stored
    server.fail(Fault.FORBIDDEN, "GET", containing=mine.hashes[2])
    with pytest.raises(KvdockError, match="cannot be read"):
        store.verify(mine.attachment.namespace, heal=True)
    assert len([key for key in server.objects if ".kv." in key]) == 9


def test_a_bucket_is_copied_to_a_directory_and_back_by_its_keys(
    server: ObjectServer, stored: Any, tmp_path: Path
) -> None:
    mine, store = stored
    namespace, archive = mine.attachment.namespace, DirectoryStore(tmp_path / "archive")
    pages = list(store.pages(namespace))
    with archive.receive(namespace, canonical(store.record(namespace))) as receiver:
        for page in pages:
            assert not receiver.has(page)
            data = page.read()
            assert data is not None
            assert receiver.take(page, data)
            assert receiver.has(page)
    assert archive.survey(namespace).model == "tests"
    keys = [page.key for page in pages]
    assert sorted(one.key for one in archive.pages(namespace, keys)) == sorted(keys)
    before = {name: bytes(one.data) for name, one in server.objects.items()}
    store.clear(namespace)
    with store.receive(namespace, canonical(archive.record(namespace))) as receiver:
        for page in archive.pages(namespace, keys):
            data = page.read()
            assert data is not None
            assert receiver.take(page, data)
        (unnamed, *_) = archive.pages(namespace)
        with pytest.raises(KvdockError, match="the source keeps none"):
            receiver.has(unnamed)
    assert {name: bytes(one.data) for name, one in server.objects.items()} == before


def test_a_damaged_object_is_not_copied(server: ObjectServer, stored: Any) -> None:
    mine, store = stored
    page = next(iter(store.pages(mine.attachment.namespace)))
    name = f"tests/{page.key}"
    data = server.objects[name].data
    changed = bytes([data[0] ^ 1]) + bytes(data[1:])
    server.objects[name] = attrs.evolve(server.objects[name], data=changed)
    assert page.read() is None
    del server.objects[name]
    assert page.read() is None


def test_generations_that_an_engine_has_left_go_and_what_may_be_open_stays(
    server: ObjectServer, engine: Callable[..., Any], eventually: Any
) -> None:
    """A bucket does not show who has a namespace open; its own the engine knows."""
    private, other = Generation.private(), Generation.private()
    versions = [Generation(run="policy", version=name) for name in ("1", "2", "3")]
    engines = {one: engine(generation=one.text) for one in (private, other, *versions)}
    for one in engines.values():
        one.put()

    def age(generation: Generation) -> None:
        folder = f"tests/{engines[generation].attachment.namespace}/"
        for name, found in server.objects.items():
            if name.startswith(folder):
                long_ago = found.modified - timedelta(seconds=2 * QUIET_S)
                server.objects[name] = attrs.evolve(found, modified=long_ago)

    def pages() -> set[str]:
        return {name.split("/")[1] for name in server.objects if ".kv." in name}

    def digests(*generations: Generation) -> set[str]:
        return {engines[one].attachment.namespace for one in generations}

    dock = Dock.load(require=("s3",))
    given = SimpleNamespace(used=("s3",), backends={"s3": server.settings()})
    former = FormerGenerations("policy", 1, dock, given)  # type: ignore[arg-type]  # what it reads of it
    former.leave([engines[private].attachment])
    former.delete([engines[versions[0]].attachment])
    stays = digests(other, *versions)
    eventually(lambda: pages() == stays)
    # An engine that was killed left its own, and of the run nothing is written to two.
    for one in (other, versions[0], versions[1]):
        age(one)
    former.delete([engines[versions[0]].attachment])
    eventually(lambda: pages() == digests(versions[0], versions[2]))
