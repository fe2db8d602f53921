"""Pages that an engine serves from memory of its own stay young in the store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs
import pytest
from shelf import Engine, Shelf, attention, hashes, patient, states, until

from kvdock.errors import KvdockError
from kvdock.resilience import background


@attrs.define(eq=False)
class Young(Shelf):
    """A shelf that writes down what is used."""

    used: list[tuple[str, Sequence[str]]] = attrs.field(factory=list)
    go_on: threading.Event = attrs.field(factory=threading.Event)
    fails: bool = False

    def __attrs_post_init__(self) -> None:
        self.go_on.set()

    def touch(self, pool: str, keys: Sequence[str]) -> None:
        self.used.append((pool, keys))
        self.go_on.wait(60)
        if self.fails:
            raise RuntimeError("no such notion")


def test_used_pages_are_passed_on_in_the_background_in_the_order_of_the_prefix() -> (
    None
):
    shelf = Young()
    engine = Engine([shelf], (attention(), states()))
    with engine.attachment as cache:
        assert cache["mamba"].touch(hashes(3))
        assert cache.wait_idle(60)
        assert shelf.used == [("mamba", cache["mamba"].keys(hashes(3)))]


def test_a_backend_gets_no_more_keys_at_once_than_it_takes() -> None:
    shelf = Young(max_batch_keys=4)
    engine = Engine([shelf])
    with engine.attachment as cache:
        assert cache["kv"].touch(hashes(10))
        assert cache.wait_idle(60)
        assert [len(keys) for _, keys in shelf.used] == [4, 4, 2]


def test_a_backend_without_use_in_its_order_is_not_called() -> None:
    with Engine([Shelf()]).attachment as cache:
        assert not cache["kv"].touch(hashes(1))


def test_notes_that_wait_are_bounded_and_go_on_once_the_backend_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_TOUCHED_PAGES", 8)
    shelf = Young()
    shelf.go_on.clear()
    engine = Engine([shelf])
    with engine.attachment as cache:
        assert cache["kv"].touch(hashes(1))
        until(lambda: len(shelf.used) == 1)
        assert cache["kv"].touch(hashes(5))
        assert not cache["kv"].touch(hashes(4))
        assert cache["kv"].touch(hashes(3))
        assert len(shelf.used) == 1
        shelf.go_on.set()
        until(lambda: len(shelf.used) == 3)
        assert cache.wait_idle(60)
        assert cache["kv"].touch(hashes(8))


def test_a_backend_that_fails_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Young(fails=True)
    with Engine([shelf], core=patient()).attachment as cache:
        for _ in range(2):
            assert cache["kv"].touch(hashes(1))
            assert cache.wait_idle(60)
        assert len(shelf.used) == 2
        assert "noting which pages are used: RuntimeError" in caplog.text
        assert set(cache.breakers()["shelf"].values()) == {"closed"}


def test_only_page_hashes_are_taken() -> None:
    engine = Engine([Young()])
    with (
        engine.attachment as cache,
        pytest.raises(KvdockError, match="letters and digits"),
    ):
        cache["kv"].touch(["../x"])
