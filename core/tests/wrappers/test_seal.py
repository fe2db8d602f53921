"""Sealed pages: only the right key, at the right place, opens them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from plugins_of_objects import Full, Objects
from plugins_of_objects import loaded as plugin_of
from shelf import Engine, Shelf, attention, draft, hashes, memory_at, patient, states

from kvdock.batch import Batch, BatchResult, MemoryGate, MemoryHold, Operation, Outcome
from kvdock.config.tenants import read_tenants, salt_digest, tenant_number
from kvdock.events import requested_by, stored_for
from kvdock.journal import Cause, explain, read_journal
from kvdock.journal.observer import Journal, JournalSettings
from kvdock.namespace import Namespace
from kvdock.plugin.discovery import BrokenPlugin
from kvdock.plugin.hookspecs import AttachConfig, HostMemory
from kvdock.plugin.manifest import Support
from kvdock.plugin.wrapper import InnerStore
from kvdock.stores import verify_object
from kvdock.wrappers import key_ring, seal
from kvdock.wrappers.key_ring import DataKey, KeyRing, Subkey, add_key, destroy_keys
from kvdock.wrappers.seal import Seal, SealedStore, SealSettings

MASTER = bytes(range(32))


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key file with a key for everyone, looked at before each call."""
    monkeypatch.setattr(key_ring, "_CHECK_S", 0.0)
    monkeypatch.setenv("KV_MASTER_KEY", MASTER.hex())
    path = tmp_path / "keys.json"
    add_key(path, MASTER, "default")
    return path


def sealed(path: Path, **more: Any) -> Engine:
    given: dict[str, Any] = {"core": patient(), **more}
    buffer_bytes = given.pop("buffer_bytes", 4 << 20)
    around = Seal(SealSettings(keys=path, buffer_bytes=buffer_bytes))
    return Engine(wrappers=[("seal", around)], **given)


def stored(engine: Engine, count: int = 4) -> list[str]:
    names = hashes(count)
    engine.fill(names, range(count))
    moved = engine.attachment.put(names, engine.where(range(count)))
    assert not moved.outcomes["kv"].any(), moved.outcomes
    return names


def loaded(engine: Engine, names: list[str]) -> Any:
    engine.blank()
    where = engine.where(range(len(names)))
    return engine.attachment.get(names, where).outcomes["kv"]


@pytest.mark.parametrize("buffer_bytes", [1, 4 << 20])
@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_pages_come_back_through_any_buffer_and_in_any_pieces(
    keys: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int, piece: int
) -> None:
    monkeypatch.setattr(key_ring, "PIECE_BYTES", piece)
    pools = (attention(), draft(), states())
    engine_ = sealed(keys, pools=pools, buffer_bytes=buffer_bytes)
    with engine_.attachment:
        names = stored(engine_)
        assert not loaded(engine_, names).any()
        for pool, (at, name) in itertools.product(pools, enumerate(names)):
            assert engine_.holds(pool.name, name, at), pool.name


def test_nothing_of_a_page_is_stored_in_the_clear(keys: Path) -> None:
    engine = sealed(keys, namespace=Namespace(model="m", salt="of-acme"))
    with engine.attachment:
        for name in stored(engine):
            page = engine.content("kv", name).tobytes()
            for key, data in engine.shelf.objects.items():
                assert "of-acme" not in key
                assert not any(page[at : at + 8] in data for at in range(len(page) - 7))


def test_sealed_and_plain_pages_have_namespaces_of_their_own(keys: Path) -> None:
    shelf = Shelf()
    plain = Engine([Shelf(objects=shelf.objects)], core=patient())
    engine = sealed(keys, shelves=[shelf])
    with plain.attachment, engine.attachment:
        names = stored(engine)
        assert (loaded(plain, names) == Outcome.ABSENT).all()
        before = set(shelf.objects)
        stored(plain)
        spaces = [
            {key.split("/")[0] for key in some}
            for some in (before, set(shelf.objects) - before)
        ]
        assert [len(one) for one in spaces] == [1, 1]
        assert spaces[0] != spaces[1]
        assert not loaded(engine, names).any()


def test_no_two_objects_are_sealed_with_one_nonce(keys: Path) -> None:
    engine = sealed(keys)
    with engine.attachment:
        names = stored(engine, 8)
        first = dict(engine.shelf.objects)
        engine.shelf.objects.clear()
        stored(engine, 8)
        again = engine.shelf.objects
        assert set(first) == set(again)
        nonces = [one[-28:-16] for some in (first, again) for one in some.values()]
        assert len(set(nonces)) == 2 * len(names)
        # The same page under the same key is other bytes each time.
        assert all(first[key] != again[key] for key in first)


def test_without_the_right_key_pages_are_misses_and_stay_stored(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sealed(keys)
    with engine.attachment:
        names = stored(engine)
        before = dict(engine.shelf.objects)
    monkeypatch.setenv("KV_MASTER_KEY", bytes(32).hex())
    wrong = sealed(keys, shelves=[Shelf(objects=engine.shelf.objects)])
    with wrong.attachment:
        assert (loaded(wrong, names) == Outcome.REFUSED).all()
        assert wrong.attachment.exists(names).found == {"kv": 0}
        moved = wrong.attachment.put(hashes(1, 99), wrong.where([0]))
        assert moved.outcomes["kv"].tolist() == [Outcome.REFUSED]
    assert engine.shelf.objects == before
    assert "the master key does not open the key" in caplog.text
    assert MASTER.hex() not in caplog.text
    monkeypatch.setenv("KV_MASTER_KEY", MASTER.hex())
    right = sealed(keys, shelves=[Shelf(objects=engine.shelf.objects)])
    with right.attachment:
        assert not loaded(right, names).any()


def test_keys_rotate_without_losing_pages_and_a_destroyed_one_takes_its_own(
    keys: Path,
) -> None:
    engine = sealed(keys)
    with engine.attachment:
        old = stored(engine)
        add_key(keys, MASTER, "default")
        new = hashes(2, 50)
        engine.fill(new, range(2))
        engine.attachment.put(new, engine.where(range(2)))
        assert not loaded(engine, old).any()
        assert not loaded(engine, new).any()
        assert destroy_keys(keys, "default", 1) == 1
        before = dict(engine.shelf.objects)
        assert (loaded(engine, old) == Outcome.REFUSED).all()
        assert not any(engine.holds("kv", name, at) for at, name in enumerate(old))
        assert not loaded(engine, new).any()
        assert engine.attachment.exists(new).found == {"kv": 2}
        # They are not deleted: a backup of the key file could open them.
        assert engine.shelf.objects == before
        assert destroy_keys(keys, "default") == 1
        assert (loaded(engine, new) == Outcome.REFUSED).all()


@pytest.mark.parametrize("keys_left", [0, 1])
def test_a_journal_says_that_a_key_is_missing(
    keys: Path, tmp_path: Path, keys_left: int
) -> None:
    journal = Journal(JournalSettings(dir=tmp_path / "journal"))
    engine = sealed(keys, observers=[journal])
    with engine.attachment:
        names = stored(engine)
        for _ in range(keys_left):  # with another key, pages are found, and not loaded
            add_key(keys, MASTER, "default")
        destroy_keys(keys, "default", 1)
        with requested_by("r"):
            engine.attachment.exists(names)
            engine.attachment.get(names, engine.where(range(len(names))))
        assert journal.flush(10)
    answer = explain(partial(read_journal, tmp_path / "journal"), request="r")
    assert answer.pools[0].causes == {Cause.KEY: len(names)}
    assert "it is sealed, and its key is missing" in answer.verdict


def test_a_tenant_without_a_key_is_named_by_log_and_journal(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(JournalSettings(dir=tmp_path / "journal"))
    core = patient(tenants={"bell": {"salt": "b"}})
    engine = sealed(keys, observers=[journal], core=core)
    with engine.attachment:
        names = hashes(2)
        with stored_for(tenant_number(salt_digest("b"))):
            engine.attachment.put(names, engine.where([0, 1]))
        with requested_by("r"):
            engine.attachment.exists(names)
        assert journal.flush(10)
    answer = explain(partial(read_journal, tmp_path / "journal"), request="r")
    assert answer.pools[0].causes == {Cause.KEY: len(names)}
    (said,) = [one for one in caplog.messages if "key" in one]
    assert "pages of tenant 'bell' are not stored" in said


def test_each_tenant_has_a_key_of_its_own(keys: Path) -> None:
    add_key(keys, MASTER, "acme")
    core = patient(tenants={"acme": {"salt": "a"}})
    engine = sealed(keys, core=core, namespace=Namespace(model="m", salt="a"))
    others = [
        sealed(keys, core=core, namespace=Namespace(model="m", salt=salt))
        for salt in ("", "b")
    ]
    with engine.attachment:
        names = stored(engine)
        for other in others:
            stored(other)
        destroy_keys(keys, "acme")
        assert (loaded(engine, names) == Outcome.REFUSED).all()
        for other in others:
            with other.attachment:
                assert not loaded(other, names).any()


def test_a_request_of_another_tenant_is_sealed_with_its_key(keys: Path) -> None:
    number = add_key(keys, MASTER, "guest")
    objects: dict[str, bytes] = {}
    store, memory = one_object(keys, Kept(objects))
    put, get = batch_of(Operation.PUT, memory), batch_of(Operation.GET, memory)
    guest: dict[str, Any] = {
        "keys": ["n/g.kv"],
        "tenant": tenant_number(salt_digest("g")),
    }
    assert store.run(put).ok.all()
    assert store.run(attrs.evolve(put, **guest)).ok.all()
    assert [data[-38] for data in objects.values()] == [1, number]
    assert store.run(attrs.evolve(get, keys=["n/g.kv"])).ok.all()
    destroy_keys(keys, "guest")
    assert store.run(get).ok.all()
    gone = store.run(attrs.evolve(get, keys=["n/g.kv"]))
    assert gone.outcomes.tolist() == [Outcome.REFUSED]


class Held:
    """An inner store that says how it was called."""

    def __init__(self, answer: Any = None) -> None:
        self.batches: list[Batch] = []
        self.answer = answer

    def run(self, batch: Batch) -> BatchResult:
        self.batches.append(batch)
        return self.answer(batch) if self.answer else BatchResult.of(batch, [0])

    def close(self) -> None:
        """Do nothing."""


def one_object(
    keys: Path,
    inner: Any,
    tenant: str = "default",
    namespace: str = "n" * 64,
    allocate: Any = lambda _: None,
    buffers: int = 1,
) -> Any:
    """Return a sealing store for objects of 64 bytes, and memory of one."""
    engine = Engine(core=patient())
    with engine.attachment:
        region = engine.attachment._backends.pools["kv"].region
    around = Seal(SealSettings(keys=keys, buffers=buffers))
    listed = read_tenants({"guest": {"salt": "g"}})
    config = AttachConfig(tenant=tenant, tenants=listed, namespace=namespace)
    store = around.wrap(
        InnerStore(inner if callable(inner) else lambda _: inner, allocate),
        attention(),
        region,
        config,
    )
    return store, np.arange(64, dtype=np.uint8)


def batch_of(operation: Operation, memory: Any, **more: Any) -> Batch:
    return Batch(operation, ["n/a.kv"], [[memory.ctypes.data]], [[64]], **more)


def test_a_put_leaves_the_memory_of_its_caller_as_it_is(keys: Path) -> None:
    inner = Held()
    store, memory = one_object(keys, inner)
    assert store.run(batch_of(Operation.PUT, memory)).ok.all()
    assert memory.tolist() == list(range(64))
    (passed,) = inner.batches
    assert passed.sizes.tolist() == [[64 + 40]]
    assert passed.addresses[0, 0] != memory.ctypes.data


def test_memory_with_another_use_is_not_touched(keys: Path) -> None:
    gate = MemoryGate()

    def late(batch: Batch) -> BatchResult:
        gate.close(1e9)
        return BatchResult.of(batch, [0])

    store, memory = one_object(keys, Held(late))
    result = store.run(batch_of(Operation.GET, memory, gate=gate))
    assert result.outcomes.tolist() == [Outcome.TIMEOUT]
    assert memory.tolist() == list(range(64))
    inner = Held()
    store, memory = one_object(keys, inner)
    put = store.run(batch_of(Operation.PUT, memory, gate=gate))
    assert put.outcomes.tolist() == [Outcome.TIMEOUT]
    assert not inner.batches


def test_memory_that_a_backend_still_holds_is_not_used_again(keys: Path) -> None:
    hold = MemoryHold()

    def held(batch: Batch) -> BatchResult:
        return BatchResult(np.zeros(1, np.uint8), batch.object_bytes, hold=hold)

    store, memory = one_object(keys, Held(held))
    got = store.run(batch_of(Operation.GET, memory))
    assert got.outcomes.tolist() == [Outcome.TIMEOUT]
    again = batch_of(Operation.PUT, memory, deadline_s=0.0)
    assert store.run(again).outcomes.tolist() == [Outcome.TIMEOUT]
    hold.release()
    assert store.run(again).ok.all()


def test_a_backend_that_says_ok_and_loads_nothing_is_found(keys: Path) -> None:
    store, memory = one_object(keys, Held())
    store.run(batch_of(Operation.PUT, memory))
    # The same buffer holds what was just sealed, under the same key.
    got = store.run(batch_of(Operation.GET, memory))
    assert got.outcomes.tolist() == [Outcome.CORRUPT]


def test_a_backend_that_reaches_only_its_own_memory_lends_it(keys: Path) -> None:
    around = Seal(SealSettings(keys=keys))
    manifest = Shelf().kvdock_manifest()
    assert around.manifest(manifest).sealed
    own = attrs.evolve(manifest, host_allocator=Support.NATIVE)
    assert not around.manifest(own).host_allocator
    lent: list[bytearray] = []
    back: list[str] = []

    def allocate(nbytes: int) -> HostMemory:
        lent.append(bytearray(nbytes))
        return HostMemory(lent[0], lambda: back.append("memory"))

    class Closing(Held):
        def close(self) -> None:
            back.append("store")

    inner = Closing()
    store, memory = one_object(keys, inner, allocate=allocate)
    assert store.run(batch_of(Operation.PUT, memory)).ok.all()
    start = np.frombuffer(lent[0], np.uint8).ctypes.data
    at = int(inner.batches[0].addresses[0, 0])
    assert start <= at <= start + len(lent[0]) - 104
    store.close()
    # A store may use its memory until it is closed.
    assert back == ["store", "memory"]


def test_memory_of_a_backend_goes_back_where_its_store_cannot_be_opened(
    keys: Path,
) -> None:
    back: list[int] = []

    def broken(_: object) -> Any:
        raise OSError

    def allocate(nbytes: int) -> HostMemory:
        return HostMemory(bytearray(nbytes), lambda: back.append(nbytes))

    with pytest.raises(OSError):  # noqa: PT011 - the store's own
        one_object(keys, broken, allocate=allocate)
    assert len(back) == 1


def test_a_forked_child_touches_no_memory_of_its_parent(keys: Path) -> None:
    inner = Held()
    store, memory = one_object(keys, inner)
    store._guard.pid += 1  # as a child would see it
    found = store.run(batch_of(Operation.PUT, memory))
    assert found.outcomes.tolist() == [Outcome.UNAVAILABLE]
    assert not inner.batches


class Kept(Held):
    """An inner store that keeps its objects in a mapping."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(self.serve)
        self.objects = objects

    def serve(self, batch: Batch) -> BatchResult:
        ((at,),), ((size,),) = batch.addresses.tolist(), batch.sizes.tolist()
        memory, (key,) = memory_at(at, size), batch.keys
        if batch.operation is Operation.PUT:
            self.objects[key] = bytes(memory)
            return BatchResult.of(batch, [0])
        data = self.objects[key]
        memory[: len(data)] = data[:size]
        return BatchResult([0], [len(data)])


def altered(chance: random.Random, objects: dict[str, bytes], key: str) -> bytes:
    """Return other bytes than an object's: a bit, a swap, a cut, a trailer."""
    data = bytearray(objects[key])
    how = chance.randrange(5)
    if how == 0:
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    elif how == 1:
        data = bytearray(objects[chance.choice([one for one in objects if one != key])])
    elif how == 2:
        other = objects[chance.choice([one for one in objects if one != key])]
        data[-40:] = other[-40:]
    elif how == 3:
        del data[chance.randrange(len(data)) :]
    else:
        at = chance.randrange(len(data) - 40, len(data))
        data[at] ^= chance.randrange(1, 256)
    return bytes(data)


def test_altered_moved_and_cut_objects_are_never_accepted(keys: Path) -> None:
    add_key(keys, MASTER, "acme")
    objects: dict[str, bytes] = {}
    stores = {}
    for tenant, space in (("default", "n"), ("acme", "n"), ("acme", "m")):
        store, memory = one_object(keys, Kept(objects), tenant, space * 64)
        for page in range(4):
            key = f"{space * 64}/{tenant}{page}"
            memory[:] = page
            batch = batch_of(Operation.PUT, memory)
            assert store.run(attrs.evolve(batch, keys=[key])).ok.all()
            stores[key] = store
    chance = random.Random(230)  # noqa: S311 - guards nothing
    room = np.zeros(64, np.uint8)
    right = dict(objects)
    for turn in range(3000):
        key = chance.choice(list(right))
        batch = attrs.evolve(batch_of(Operation.GET, room), keys=[key])
        objects[key] = altered(chance, right, key)
        assert objects[key] != right[key]
        result = stores[key].run(batch)
        assert result.outcomes.tolist() != [Outcome.OK], turn
        objects[key] = right[key]
    for key, store in stores.items():
        assert store.run(attrs.evolve(batch, keys=[key])).ok.all()
        assert room.tolist() == [int(key[-1])] * 64


def attacks(right: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield an object's key and what someone who can write to the store puts there.

    Each flipped bit, each swap, each splice of two objects at each byte, and heads of
    trailers that were made up.
    """
    for key, data in right.items():
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            yield key, bytes(flipped)
        for other in right.values():
            for at in range(len(data)) if other != data else ():
                yield key, data[:at] + other[at:]  # with 0 all of the other one
        body, tail = data[:-40], data[-28:]
        for magic, form, number, salt, ends in itertools.product(
            (b"K", b"\0"), (0, 1, 2, 3), (0, 1, 2, 3, 65535), (0, 1), (0, 1)
        ):
            yield key, body + seal._HEAD.pack(magic, form, number, salt, ends) + tail


@pytest.mark.slow
def test_no_attack_on_stored_objects_is_taken_for_a_page(keys: Path) -> None:
    add_key(keys, MASTER, "acme")
    objects: dict[str, bytes] = {}
    stores = {}
    for tenant, space in itertools.product(("default", "acme"), ("n", "m")):
        store, memory = one_object(keys, Kept(objects), tenant, space * 64)
        for page in range(3):
            key = f"{space * 64}/{tenant}{page}"
            memory[:] = page
            put = attrs.evolve(batch_of(Operation.PUT, memory), keys=[key])
            assert store.run(put).ok.all()
            stores[key] = store
    right, room, tried = dict(objects), np.zeros(64, np.uint8), 0
    get = batch_of(Operation.GET, room)
    for key, data in attacks(right):
        if data == right[key]:
            continue  # two tags may end alike
        objects[key] = data
        room[:] = 0xAA
        assert not stores[key].run(attrs.evolve(get, keys=[key])).ok.any()
        left = room.tolist()
        # Zeros in the place of what was opened in vain, or nothing at all.
        assert left in ([0] * 64, [0xAA] * 64)
        objects[key], tried = right[key], tried + 1
    assert tried > 23_568
    for key in right:
        assert stores[key].run(attrs.evolve(get, keys=[key])).ok.all()


def test_a_store_is_verified_without_keys(keys: Path) -> None:
    engine = sealed(keys)
    with engine.attachment:
        stored(engine)
        for key, data in engine.shelf.objects.items():
            assert verify_object(key, data) is Outcome.OK
            assert verify_object(key, data[:-1]) is Outcome.CORRUPT


def test_a_plugin_cannot_say_of_itself_that_it_seals() -> None:
    with pytest.raises(BrokenPlugin, match="which only wrappers do"):
        plugin_of(Objects(Full(), sealed=True), "obj")


def test_name_and_namespace_are_bound_to_the_bytes_and_not_to_keys_alone(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one key for all objects, the associated data must tell them apart."""
    alone = Subkey(bytes(32))
    monkeypatch.setattr(DataKey, "subkey", lambda *_: alone)
    objects: dict[str, bytes] = {}
    store, memory = one_object(keys, Kept(objects), namespace="n" * 64)
    elsewhere, _ = one_object(keys, Kept(objects), namespace="m" * 64)
    put = batch_of(Operation.PUT, memory)
    assert store.run(put).ok.all()
    objects["n/b.kv"] = objects["n/a.kv"]
    get = batch_of(Operation.GET, memory)
    assert store.run(get).ok.all()
    moved = store.run(attrs.evolve(get, keys=["n/b.kv"]))
    assert moved.outcomes.tolist() == [Outcome.CORRUPT]
    assert elsewhere.run(get).outcomes.tolist() == [Outcome.CORRUPT]


def test_a_thousand_swaps_between_keys_tenants_and_namespaces_are_found(
    keys: Path,
) -> None:
    add_key(keys, MASTER, "acme")
    objects: dict[str, bytes] = {}
    stores = {}
    for tenant, space in itertools.product(("default", "acme"), ("n", "m")):
        for number in (1, 2):
            store, memory = one_object(keys, Kept(objects), tenant, space * 64)
            key = f"{space * 64}/{tenant}{number}"
            memory[:] = number
            put = batch_of(Operation.PUT, memory)
            assert store.run(attrs.evolve(put, keys=[key])).ok.all()
            stores[key] = store
            add_key(keys, MASTER, tenant)
    right = dict(objects)
    chance = random.Random(35)  # noqa: S311 - guards nothing
    get = batch_of(Operation.GET, memory)
    for _ in range(1000):
        one, other = chance.sample(sorted(right), 2)
        objects[one], objects[other] = right[other], right[one]
        for key in (one, other):
            result = stores[key].run(attrs.evolve(get, keys=[key]))
            assert result.outcomes.tolist() == [Outcome.CORRUPT]
            assert not memory.any()
        objects.update(right)


def test_a_subkey_seals_so_many_objects_and_no_more(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "_SALT_OBJECTS", 3)
    objects: dict[str, bytes] = {}
    store, memory = one_object(keys, Kept(objects))
    for number in range(9):
        put = attrs.evolve(batch_of(Operation.PUT, memory), keys=[f"n/{number}"])
        assert store.run(put).ok.all()
    salts = [data[-36:-32] for data in objects.values()]
    assert [len(set(salts[at : at + 3])) for at in (0, 3, 6)] == [1, 1, 1]
    assert len(set(salts)) == 3


def test_an_object_has_the_salt_that_it_was_sealed_with(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "_SALT_OBJECTS", 1)
    objects: dict[str, bytes] = {}
    store, memory = one_object(keys, Kept(objects), buffers=2)
    put, head = batch_of(Operation.PUT, memory), seal._HEAD

    def pack(*fields: Any) -> bytes:
        # Another thread seals meanwhile, with another salt.
        if "n/b.kv" not in objects:
            objects["n/b.kv"] = b""
            assert store.run(attrs.evolve(put, keys=["n/b.kv"])).ok.all()
        return head.pack(*fields)

    slow = SimpleNamespace(pack=pack, unpack=head.unpack, size=head.size)
    monkeypatch.setattr(seal, "_HEAD", slow)
    assert store.run(put).ok.all()
    for key in objects:
        got = store.run(attrs.evolve(batch_of(Operation.GET, memory), keys=[key]))
        assert got.ok.all(), key


def test_a_page_whose_key_is_missing_is_replaced_and_one_whose_key_is_back_is_read(
    keys: Path,
) -> None:
    before = keys.read_bytes()
    engine = sealed(keys)
    with engine.attachment:
        names = stored(engine)
        # As if a backup of another day were taken, with another key.
        keys.unlink()
        add_key(keys, MASTER, "someone")
        add_key(keys, MASTER, "default")
        keys.write_text(keys.read_text().replace('"id": 1,', '"id": 9,'))
        assert (loaded(engine, names) == Outcome.REFUSED).all()
        assert engine.attachment.exists(names).found == {"kv": 0}
        now = keys.read_bytes()
        keys.write_bytes(before)
        assert engine.attachment.exists(names).found == {"kv": 4}
        assert not loaded(engine, names).any()
        keys.write_bytes(now)
        assert (loaded(engine, names) == Outcome.REFUSED).all()
        stored(engine)
        assert not loaded(engine, names).any()


# --- Wrong wrappers, each caught by the test that is named --------------------


def without_associated_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SealedStore, "_about", lambda *_: b"")


def without_the_name(patch: pytest.MonkeyPatch) -> None:
    right: Any = SealedStore._about
    patch.setattr(SealedStore, "_about", lambda *given: right(*given[:-1], ""))


def reuses_a_nonce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seal, "os", SimpleNamespace(urandom=bytes))


def takes_a_page_of_another_key(patch: pytest.MonkeyPatch) -> None:
    """Open with whatever key of the file fits, whosever it is."""

    right: Any = KeyRing.opening
    patch.setattr(KeyRing, "opening", lambda ring, _: right(ring, 1))
    patch.setattr(KeyRing, "sealing", lambda ring, _: right(ring, 1))
    patch.setattr(KeyRing, "reading", lambda *_: None)


def falls_back_to_plain(patch: pytest.MonkeyPatch) -> None:
    right = SealedStore.run

    def run(store: SealedStore, batch: Batch) -> BatchResult:
        result = right(store, batch)
        refused = (result.outcomes == Outcome.REFUSED).all()
        return store.inner.run(batch) if refused else result

    patch.setattr(SealedStore, "run", run)


def ignores_the_tag(patch: pytest.MonkeyPatch) -> None:
    right = Subkey.open

    def open_(subkey: Subkey, *given: Any) -> bool:
        right(subkey, *given)
        return True

    patch.setattr(Subkey, "open", open_)


def deletes_what_it_has_no_key_for(patch: pytest.MonkeyPatch) -> None:
    def opening(*_: object) -> DataKey:
        return DataKey(1, bytes(32))

    patch.setattr(KeyRing, "opening", opening)


CAUGHT_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[..., None]] = {
    without_associated_data: (
        test_name_and_namespace_are_bound_to_the_bytes_and_not_to_keys_alone
    ),
    without_the_name: (
        test_a_thousand_swaps_between_keys_tenants_and_namespaces_are_found
    ),
    reuses_a_nonce: test_no_two_objects_are_sealed_with_one_nonce,
    takes_a_page_of_another_key: test_each_tenant_has_a_key_of_its_own,
    falls_back_to_plain: test_without_the_right_key_pages_are_misses_and_stay_stored,
    ignores_the_tag: test_altered_moved_and_cut_objects_are_never_accepted,
    deletes_what_it_has_no_key_for: (
        test_keys_rotate_without_losing_pages_and_a_destroyed_one_takes_its_own
    ),
}


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda one: one.__name__)
def test_a_wrong_wrapper_is_caught_by_the_test_that_is_named(
    mutant: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = CAUGHT_BY[mutant]
    given = {name: request.getfixturevalue(name) for name in signature(test).parameters}
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test(**given)
