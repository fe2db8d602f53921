"""Bytes that change behind the plugin's back are a miss, and heal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from kvdock.batch import Outcome
from kvdock.testing.cases import Case, claimed, contract_test, one_sample
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.oracles import Oracle
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest

PAGES = page_hashes(5)

Harm = Callable[[Oracle, list[str]], None]


def _flip(at: float) -> Harm:
    def harm(oracle: Oracle, keys: list[str]) -> None:
        data = oracle.peek(keys[2])
        assert data, "the oracle does not see a stored object"
        offset = round(at * (len(data) - 1))
        oracle.poke(keys[2], offset, bytes([data[offset] ^ 0x10]))

    return harm


def _swap(oracle: Oracle, keys: list[str]) -> None:
    oracle.swap(keys[2], keys[3])


def _blank(oracle: Oracle, keys: list[str]) -> None:
    data = oracle.peek(keys[2])
    assert data, "the oracle does not see a stored object"
    oracle.poke(keys[2], 0, bytes(len(data)))


def _cut(oracle: Oracle, keys: list[str]) -> None:
    oracle.resize(keys[2], len(oracle.peek(keys[2]) or b"") - 7)


def _empty(oracle: Oracle, keys: list[str]) -> None:
    oracle.resize(keys[2], 0)


def _extend(oracle: Oracle, keys: list[str]) -> None:
    oracle.resize(keys[2], len(oracle.peek(keys[2]) or b"") + 7)


def _remove(oracle: Oracle, keys: list[str]) -> None:
    oracle.remove(keys[2])


_LENGTHS: tuple[tuple[str, Harm], ...] = (
    ("truncated", _cut),
    ("emptied", _empty),
    ("extended", _extend),
    ("removed", _remove),
)
_CONTENT: tuple[tuple[str, Harm], ...] = (
    ("first-byte-flipped", _flip(0)),
    ("middle-byte-flipped", _flip(0.5)),
    ("last-byte-flipped", _flip(1)),
    ("zeroed", _blank),
    ("two-objects-swapped", _swap),
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
    """A damaged object is never served, spoils no other, and can be replaced."""

    @contract_test(content_harms)
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
        self, harness: Harness, oracle: Oracle | None, case: object
    ) -> None:
        del case
        if oracle is None:
            pytest.skip("the author gives no oracle")
        setup = self._rig(harness)
        setup.stored(PAGES)
        key = setup.keys(PAGES)[1]
        try:
            data = oracle.peek(key)
        except NotImplementedError as lacking:
            pytest.skip(f"the oracle cannot {lacking}")
        assert data is not None, "the oracle does not see a stored object"
        assert len(data) == setup.region.object_bytes[0], (
            "the oracle sees another length"
        )
        assert oracle.peek(setup.keys(["0" * 64])[0]) is None

    def _rig(self, harness: Harness) -> Setup:
        (case,) = one_sample(harness.backend.manifest)
        if case.skip:
            pytest.skip(case.skip)
        return harness.rig(case.value.pool())

    def _harmed(
        self, harness: Harness, oracle: Oracle | None, name: str, harm: Harm
    ) -> None:
        if oracle is None:
            pytest.skip("the author gives no oracle")
        setup = self._rig(harness)
        if setup.objects > 1:
            pytest.skip("a page is several objects")
        setup.stored(PAGES)
        try:
            harm(oracle, setup.keys(PAGES))
        except NotImplementedError as lacking:
            pytest.skip(f"the oracle cannot {lacking}")
        harmed = {2, 3} if name == "two-objects-swapped" else {2}
        outcomes = setup.get(PAGES)[:, 0].tolist()
        for row, outcome in enumerate(outcomes):
            assert (outcome != Outcome.OK) == (row in harmed), (
                f"{name}: page {row} was answered {Outcome(outcome).name}"
            )
        again = setup.put(PAGES)
        assert (again == Outcome.OK).all(), (
            f"{name}: cannot be stored again: {spelled(again)}"
        )
        setup.loaded(PAGES)
