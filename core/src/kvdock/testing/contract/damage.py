"""Bytes that are changed in the store are a miss, and heal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from kvdock.batch import Outcome
from kvdock.testing.cases import Case, claimed, contract_test, one_sample, plain_sample
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.oracles import Oracle
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest

PAGES = page_hashes(5)

SIZES = (24, 511, 4099, 65537, (1 << 20) - 37)
"""Sizes of objects, from one line of a cache to a mebibyte; no whole blocks."""

RUNS = (1, 16, 512, 4096, 1 << 16)
"""How many bytes are changed in one piece, where there are as many."""

LAYERS = 80
MOST_SEAMS = 12
"""How many places where pieces meet are tried."""

BITS = 12
"""Places at random where one bit is changed."""

WHOLE = 4
"""Pages beside them that are not changed."""

MOVED = 64
"""Bytes of two blocks of an object that change places."""

Harm = Callable[[Oracle, "Target"], None]


@attrs.frozen
class Target:
    """An object to damage, another page's, and the bytes of the first."""

    key: str
    other: str
    data: bytes

    def changed(self, offset: int) -> tuple[bytes, bytes]:
        """Return another byte for a place, and all bytes with it."""
        byte = bytes([self.data[offset] ^ 0x10])
        return byte, self.data[:offset] + byte + self.data[offset + 1 :]


_LENGTHS: tuple[tuple[str, Harm], ...] = (
    ("truncated", lambda oracle, it: oracle.resize(it.key, len(it.data) - 7)),
    ("emptied", lambda oracle, it: oracle.resize(it.key, 0)),
    ("extended", lambda oracle, it: oracle.resize(it.key, len(it.data) + 7)),
    ("removed", lambda oracle, it: oracle.remove(it.key)),
)
_CONTENT: tuple[tuple[str, Harm], ...] = (
    ("zeroed", lambda oracle, it: oracle.poke(it.key, 0, bytes(len(it.data)))),
    ("two-objects-swapped", lambda oracle, it: oracle.swap(it.key, it.other)),
)


@contextmanager
def declining(oracle: Oracle | None) -> Iterator[Oracle]:
    """Skip a test where there is no oracle, or where it declines a call."""
    if oracle is None:
        pytest.skip("the author gives no oracle")
    try:
        yield oracle
    except NotImplementedError as lacking:
        pytest.skip(f"the oracle cannot {lacking}")


def size_classes(manifest: Manifest) -> Iterable[Case]:
    """Run for pages of several parts and for objects of each size."""
    (grade,) = claimed("integrity")(manifest)
    (plain,) = one_sample(manifest)
    skip = grade.skip or plain.skip
    yield Case("parts", plain.value, skip)
    deep = None if skip else attrs.evolve(plain.value, layers=LAYERS)
    if deep and not deep.page_bytes:
        yield Case("layers", deep, skip)
    most = manifest.max_object_bytes
    for nbytes in SIZES:
        short = f"it takes objects of {most} bytes" if 0 < most < nbytes else ""
        sample = None
        if not skip:
            sample = plain_sample(manifest, plain.value.kind, page_bytes=nbytes)
        yield Case(str(nbytes), sample, skip or short)


def patches(data: bytes, seams: Iterable[int]) -> Iterator[dict[int, bytes]]:
    """Yield ways to damage an object: bytes to write, by offset.

    One bit on both sides of each seam and at random places, runs of bytes up to the
    whole object, and two blocks that change places.
    """
    rng = np.random.default_rng(len(data))
    edges = {0, len(data) - 1, *seams, *(seam - 1 for seam in seams)}
    for at in [*sorted(edges), *rng.integers(0, len(data), BITS).tolist()]:
        yield {at: bytes([data[at] ^ 1 << int(rng.integers(8))])}
    for run in RUNS:
        if run <= len(data):
            at = int(rng.integers(len(data) - run + 1))
            yield {at: bytes(byte ^ 0xFF for byte in data[at : at + run])}
    yield {0: bytes(len(data))}
    if len(data) >= 4 * MOVED:
        one, two = MOVED, 2 * MOVED
        yield {one: data[two : two + MOVED], two: data[one:two]}


def content_harms(manifest: Manifest) -> Iterable[Case]:
    """Run for each change of content, where integrity is declared."""
    (grade,) = claimed("integrity")(manifest)
    for name, harm in _CONTENT:
        yield Case(name, (name, harm), grade.skip)


def length_harms(manifest: Manifest) -> Iterable[Case]:
    """Run for each change of length, whatever is declared."""
    del manifest
    for name, harm in _LENGTHS:
        yield Case(name, (name, harm))


class DamageTests:
    """A damaged object is never served, affects no other, and can be replaced."""

    @contract_test(content_harms, proves="integrity")
    def test_altered_bytes_are_a_miss_and_heal(
        self, harness: Harness, oracle: Oracle | None, case: tuple[str, Harm]
    ) -> None:
        self._harmed(harness, oracle, *case)

    @contract_test(size_classes, proves="integrity", slow=True)
    def test_damage_at_any_place_of_an_object_is_a_miss_and_heals(
        self, harness: Harness, oracle: Oracle | None, case: Sample
    ) -> None:
        with declining(oracle) as given:
            setup = harness.rig(case.pool(), pages=64)
            nbytes, seams = int(setup.region.object_bytes[0]), _seams(setup)
            ways = len([*patches(bytes(nbytes), seams)])
            # Some pages stay as they are: what is right must not be a miss.
            pages = page_hashes(ways + WHOLE, nbytes)
            setup.stored(pages)
            changed = {}
            for row, key in enumerate(setup.keys(pages)[:: setup.objects][:ways]):
                data = given.peek(key)
                assert data, "the oracle does not see a stored object"
                way = [*patches(data, seams)][row]
                changed[row] = {at: len(some) for at, some in way.items()}
                for at, some in way.items():
                    given.poke(key, at, some)
            missed = (setup.get(pages) != Outcome.OK).any(axis=1)
            for row, miss in enumerate(missed.tolist()):
                assert miss == (row in changed), (
                    f"page {row} was answered {'a miss' if miss else 'OK'}; changed in "
                    f"its {nbytes} bytes, by offset: {changed.get(row, 'nothing')}"
                )
            setup.kept(pages)

    @contract_test(claimed("integrity"), proves="integrity")
    def test_damage_after_a_page_was_loaded_is_a_miss_and_heals(
        self, harness: Harness, oracle: Oracle | None
    ) -> None:
        setup, target = self._stored(harness, oracle)
        assert oracle
        for _ in range(2):
            setup.loaded(PAGES)
        byte, _whole = target.changed(len(target.data) // 2)
        with declining(oracle):
            oracle.poke(target.key, len(target.data) // 2, byte)
        missed = (setup.get(PAGES) != Outcome.OK).any(axis=1).tolist()
        assert missed == [False, False, True, False, False], (
            "a page that was loaded before is not verified again: "
            f"one of five was damaged, and those that missed are {missed}"
        )
        setup.kept(PAGES)

    @contract_test(length_harms)
    def test_an_object_of_another_length_is_a_miss_and_heals(
        self, harness: Harness, oracle: Oracle | None, case: tuple[str, Harm]
    ) -> None:
        self._harmed(harness, oracle, *case)

    @contract_test(claimed("integrity"))
    def test_the_oracle_sees_what_was_stored(
        self, harness: Harness, oracle: Oracle | None
    ) -> None:
        setup, target = self._stored(harness, oracle)
        assert oracle
        nbytes = setup.region.object_bytes[0]
        assert len(target.data) == nbytes, "the oracle sees another length"
        assert oracle.peek(setup.keys(["0" * 64])[0]) is None

    @contract_test(claimed("integrity"))
    def test_the_oracle_changes_the_stored_bytes_and_nothing_else(
        self, harness: Harness, oracle: Oracle | None
    ) -> None:
        """Otherwise a miss would be the oracle's doing, not the backend's."""
        setup, target = self._stored(harness, oracle)
        assert oracle
        for offset in (0, len(target.data) // 2, len(target.data) - 1):
            byte, whole = target.changed(offset)
            with declining(oracle):
                oracle.poke(target.key, offset, byte)
            seen = oracle.peek(target.key)
            assert seen == whole, "the oracle sees other bytes than it wrote"
            oracle.poke(target.key, offset, target.data[offset : offset + 1])
        # What was taken back does no harm: only the bytes had changed.
        setup.loaded(PAGES)

    def _stored(self, harness: Harness, oracle: Oracle | None) -> tuple[Setup, Target]:
        """Store pages; return the first object of the third one as the target."""
        with declining(oracle) as given:
            setup = harness.plain()
            setup.stored(PAGES)
            keys = setup.keys(PAGES)
            key, other = keys[2 * setup.objects], keys[3 * setup.objects]
            data = given.peek(key)
        assert data, "the oracle does not see a stored object"
        return setup, Target(key, other, data)

    def _harmed(
        self, harness: Harness, oracle: Oracle | None, name: str, harm: Harm
    ) -> None:
        setup, target = self._stored(harness, oracle)
        assert oracle
        with declining(oracle):
            harm(oracle, target)
        assert oracle.peek(target.key) != target.data, (
            f"{name}: the oracle has changed nothing"
        )
        harmed = {2, 3} if name == "two-objects-swapped" else {2}
        missed = (setup.get(PAGES) != Outcome.OK).any(axis=1).tolist()
        for row, miss in enumerate(missed):
            assert miss == (row in harmed), (
                f"{name}: page {row} was answered {'a miss' if miss else 'OK'}"
            )
        again = setup.put(PAGES)
        assert (again == Outcome.OK).all(), (
            f"{name}: cannot be stored again: {spelled(again)}"
        )
        setup.loaded(PAGES)


def _seams(setup: Setup) -> list[int]:
    """Return where parts meet in the first object of a page, and where pieces do."""
    nbytes = int(setup.region.object_bytes[0])
    pieces = np.cumsum(setup.region.sizes[0]).tolist()
    layers = len(setup.pool.local_layers(setup.config.shard))
    parts = [
        layers * setup.pool.part_bytes(part, setup.config.shard)
        for part in setup.pool.parts
    ]
    found = {*pieces, *np.cumsum(parts).tolist()}
    seams = sorted(at for at in found if 0 < at < nbytes)
    few = np.linspace(0, len(seams) - 1, min(len(seams), MOST_SEAMS)).astype(int)
    return [seams[at] for at in few.tolist()]
