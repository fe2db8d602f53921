"""(15) `kvdock why` on journals of SGLang's controller: drafts, and other TP sizes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import controllers
import pytest
import zoo
from test_ranks import run_ranks
from test_why import PAGES, why
from test_why import patched as patched  # noqa: PLC0414 - a fixture
from test_why import store as store  # noqa: PLC0414 - a fixture


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return controllers.become_rank(0, 1, tmp_path_factory.mktemp("gloo") / "store")


def test_a_draft_that_is_missing(
    tmp_path: Path, store: dict[str, Any], group: Any
) -> None:
    target, draft = zoo.mha_host(), zoo.mha_host(layers=1)
    token_ids = controllers.tokens(PAGES * zoo.PAGE)
    follows = [controllers.follows("draft")]
    given: dict[str, Any] = {"late": {"draft": draft}, "group": group}
    slots = zoo.slots(target, list(range(PAGES)))
    with controllers.controller({"kv": target}, store, **given) as made:
        controllers.back_up(made, slots, token_ids, follows)
        attached = made.storage_backend._attachments.attached_pool("draft")
        placement = attached.attachment["draft"].placements[0]
        hashes = controllers.page_hashes(made, token_ids)
        assert not placement.delete(hashes, time.monotonic() + 60).any()
    with controllers.controller({"kv": target}, store, **given) as made:
        asked = controllers.fetch(made, token_ids, slots, follows).request_id
    code, said = why(tmp_path, asked)
    assert code == 0
    assert said.startswith(
        "All 4 pages could be restored. Beside it, pool draft lacks page 1 of 4: it "
        "was deleted by name, by the engine or who calls it."
    )


def test_what_two_ranks_have_stored(
    tmp_path: Path, store: dict[str, Any], group: Any
) -> None:
    run_ranks(tmp_path, store, "heads, hooked")
    store["salt"] = f"{tmp_path} heads, hooked"
    target = zoo.mha_host(heads=2)
    token_ids = controllers.tokens(PAGES * zoo.PAGE)
    with controllers.controller({"kv": target}, store, group=group) as made:
        slots = zoo.slots(target, list(range(PAGES)))
        asked = controllers.fetch(made, token_ids, slots, []).request_id
    code, said = why(tmp_path, asked)
    assert code == 1
    assert (
        "lacks page 1 of 4: it is stored by ranks that divide pages in another way."
        in said
    )
