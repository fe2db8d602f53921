"""What all tests of the adapter share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Keep torch to one thread.

    On models this small a second thread only waits for the first, and where
    other work shares the machine that waiting made a run take ten times as
    long (5 s and 66 s).
    """
    torch.set_num_threads(1)
