"""Objects are harmed in the store itself, where an oracle shows how."""

from __future__ import annotations

import attrs
import pytest

from kvdock.testing import Oracle
from model_demo.damage import Harm, harm_behind

WHOLE = b"7" * 256


@attrs.frozen
class ShelfOracle(Oracle):
    """Sees and changes objects in a dict."""

    objects: dict[str, bytes]

    def peek(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def poke(self, key: str, offset: int, data: bytes) -> None:
        old = self.objects[key]
        self.objects[key] = old[:offset] + data + old[offset + len(data) :]

    def resize(self, key: str, nbytes: int) -> None:
        self.objects[key] = self.objects[key][:nbytes]

    def remove(self, key: str) -> None:
        del self.objects[key]


def test_each_harm_is_done_to_its_object_alone() -> None:
    objects = {str(harm): WHOLE for harm in Harm} | {"other": WHOLE}
    for harm in Harm:
        assert harm_behind(ShelfOracle(objects), str(harm), harm)
    flipped = objects["flip"]
    assert sum(a != b for a, b in zip(flipped, WHOLE, strict=True)) == 1
    assert objects["truncate"] == WHOLE[:128]
    assert "delete" not in objects
    assert objects["other"] == WHOLE


@pytest.mark.parametrize("harm", list(Harm))
def test_an_object_that_is_not_there_is_not_counted(harm: Harm) -> None:
    assert not harm_behind(ShelfOracle({}), "kv", harm)


@pytest.mark.parametrize("harm", list(Harm))
def test_what_an_oracle_cannot_do_is_not_counted(harm: Harm) -> None:
    class Peeks(Oracle):
        def peek(self, key: str) -> bytes | None:
            del key
            return WHOLE

    assert not harm_behind(Peeks(), "kv", harm)
