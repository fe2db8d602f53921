"""Every family of models: stored, restored in a new process, and really used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import vllm_models
from vllm_lives import Lives, log_probability_distance, tokens

QUICK = ("llama", "draft", "swa_full", "mamba2")
"""What continuous integration runs; together they have every kind of pool."""

SLOW = ("swa", "mla", "gdn", "gdn_groups", "chunked", "eagle")


@attrs.frozen
class Story:
    """What the engines of some families did, by family."""

    stored: dict[str, Any]
    restored: dict[str, Any]
    altered: dict[str, Any]


def tell(
    lives: Lives,
    name: str,
    families: tuple[str, ...],
    storage: dict[str, Any],
    *,
    alter: bool = True,
) -> Story:
    """Store in one process; restore, also with altered pages, in another one."""
    new_tokens = 24
    stored = lives.run(
        f"{name}-store",
        [
            lives.phase(family, family, storage, rounds=2, new_tokens=new_tokens)
            for family in families
        ],
    )
    plain = [
        lives.phase(family, family, storage, new_tokens=new_tokens)
        for family in families
    ]
    altered = [
        lives.phase(
            family,
            f"{family}/altered",
            storage,
            new_tokens=new_tokens,
            alter={"bytes": draft_bytes(stored[family])} if family == "draft" else {},
        )
        for family in (families if alter else ())
    ]
    found = lives.run(f"{name}-restore", [*plain, *altered])
    return Story(
        stored,
        {family: found[family] for family in families},
        {family: found.get(f"{family}/altered") for family in families},
    )


def draft_bytes(stored: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the draft model's layers in a row."""
    group = stored["groups"][0]
    return [
        (start, size)
        for layer, (start, size) in zip(group["layers"], group["pieces"], strict=True)
        if layer.startswith("draft")
    ]


@pytest.fixture(scope="module")
def quick(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell(lives, "quick", QUICK, on_files(tmp_path_factory.mktemp("quick")))


@pytest.fixture(scope="module")
def slow(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell(lives, "slow", SLOW, on_files(tmp_path_factory.mktemp("slow")))


def on_files(folder: Path) -> dict[str, Any]:
    folder.chmod(0o700)
    # A test machine may have less free than a store keeps by default.
    # On a busy machine a lookup of the default deadline may be a miss.
    deadlines = {"exists": "30 s", "get": "60 s", "put": "60 s"}
    return {
        "plugin": "file",
        "root": str(folder),
        "free_space": "1 MiB",
        "core": {"deadlines": deadlines},
    }


def check(family: str, story: Story) -> None:
    """Assert that the pages of a family are restored, exact, and used."""
    tiny = vllm_models.FAMILIES[family]
    warm = story.stored[family]["rounds"][1]
    restored = story.restored[family]
    assert tokens(restored["rounds"][0]) == tokens(warm)
    if not tiny.draft:
        assert log_probability_distance(restored["rounds"][0], warm) == 0.0
    for pool in tiny.pools:
        assert restored["pages"].get(f"{pool}/load/ok", 0) > 0, restored["pages"]
    assert not [label for label in restored["pages"] if not label.endswith("/ok")]
    cached = [one["cached"] for one in restored["rounds"][0]]
    assert cached == [one["cached"] for one in warm]


def check_altered(family: str, story: Story) -> None:
    """Assert that other bytes in the pages give another answer."""
    warm, altered = (
        story.stored[family]["rounds"][1],
        story.altered[family]["rounds"][0],
    )
    for one, other in zip(warm, altered, strict=True):
        assert (one["tokens"], one["logprobs"]) != (other["tokens"], other["logprobs"])


@pytest.mark.parametrize("family", QUICK)
def test_pages_are_restored_in_a_new_process(family: str, quick: Story) -> None:
    check(family, quick)


@pytest.mark.parametrize("family", [one for one in QUICK if one != "draft"])
def test_altered_pages_change_the_answer(family: str, quick: Story) -> None:
    check_altered(family, quick)


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW)
def test_more_families_are_restored_in_a_new_process(family: str, slow: Story) -> None:
    check(family, slow)


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW)
def test_altered_pages_of_more_families_change_the_answer(
    family: str, slow: Story
) -> None:
    check_altered(family, slow)


ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


def check_accepted(family: str, story: Story) -> None:
    """Assert that a restored draft has as many tokens accepted as a warm one."""
    cold, warm = story.stored[family]["accepted"]
    of_warm = [b - a for a, b in zip(cold[ACCEPTED], warm[ACCEPTED], strict=True)]
    assert sum(of_warm) > 0
    assert story.restored[family]["accepted"][0][ACCEPTED] == of_warm


def test_a_restored_draft_has_as_many_tokens_accepted_as_a_warm_one(
    quick: Story,
) -> None:
    check_accepted("draft", quick)


@pytest.mark.slow
def test_a_restored_head_has_as_many_tokens_accepted_as_a_warm_one(
    slow: Story,
) -> None:
    check_accepted("eagle", slow)


def test_altered_draft_pages_change_what_is_accepted_and_no_token(
    quick: Story,
) -> None:
    altered = quick.altered["draft"]
    assert tokens(altered["rounds"][0]) == tokens(quick.stored["draft"]["rounds"][1])
    restored = quick.restored["draft"]["accepted"][0]
    assert altered["accepted"][0][ACCEPTED] != restored[ACCEPTED]
