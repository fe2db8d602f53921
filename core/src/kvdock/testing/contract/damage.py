"""Bytes that are changed in the store are a miss, and heal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
import pytest

from kvdock.batch import Outcome
from kvdock.testing.cases import Case, claimed, contract_test
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.oracles import Oracle
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest

PAGES = page_hashes(5)

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


def _flip(at: float) -> Harm:
    def harm(oracle: Oracle, target: Target) -> None:
        offset = round(at * (len(target.data) - 1))
        oracle.poke(target.key, offset, target.changed(offset)[0])

    return harm


_LENGTHS: tuple[tuple[str, Harm], ...] = (
    ("truncated", lambda oracle, it: oracle.resize(it.key, len(it.data) - 7)),
    ("emptied", lambda oracle, it: oracle.resize(it.key, 0)),
    ("extended", lambda oracle, it: oracle.resize(it.key, len(it.data) + 7)),
    ("removed", lambda oracle, it: oracle.remove(it.key)),
)
_CONTENT: tuple[tuple[str, Harm], ...] = (
    ("first-byte-flipped", _flip(0)),
    ("middle-byte-flipped", _flip(0.5)),
    ("last-byte-flipped", _flip(1)),
    ("zeroed", lambda oracle, it: oracle.poke(it.key, 0, bytes(len(it.data)))),
    ("two-objects-swapped", lambda oracle, it: oracle.swap(it.key, it.other)),
)


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
            try:
                oracle.poke(target.key, offset, byte)
            except NotImplementedError as lacking:
                pytest.skip(f"the oracle cannot {lacking}")
            seen = oracle.peek(target.key)
            assert seen == whole, "the oracle sees other bytes than it wrote"
            oracle.poke(target.key, offset, target.data[offset : offset + 1])
        # What was taken back does no harm: only the bytes had changed.
        setup.loaded(PAGES)

    def _stored(self, harness: Harness, oracle: Oracle | None) -> tuple[Setup, Target]:
        """Store pages; return the first object of the third one as the target."""
        if oracle is None:
            pytest.skip("the author gives no oracle")
        setup = harness.plain()
        setup.stored(PAGES)
        keys = setup.keys(PAGES)
        key, other = keys[2 * setup.objects], keys[3 * setup.objects]
        try:
            data = oracle.peek(key)
        except NotImplementedError as lacking:
            pytest.skip(f"the oracle cannot {lacking}")
        assert data, "the oracle does not see a stored object"
        return setup, Target(key, other, data)

    def _harmed(
        self, harness: Harness, oracle: Oracle | None, name: str, harm: Harm
    ) -> None:
        setup, target = self._stored(harness, oracle)
        assert oracle
        try:
            harm(oracle, target)
        except NotImplementedError as lacking:
            pytest.skip(f"the oracle cannot {lacking}")
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
