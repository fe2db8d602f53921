from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.errors import KvdockError
from kvdock.generations import Generation, run_of
from kvdock.namespace import (
    Namespace,
    diff_records,
    namespace_digest,
    namespace_record,
)
from kvdock.pools.enums import DType, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec
from kvdock.stores import delete_former

KV = PoolSpec(
    name="kv",
    kind=PoolKind.MLA,
    parts=(Part("kv", DType.BF16, (576,)), Part("scale", DType.F32, (1,))),
    layers=range(61),
    page_tokens=64,
    anchor=True,
)


def record(generation: str) -> dict[str, object]:
    return namespace_record(Namespace(model="m", generation=generation), [KV])


def test_no_generation_leaves_records_as_they_were() -> None:
    assert "generation" not in record("")
    # What engines have stored since before there were generations.
    assert namespace_digest(record("")).startswith("0a75e8c4eac7760d")


def test_a_generation_is_the_same_for_the_same_run_version_and_files() -> None:
    same = Generation(run="policy", version="7")
    assert same.text == Generation(version="7", run="policy").text
    others = [
        Generation(run="policy", version="8"),
        Generation(run="other", version="7"),
        Generation(run="policy", version="7", weights="files"),
        Generation(version="7"),
        Generation.private(),
        Generation.private(),
    ]
    digests = {namespace_digest(record(one.text)) for one in (same, *others)}
    assert len(digests) == 1 + len(others)


def test_a_record_says_which_generation_it_is_of() -> None:
    one = Generation(run="policy", version="7", weights="files")
    assert Generation.of(record(one.text)) == one
    for text in ("", "7", "[]", '{"run": "policy"}', '{"version": ""}'):
        assert Generation.of(record(text)) is None
    (difference,) = diff_records(
        record(one.text),
        record(Generation(run="policy", version="8", weights="files").text),
    )
    assert difference.field == "generation.version"


def test_people_see_the_run_and_the_version() -> None:
    assert str(Generation(run="policy", version="7")) == "policy 7"
    assert str(Generation(version="abc")) == "private abc"


def test_a_setting_names_a_run_or_none() -> None:
    assert run_of("run: policy ") == "policy"
    assert run_of("private") == ""
    for wrong in ("", "run:", "policy"):
        with pytest.raises(KvdockError, match="generations is"):
            run_of(wrong)


class Shelf:
    """What `delete_former` asks of a store."""

    def __init__(self, *stored: tuple[str, int, bool]) -> None:
        self.stored = {f"{one[0]}-{one[1]}": one for one in stored}

    def namespaces(self) -> list[str]:
        return sorted(self.stored)

    def record(self, namespace: str) -> dict[str, object]:
        text = self.stored[namespace][0]
        return record(text) if text else {}

    def in_use(self, namespace: str) -> str:
        return "open" if self.stored[namespace][2] else ""

    def survey(self, namespace: str) -> Any:
        return SimpleNamespace(used_ns=self.stored[namespace][1])

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        assert unused
        if namespace.endswith("-13"):  # opened since it was asked for
            raise KvdockError("a process has it open")
        del self.stored[namespace]
        return 10

    def collect(self, namespace: str) -> int:
        return 0 if namespace in self.stored else 1


def version(number: str, run: str = "policy") -> str:
    return Generation(run=run, version=number).text


@pytest.mark.parametrize(
    ("keep", "left"), [(0, ()), (1, (4,)), (2, (4, 3)), (9, (1, 2, 3, 4))]
)
def test_of_a_run_the_last_used_versions_stay_and_private_ones_go(
    keep: int, left: tuple[int, ...]
) -> None:
    stays = [
        ("", 20, False),
        (version("8"), 21, True),
        (version("1", "other"), 22, False),
    ]
    mine = [(version(f"{used}"), used, False) for used in (1, 2, 3, 4)]
    gone = [
        (Generation.private().text, 11, False),
        (Generation.private().text, 12, False),
    ]
    shelf = Shelf(*stays, *mine, *gone, (Generation.private().text, 13, False))
    assert delete_former(shelf, "policy", keep) > 0  # type: ignore[arg-type]  # what it asks of a store
    assert {used for _, used, _ in shelf.stored.values()} == {20, 21, 22, 13, *left}
