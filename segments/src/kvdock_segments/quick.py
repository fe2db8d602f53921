"""The quick way of a batch: in compiled code, or not at all.

It takes a get whose pages are all there and of one size, and a put of pages of one size
of which none is there. For any other batch it answers None and has decided nothing:
then the thorough way in `reader` or `writer` finds out what is wrong. Without a C
compiler that one does everything.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvdock import native
from kvdock.arrays import any_of
from kvdock.batch import Batch, BatchResult
from kvdock_segments.call_arrays import MOST_PAGES, CallArrays
from kvdock_segments.io import IOEngine, IORequest
from kvdock_segments.writer import PutBatch, Writer

if TYPE_CHECKING:
    from kvdock_segments.catalog import Catalog
    from kvdock_segments.io import Token
    from kvdock_segments.segment import Segment


class QuickWay:
    """Loads and stores usual batches of one store."""

    def __init__(self, catalog: Catalog, writer: Writer, engine: IOEngine) -> None:
        self._catalog = catalog
        self._writer = writer
        self._engine = engine
        self._of_thread = threading.local()  # arrays of the calls of each

    def _page_bytes(self, batch: Batch) -> int:
        """Return the size of the pages of a batch that may be usual; else 0."""
        sizes = batch.sizes
        if not 0 < len(sizes) <= MOST_PAGES or (len(sizes) > 1 and sizes.strides[0]):
            return 0
        return sum(sizes[0].tolist())

    def _made(self, compiled: native.Library) -> CallArrays:
        self._of_thread.arrays = made = CallArrays(compiled)
        return made

    def get(self, batch: Batch) -> BatchResult | None:
        """Load pages that are all there and whole; None for any other batch."""
        compiled, size = native.library(), self._page_bytes(batch)
        catalog, index, count = self._catalog, self._catalog.index, len(batch.keys)
        if compiled is None or not size or index.max_age_s:
            return None
        catalog.refresh(looked=True)
        digests = catalog.packed(batch.keys)
        call = getattr(self._of_thread, "arrays", None) or self._made(compiled)
        held: list[Segment] = []
        tokens: list[Token] = []
        try:
            with catalog.lock:
                where = index.table.address
                segments = compiled.look(where, call.address, digests, count)
                if segments < 1:
                    return None
                for place, number in enumerate(call.segments[:segments].tolist()):
                    segment = catalog.segments.get(number)
                    if segment is None or index.object_bytes_in[number] != size:
                        return None
                    token = catalog.open_one(segment)
                    held.append(segment)
                    tokens.append(token)
                    call.slot_bytes[place] = segment.slot_bytes
                    if type(token) is int:
                        call.tokens[place] = token
                first_ns = index.clock.read(count, batch.deadline_s)
                compiled.plan(where, call.address, count, first_ns)
                # Copies: they are counted later, and the next call writes over these.
                stored_ns, used_ns = call.stored_ns[:count], call.used_ns[:count]
                newest_ns = index.clock.newest_ns
                index.history.note(stored_ns.copy(), used_ns.copy(), newest_ns)
            expected = call.expected[:count]
            result = self._engine.move(
                IORequest(
                    write=False,
                    files=tuple(tokens),
                    file_of=call.file_of[:count],
                    offsets=call.offsets[:count],
                    addresses=batch.addresses,
                    sizes=batch.sizes,
                    deadline_s=batch.deadline_s,
                    gate=batch.gate,
                    expected=expected,
                    movement=call.movement,
                )
            )
            if (
                any_of(result.errors)
                or any_of(result.checksums != expected)
                or any_of(result.nbytes != size)
            ):
                return None
            nbytes = result.nbytes.copy()  # the next call writes over it
        except OSError:  # a file cannot be opened
            return None
        finally:
            catalog.release_all(held)
        with catalog.lock:
            catalog.counts["get_ok"] += count
        return BatchResult(np.zeros(count, np.uint8), nbytes)

    def put(self, batch: Batch) -> BatchResult | None:
        """Store pages of which none is there; None for any other batch."""
        compiled, size = native.library(), self._page_bytes(batch)
        catalog, index, count = self._catalog, self._catalog.index, len(batch.keys)
        if compiled is None or not size or index.tenants is not None:
            return None
        if batch.keep_until or batch.expire_at is not None:
            return None
        catalog.refresh(looked=True)
        digests = catalog.packed(batch.keys)
        call = getattr(self._of_thread, "arrays", None) or self._made(compiled)
        with catalog.lock:
            stored = compiled.look(index.table.address, call.address, digests, count)
            version = index.version
        if stored or catalog.refresh(stored=True):
            return None
        words = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        used_ns, stored_ns = catalog.write_times(words, batch.deadline_s, batch.tenant)
        call.used_ns[:count], call.stored_ns[:count] = used_ns, stored_ns
        kept = np.zeros(count, np.bool_)
        fresh = PutBatch(batch, words, used_ns, stored_ns, version, kept, call)
        outcomes = self._writer.store(fresh, np.arange(count), size)
        catalog.count("put", outcomes)
        return BatchResult.of(batch, outcomes)
