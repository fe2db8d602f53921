"""Hints of SGLang's requests reach the pages that SGLang stores, and those stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import controllers
import numpy as np
import pytest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from test_radix_cache import kit as kit  # noqa: PLC0414 - a fixture

from kvdock.config import CoreSettings
from kvdock.hints import Hints
from kvdock.retention import Retention, RetentionAnswer
from kvdock_sglang import hints as module
from kvdock_sglang.engine_patches import PATCHES, skipped_patches
from kvdock_sglang.hints import RequestPages, page_hashes

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock.events import HintAnswered

PAGE = 16
CACHE = SimpleNamespace(tree_core=SimpleNamespace(is_eagle=False), page_size=PAGE)


def request(tokens: Sequence[int], *, salt: str = "", **payloads: Any) -> Any:
    """Return a request as SGLang keeps it, with the hints of a client."""
    actions = [
        {
            "action_id": "1",
            "action_type": f"kvdock.{kind}",
            "action_version": "1",
            "payload": payload,
        }
        for kind, payload in payloads.items()
    ]
    given = {"protocol_version": "1", "message_id": "m", "actions": actions}
    return SimpleNamespace(
        rid="r",
        kv_hints=decode_kv_hints_envelope(given) if payloads else None,
        full_untruncated_fill_ids=list(tokens),
        extra_key=None,
        cache_salt=salt or None,
    )


class Pool:
    """Keeps what it is asked to retain."""

    pool = SimpleNamespace(page_tokens=PAGE, name="kv")

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[str], Retention]] = []

    def retain(self, names: Sequence[str], asked: Retention, _: float) -> Any:
        self.asked.append((names, asked))
        return np.full(len(names), RetentionAnswer.ACCEPTED, np.uint8)


@pytest.fixture
def told() -> list[HintAnswered]:
    return []


@pytest.fixture
def noted(told: list[HintAnswered]) -> Iterator[RequestPages]:
    pages = RequestPages(Hints(CoreSettings(), told.append))
    yield pages
    pages.hints.close()


def settle(noted: RequestPages) -> None:
    """Wait for the thread of the hints."""
    assert noted.hints._requests.drain(time.monotonic() + 60)


def test_pages_of_a_hint_are_awaited_with_their_times(noted: RequestPages) -> None:
    tokens = range(100, 100 + 5 * PAGE)
    req = request(tokens, retain={"keep_s": 60, "to_token": PAGE + 1})
    pool: Any = Pool()
    noted.begin(CACHE, req, [pool])
    noted.begin(CACHE, req, [pool])  # SGLang asks again where it retries
    hashes = page_hashes(CACHE, req, tokens)
    settle(noted)
    assert [names for names, _ in pool.asked] == [hashes[:2]]
    kept = [bool(one.keep_until) for one in noted.times(hashes)]
    assert kept == [True] * 2 + [False] * 3
    # Another tenant's pages of the same tokens are others.
    other = page_hashes(CACHE, request(tokens, salt="b"), tokens)
    assert not any(noted.times(other))


def test_what_a_request_generates_is_awaited_when_it_is_known(
    noted: RequestPages,
) -> None:
    tokens = [*range(100, 100 + 2 * PAGE)]
    req = request(tokens, forget={"from_token": PAGE})
    noted.begin(CACHE, req, [])
    req.full_untruncated_fill_ids += range(500, 500 + 2 * PAGE)
    longer = page_hashes(CACHE, req, req.full_untruncated_fill_ids)
    assert [bool(one) for one in noted.times(longer)] == [False, True, False, False]
    noted.inserted(CACHE, req, 3 * PAGE)
    assert [bool(one) for one in noted.times(longer)] == [False, True, True, False]


def test_a_request_without_hints_costs_nothing(
    noted: RequestPages, told: list[HintAnswered]
) -> None:
    req = request(range(64))
    noted.begin(CACHE, req, [])
    noted.inserted(CACHE, req, 64)
    assert not any(noted.times(["a", "b"]))
    assert not told


def test_pages_are_awaited_for_a_time_and_up_to_a_number(
    noted: RequestPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PAGES", 4)
    tokens = range(100, 100 + 6 * PAGE)
    req = request(tokens, retain={"keep_s": 60})
    noted.begin(CACHE, req, [])
    hashes = page_hashes(CACHE, req, tokens)
    assert [bool(one) for one in noted.times(hashes)] == [False] * 2 + [True] * 4
    real = time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: real() + 601)
    assert not any(noted.times(hashes))


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_the_hash_chain_is_the_one_under_which_sglang_stores(
    kit: Any, tmp_path: Path
) -> None:
    tokens = kit._make_seq(1, 4)
    cache, allocator, requests = build_fixture(kit.cfg)
    kit._init_hicache(cache, storage_backend="file", storage_dir=str(tmp_path))
    kit.addCleanup(cache.cache_controller.detach_storage_backend)
    kit._insert(cache, allocator, requests, tokens)
    node = cache.tree_core.node_by_id(match_prefix(cache, tokens).last_device_node)
    found: list[str] = []
    while node is not None and node.hash_value is not None:
        found = [*node.hash_value, *found]
        node = node.parent
    assert found
    assert page_hashes(cache, request(tokens), tokens)[: len(found)] == found


def test_the_patches_of_hints_have_a_place_here() -> None:
    ours = [one for one in PATCHES if "hints" in one.lost and "kv_hints" in one.lost]
    assert len(ours) == 2
    assert not {id(one.closed) for one in skipped_patches()} & set(map(id, ours))
    controllers.close_name_branches()
    controllers.open_name_branches()
