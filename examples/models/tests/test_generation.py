"""A draft makes generation faster and never different."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvdock_transformers.paged import PagedModel
from model_demo import models
from model_demo.engine import flip_signs
from model_demo.families import WORKLOADS, Family, Scale
from model_demo.generation import Generation, generate, generate_with_draft

WORK = WORKLOADS[Scale.TINY]
NEW_TOKENS = 20
PROMPT = models.prompt_token_ids(Family.MHA, WORK.prompt_tokens)


@cache
def built() -> models.Models:
    return models.build(Family.MHA, Scale.TINY)


def paged(*, draft: bool = False) -> PagedModel:
    model = built().draft if draft else built().target
    assert model is not None
    return PagedModel(model, PROMPT, WORK.page_tokens, WORK.chunk_tokens, draft=draft)


def speculated(draft: PagedModel, draft_tokens: int) -> Generation:
    target = paged()
    return generate_with_draft(
        target.running, draft.running, PROMPT, NEW_TOKENS, draft_tokens
    )


@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_speculation_yields_the_tokens_of_plain_greedy_generation(
    draft_tokens: int,
) -> None:
    plain = generate(paged().running, PROMPT, NEW_TOKENS)
    made = speculated(paged(draft=True), draft_tokens)
    assert made.token_ids == plain.token_ids
    torch.testing.assert_close(made.logits, plain.logits, atol=1e-4, rtol=0)


def test_the_draft_is_sometimes_right_and_sometimes_wrong() -> None:
    made = speculated(paged(draft=True), 3)
    assert 0 < made.accepted < made.proposed


def test_a_draft_that_is_the_target_is_always_right() -> None:
    made = speculated(paged(), 3)
    assert made.acceptance == 1.0


def test_a_wrong_draft_cache_changes_the_acceptance_and_no_token() -> None:
    true, false = paged(draft=True), paged(draft=True)
    for draft in (true, false):
        draft.prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=True)
    flip_signs(false, "draft")
    false.rebuild(WORK.prefix_pages)
    one, other = speculated(true, 3), speculated(false, 3)
    assert one.token_ids == other.token_ids
    assert one.accepted > other.accepted


def test_generation_without_a_draft_has_no_acceptance() -> None:
    assert generate(paged().running, PROMPT, 2).acceptance is None


def test_generated_tokens_do_not_just_repeat() -> None:
    plain = generate(paged().running, PROMPT, NEW_TOKENS)
    assert len(set(plain.token_ids)) > NEW_TOKENS // 2
