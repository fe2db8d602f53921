"""Batches cut to size, and turned into the lists that the library takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from kvdock import Batch, Block
    from kvdock.arrays import Int64Array


def repeated(sizes: Int64Array) -> bool:
    """Return whether all rows are a view of one, as a region makes them."""
    return len(sizes) > 0 and sizes.strides[0] == 0


def rounds(keys: Sequence[str]) -> list[Int64Array]:
    """Divide rows so that no key comes twice in one round."""
    seen: dict[str, int] = {}
    rounds: list[list[int]] = []
    for row, key in enumerate(keys):
        turn = seen[key] = seen.get(key, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(row)
    return [np.array(rows, np.int64) for rows in rounds]


def rows_of(batch: Batch, rows: Int64Array) -> Batch:
    """Return some keys of a batch with their memory."""
    keys = [batch.keys[row] for row in rows.tolist()]
    return attrs.evolve(
        batch, keys=keys, addresses=batch.addresses[rows], sizes=batch.sizes[rows]
    )


def marked(batch: Batch, mark: Block) -> Batch:
    """Give objects without bytes one byte: the library stores no empty ones."""
    if repeated(batch.sizes) and any(batch.sizes[0].tolist()):
        return batch
    empty = batch.object_bytes == 0
    if not empty.any():
        return batch
    width = max(1, batch.addresses.shape[1])
    addresses = np.zeros((len(batch), width), np.int64)
    sizes = np.zeros((len(batch), width), np.int64)
    if batch.addresses.size:
        addresses[:], sizes[:] = batch.addresses, batch.sizes
    addresses[empty, 0] = mark.address
    sizes[empty, 0] = mark.nbytes
    return attrs.evolve(batch, addresses=addresses, sizes=sizes)


def pieces_of(batch: Batch) -> tuple[list[Any], list[Any]]:
    """Return memory as the library takes it: flat, or a list for each key."""
    addresses, sizes = batch.addresses, batch.sizes
    if addresses.shape[1] == 1:
        if repeated(sizes):
            return addresses[:, 0].tolist(), [int(sizes[0, 0])] * len(sizes)
        return addresses[:, 0].tolist(), sizes[:, 0].tolist()
    if repeated(sizes) and all(sizes[0].tolist()):
        return addresses.tolist(), [sizes[0].tolist()] * len(sizes)
    if sizes.all():
        return addresses.tolist(), sizes.tolist()
    # A piece of no bytes is padding, and its address may be anything.
    some = [row != 0 for row in sizes]
    return (
        [row[keep].tolist() for row, keep in zip(addresses, some, strict=True)],
        [row[keep].tolist() for row, keep in zip(sizes, some, strict=True)],
    )


def sizes_of(store: Any, keys: list[str]) -> Int64Array:  # noqa: ANN401 - the library's own class
    """Return the stored bytes of each key, 0 where they are not known."""
    found = store.batch_get_replica_desc(keys)
    sizes = np.zeros(len(keys), np.int64)
    for row, key in enumerate(keys):
        for replica in found.get(key, ()):
            if replica.is_memory_replica():
                described = replica.get_memory_descriptor().buffer_descriptor
                sizes[row] = int(described.size)
    return sizes
