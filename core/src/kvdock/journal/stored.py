"""Say why pages are missed from what a store holds, without a journal.

The namespace's record says of which parts a page is made. From it follow the keys
under which ranks of each TP size store a page, and the store says which exist. What
it holds is then put in the words of a journal, and explained as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import msgspec

from kvdock.batch import Operation
from kvdock.errors import KvdockError, PoolError
from kvdock.journal.causes import Cause, RequestAnswer, explain
from kvdock.journal.records import (
    ATTACHED,
    HASH_CHARS,
    VERSION,
    JournalPool,
    JournalRecord,
)
from kvdock.keys import build_keys
from kvdock.pools.enums import HitPolicy, ObjectUnit, PoolKind, Sharding
from kvdock.pools.layout import stored_objects
from kvdock.pools.objects import slice_name
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

_TP_SIZES = (1, 2, 4, 8, 16)
_STORE = "store"
_ENDS = (PoolKind.MAMBA, PoolKind.SWA)
"""Pools of which a prefix needs the end alone; a record has no window, so one page."""

Holds = Callable[[Sequence[str]], Sequence[bool]]


def explain_stored(
    store: Any,  # noqa: ANN401 - `kvdock.stores` stands above this
    hashes: Sequence[str],
    namespace: str,
    *,
    tp_size: int = 0,
) -> RequestAnswer:
    """Say what a store holds of a prefix, and what it lacks.

    `store` is a `kvdock.stores.Store`. `tp_size` is over how many ranks the engine
    divides heads; 0 for the number of which most pages are stored. Pipeline stages and
    DCP are not looked for.

    Raises:
        KvdockError: If the namespace has no record.
    """
    mine = dict(store.record(namespace))
    if not mine:
        raise KvdockError(
            f"namespace {namespace[:12]} has no record, so its pools are not known",
            fix="Its engine writes it again at its next start.",
        )
    found = _looked_up(store, hashes, namespace, mine)
    sizes = [tp_size] if tp_size else _TP_SIZES
    most = max(sizes, key=lambda size: (_pages(found, size), -size))
    records = [*_records(found, namespace, mine, most)]
    for other in store.namespaces():
        record = store.record(other) if other != namespace else {}
        if record and record.get("model") == mine.get("model"):
            theirs = _looked_up(store, hashes, other, record)
            records += _records(theirs, other, record)
    return explain(lambda: records, request=_STORE, unknown=Cause.NOT_THERE)


def _looked_up(
    store: Any,  # noqa: ANN401 - same
    hashes: Sequence[str],
    namespace: str,
    record: Mapping[str, Any],
) -> list[tuple[int, JournalRecord]]:
    """Return what ranks of each TP size have, as their journals would say it."""
    holds = store.finder(namespace)
    names = " ".join(one[-HASH_CHARS:] for one in hashes)
    found = []
    for pool in _pools(record):
        for size in _TP_SIZES:
            with suppress(PoolError):  # this many ranks cannot divide it
                for shard in [Shard(tp_rank=at, tp_size=size) for at in range(size)]:
                    part, there = _stored(holds, namespace, hashes, pool, shard)
                    answer = JournalRecord(
                        VERSION, 0.0, Operation.EXISTS, namespace, str(shard.tp_rank),
                        backend=_STORE, pool=pool.name, slice_name=part, pages=names,
                        outcomes=tuple(("ok" if one else "absent", 1) for one in there),
                    )  # fmt: skip
                    found.append((size, answer))
    return found


def _stored(
    holds: Holds, namespace: str, hashes: Sequence[str], pool: PoolSpec, shard: Shard
) -> tuple[str, tuple[bool, ...]]:
    """Return a rank's part of a page, and which pages have it in any unit."""
    there = [False] * len(hashes)
    for unit in ObjectUnit:
        objects = stored_objects(attrs.evolve(pool, object_unit=unit), shard)
        suffixes = [f".{one.coordinate}" for one in objects]
        # Of most units there is nothing: one object of each page says so.
        some = holds(build_keys(namespace, hashes, suffixes[:1]))
        places = [at for at, one in enumerate(some) if one]
        names = [hashes[at] for at in places]
        every = holds(build_keys(namespace, names, suffixes)) if names else ()
        for row, at in enumerate(places):
            objects_of_page = every[row * len(suffixes) : (row + 1) * len(suffixes)]
            there[at] = there[at] or all(objects_of_page)
    return slice_name(objects), tuple(there)


def _pools(record: Mapping[str, Any]) -> Iterator[PoolSpec]:
    """Yield the pools of a record, as far as it describes them."""
    for name, given in record.get("pools", {}).items():
        parts = [Part(**one) for one in given["parts"]]
        for sharding in (None, Sharding.RANK):  # a record does not say which
            more: dict[str, Any] = {} if sharding is None else {"sharding": sharding}
            with suppress(PoolError):
                yield PoolSpec(
                    name=name,
                    kind=given["kind"],
                    parts=parts,
                    layers=given["layers"],
                    page_tokens=given["page_tokens"],
                    draft=given["draft"],
                    required=not given["draft"],
                    **more,
                )
                break


def _pages(found: Iterable[tuple[int, JournalRecord]], size: int) -> int:
    mine = (one.outcomes for tp_size, one in found if tp_size == size)
    return sum(outcome == "ok" for one in mine for outcome, _ in one) // size


def _records(
    found: Iterable[tuple[int, JournalRecord]],
    namespace: str,
    record: Mapping[str, Any],
    asked: int = 0,
) -> Iterator[JournalRecord]:
    """Yield what a journal would have; ranks of one TP size ask for it."""
    pools = tuple(map(_described, _pools(record)))
    for rank in range(asked or 1):
        yield JournalRecord(
            VERSION, 0.0, ATTACHED, namespace, str(rank), pools=pools, record=record
        )
    for size, one in found:
        if size == asked:
            yield msgspec.structs.replace(one, request=_STORE, at_s=time.time())
        else:
            yield one


def _described(pool: PoolSpec) -> JournalPool:
    ends = pool.kind in _ENDS
    return JournalPool(
        name=pool.name,
        kind=pool.kind,
        required=pool.required,
        draft=pool.draft,
        hit_policy=HitPolicy.TRAILING_PAGES if ends else HitPolicy.ALL_PAGES,
        window_pages=int(ends),
    )
