"""Loading a prompt's pages never ends in a loop and never in wrong bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdock import Dock, Namespace, Outcome
from kvdock_transformers.paged import PagedModel
from kvdock_transformers.prefix import page_hashes
from model_demo import models
from model_demo.backends import completed
from model_demo.families import WORKLOADS, Family, Scale
from model_demo.storage import PromptPages, attach, plan_for

WORK = WORKLOADS[Scale.TINY]
PROMPT = models.prompt_token_ids(Family.MAMBA, WORK.prompt_tokens)
HASHES = page_hashes(PROMPT, WORK.page_tokens)


@cache
def built(family: Family) -> models.Models:
    return models.build(family, Scale.TINY)


def engine(family: Family) -> list[PagedModel]:
    shape = (PROMPT, WORK.page_tokens, WORK.chunk_tokens)
    target, draft = built(family)
    found = [PagedModel(target, *shape)]
    if draft is not None:
        found.append(PagedModel(draft, *shape, draft=True))
    return found


def attached(family: Family, directory: Path) -> PromptPages:
    dock = Dock.load(require=["file"])
    pair = engine(family)
    plan = plan_for(dock, pair, "file")
    namespace = Namespace(model="a model")
    settings = completed(dock, ["file"], directory, {"file": {"free_space": 0}})
    return PromptPages(attach(dock, plan, namespace, settings, pair), HASHES, pair)


def stored(family: Family, directory: Path) -> PromptPages:
    pages = attached(family, directory)
    for model in pages.models:
        model.prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=True)
    pages.store(lambda _done, _total: None)
    pages.attachment.close()
    return pages


@pytest.mark.parametrize("family", list(Family))
def test_what_is_stored_is_found_and_loaded_by_another(
    family: Family, tmp_path: Path
) -> None:
    first = stored(family, tmp_path)
    second = attached(family, tmp_path)
    loaded = second.load()
    second.attachment.close()
    assert loaded.found == loaded.pages == WORK.prefix_pages
    assert loaded.draft_pages == (WORK.prefix_pages if len(first.models) > 1 else 0)
    for one, other in zip(first.models, second.models, strict=True):
        for pool in one.pools.all:
            needed = one.slots_of(pool, one.needed(pool, loaded.pages))
            here, there = one.hosts[pool.name], other.hosts[pool.name]
            # A state pool keeps no page for most slots of its window.
            assert here.buffer[needed[-1]].equal(there.buffer[needed[-1]])


def test_an_empty_store_has_nothing(tmp_path: Path) -> None:
    pages = attached(Family.SWA, tmp_path)
    assert pages.load().pages == 0
    pages.attachment.close()


def test_progress_is_told_from_nothing_to_all(tmp_path: Path) -> None:
    pages = attached(Family.MLA, tmp_path)
    pages.models[0].prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=True)
    steps: list[tuple[int, int]] = []
    pages.store(lambda done, total: steps.append((done, total)))
    pages.attachment.close()
    assert steps[0] == (0, WORK.prefix_pages)
    assert steps[-1] == (WORK.prefix_pages, WORK.prefix_pages)


class Announcer:
    """An attachment that announces every page and fails to deliver some."""

    def __init__(self, models_: list[PagedModel], broken: set[int]) -> None:
        self.pools = [pool for model in models_ for pool in model.pools.all]
        self.broken = broken
        self.attempts: list[int] = []

    def exists(self, hashes: list[str]) -> Any:
        return SimpleNamespace(best=len(hashes))

    def get(self, hashes: list[str], _pages: object) -> Any:
        count = len(hashes)
        self.attempts.append(count)
        codes = np.full(count, Outcome.OK, np.uint8)
        codes[[page for page in self.broken if page < count]] = Outcome.CORRUPT
        whole = int(np.logical_and.accumulate(codes == Outcome.OK).sum())
        outcomes = {pool.name: codes for pool in self.pools}
        return SimpleNamespace(pages=whole, outcomes=outcomes)


def test_a_page_that_is_announced_and_never_delivered_ends_the_prefix() -> None:
    pair = engine(Family.MHA)
    announcer: Any = Announcer(pair, {9, 12})
    loaded = PromptPages(announcer, HASHES, pair).load()
    assert (loaded.found, loaded.pages) == (WORK.prefix_pages, 9)
    assert announcer.attempts == [WORK.prefix_pages, 9]


def test_a_store_that_delivers_nothing_is_given_up() -> None:
    pair = engine(Family.MHA)
    announcer: Any = Announcer(pair, {0})
    assert PromptPages(announcer, HASHES, pair).load().pages == 0
    assert len(announcer.attempts) == 1
