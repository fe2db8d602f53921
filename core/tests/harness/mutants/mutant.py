"""The definition of a mutant: a reference backend with one thing wrong."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import attrs
from peer_reference import PeerReference
from reference import FolderReference, MemoryReference, ShelfOracle
from server_reference import ServerReference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock.batch import Batch


def ungated(batch: Batch) -> Batch:
    """Return a batch whose memory is touched at any time."""
    return attrs.evolve(batch, gate=None)


@contextmanager
def entered(batch: Batch) -> Iterator[bool]:
    """Pass a batch's gate; False if it is closed and memory must not be touched."""
    free = batch.gate is None or batch.gate.enter()
    try:
        yield free
    finally:
        if free and batch.gate is not None:
            batch.gate.leave()


class Wrong:
    """What each mutant says about itself."""

    image_of: ClassVar[str]
    """The real defect that it is made after."""
    caught_by: ClassVar[str]
    """The test of the contract that must fail on it."""
    raises: ClassVar[str] = "AssertionError"
    """How it fails: by an assertion, unless the defect itself raises."""


class MemoryMutant(Wrong, MemoryReference):
    """A wrong backend over a dict of this process."""


class FolderMutant(Wrong, FolderReference):
    """A wrong backend over a folder that other processes see."""

    oracle: ClassVar[type[ShelfOracle]] = ShelfOracle
    """What its author brings to damage stored bytes."""
    stays_s: ClassVar[float] = 3.0
    """How long its pages are left alone."""


class PeerMutant(Wrong, PeerReference):
    """A wrong backend that writes into a peer's memory."""


class ServerMutant(Wrong, ServerReference):
    """A wrong backend over two servers that can be taken away."""

    keeps: ClassVar[bool] = True
    """Whether its servers keep what they have when they are restarted."""


Mutant = type[MemoryMutant] | type[FolderMutant] | type[PeerMutant] | type[ServerMutant]


def word_of(mutant: Mutant) -> str:
    """Return a mutant's name in words with underscores."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", mutant.__name__).lower()
