"""Each wrong backend is caught by the test that it names."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mutants import MUTANTS
from mutants.__main__ import caught, hunt, table
from mutants.mutant import Mutant, word_of
from mutants.suite import contract_of

from kvdock.testing.cases import is_contract_test

if TYPE_CHECKING:
    from kvdock.testing.subprocess import Record

WORDS = ("image_of", "caught_by", "raises", "oracle", "keeps", "stays_s")
"""What a mutant says about itself."""

DOCS = Path(__file__).parents[3] / "docs" / "reference"


@pytest.fixture(scope="module")
def record() -> Record:
    # Minutes on a busy machine, and it ends by its own deadline: it does not hang.
    faulthandler.cancel_dump_traceback_later()
    return hunt()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=word_of)
def test_a_mutant_is_caught_by_the_test_that_is_named(
    mutant: Mutant, record: Record
) -> None:
    assert caught(mutant, record), [
        end for end in record.ended if end.suite == f"Test{mutant.__name__}"
    ]


@pytest.mark.parametrize("mutant", MUTANTS, ids=word_of)
def test_a_mutant_says_what_it_is_made_after(mutant: Mutant) -> None:
    assert is_contract_test(getattr(contract_of(mutant), mutant.caught_by))
    assert len(mutant.image_of) > 20
    assert mutant.__doc__


def test_every_mutant_is_wrong_in_one_thing_only() -> None:
    """Everything else is inherited from a backend that passes."""
    for mutant in MUTANTS:
        own = [name for name in vars(mutant) if not name.startswith("__")]
        changed = [name for name in own if name not in WORDS and name[0] != "_"]
        assert len(changed) <= 2, f"{word_of(mutant)} changes {changed}"


def test_the_page_of_the_docs_is_what_the_mutants_say() -> None:
    assert (DOCS / "mutants.md").read_text() == table(), (
        "run: make mutants ARGS=--table > docs/reference/mutants.md"
    )
