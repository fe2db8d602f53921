"""Numbers of the library, and what they are to kvdock."""

from __future__ import annotations

import numpy as np
import pytest

from kvdock import Outcome
from kvdock_mooncake.error_codes import NO_ANSWER, NO_TIME, outcomes_of, sentence_of


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (0, Outcome.OK),
        (65536, Outcome.OK),
        (-200, Outcome.REFUSED),
        (-703, Outcome.ABSENT),
        (-704, Outcome.ABSENT),
        (-705, Outcome.OK),
        (-706, Outcome.REFUSED),
        (-707, Outcome.TIMEOUT),
        (-800, Outcome.UNAVAILABLE),
        (-801, Outcome.CORRUPT),
        (-900, Outcome.UNAVAILABLE),
        (-901, Outcome.UNAVAILABLE),
        (NO_TIME, Outcome.TIMEOUT),
        (NO_ANSWER, Outcome.ERROR),
        (-7, Outcome.ERROR),
        (-(2**62), Outcome.ERROR),
    ],
)
def test_every_number_has_an_outcome(number: int, outcome: Outcome) -> None:
    assert outcomes_of(np.array([number], np.int64)).tolist() == [outcome]


def test_a_number_is_said_in_words_and_kept() -> None:
    assert sentence_of(-704) == "there is no such object (-704)"
    assert sentence_of(-1234) == "unknown error (-1234)"
