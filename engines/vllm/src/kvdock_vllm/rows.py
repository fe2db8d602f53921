"""KV cache groups as pools over the rows of vLLM's host memory.

A row is one page of one group, of all ranks side by side. Groups overlay each
other in it, so a group that has fewer layers, or smaller pages, leaves bytes of
the row alone, and those are what another request left there. Only the bytes that
a group owns are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from kvdock import DType, Layout, PoolKind, PoolSpec
from kvdock.errors import KvdockError
from kvdock.pools import Part, Per, PoolName, RowLayout

KINDS: Mapping[str, tuple[str, PoolKind]] = MappingProxyType(
    {
        "FullAttentionSpec": (PoolName.KV, PoolKind.MHA),
        "SinkFullAttentionSpec": (PoolName.KV, PoolKind.MHA),
        "RSWASpec": (PoolName.KV, PoolKind.MHA),
        "MLAAttentionSpec": (PoolName.KV, PoolKind.MLA),
        "UniformTypeKVCacheSpecs": (PoolName.KV, PoolKind.COMPRESSED),
        "SlidingWindowSpec": (PoolName.SWA, PoolKind.SWA),
        "SlidingWindowMLASpec": (PoolName.SWA, PoolKind.SWA),
        "ChunkedLocalAttentionSpec": (PoolName.SWA, PoolKind.SWA),
        "MambaSpec": (PoolName.MAMBA, PoolKind.MAMBA),
    }
)
"""vLLM's class of a group's specification to the name and kind of its pool."""


@attrs.frozen(kw_only=True)
class Group:
    """One KV cache group that vLLM offloads.

    Args:
        number: vLLM's number of the group, which ends its keys.
        spec_class: vLLM's class of its specification.
        spec: That specification, as text.
        tokens: Tokens that one page covers, over all ranks.
        pieces: (offset, bytes) in the slot of a rank, in order.
    """

    number: int
    spec_class: str
    spec: str
    layers: tuple[str, ...]
    tokens: int
    pieces: tuple[tuple[int, int], ...]


@attrs.frozen(kw_only=True)
class DeviceLayout:
    """The composition of one rank's slot: vLLM's device tensors, in order.

    Args:
        tensors: Bytes of a block in each device tensor.
        owned: For each group, (tensor, bytes of a block) of its layers, in order.
    """

    tensors: tuple[int, ...]
    owned: tuple[tuple[tuple[int, int], ...], ...]

    def pieces(self, group: int, blocks_per_chunk: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, bytes) of a group's page in a slot."""
        starts = [0]
        for nbytes in self.tensors:
            starts.append(starts[-1] + nbytes * blocks_per_chunk)
        return tuple(
            (starts[tensor] + block * self.tensors[tensor], nbytes)
            for tensor, nbytes in sorted(set(self.owned[group]))
            for block in range(blocks_per_chunk)
        )

    def over_ranks(self, shares: Sequence[int]) -> DeviceLayout:
        """Return the composition of a row in vLLM's canonical layout.

        A page of it has the heads of all ranks in the model's order, and no gaps.

        Source: vLLM 0.32.0, `offloading/canonical_mapping.py:_layer_mapping` and
        `kv_offload/cpu/gpu_worker.py:_canonical_block_sizes`.

        Args:
            shares: For each group, how many shares of heads make a page.
        """
        owned = tuple(
            tuple((tensor, nbytes * times) for tensor, nbytes in mine)
            for mine, times in zip(self.owned, shares, strict=True)
        )
        return DeviceLayout(tensors=_sizes(owned, len(self.tensors)), owned=owned)


def expected_layout(kv: Any, group_ids: Sequence[int]) -> DeviceLayout:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Return how vLLM will lay out a slot, from its plan of the device memory.

    The scheduler's process sees that plan and never the tensors; `check_layout`
    compares the two in the workers.

    Source: vLLM 0.32.0, `OffloadingConnectorWorker.register_kv_caches`: a tensor
    for each different address, in the order of the groups' layers, or one for the
    whole block where layers lie side by side in it.
    """
    places: dict[str, tuple[int, int]] = {}
    packed = 0
    for tensor in kv.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            place = tensor.offset + number * tensor.layer_stride
            places[layer] = (place, tensor.block_stride)
        if len(tensor.layers) > 1 and tensor.block_stride > tensor.layer_stride:
            packed = tensor.block_stride
    if packed:
        return DeviceLayout(
            tensors=(packed,), owned=tuple(((0, packed),) for _ in group_ids)
        )
    order: dict[tuple[int, int], int] = {}
    owned = []
    for group_id in group_ids:
        group = kv.kv_cache_groups[group_id]
        mine = []
        for layer in group.layer_names:
            place = places[layer]
            tensor_number = order.setdefault(place, len(order))
            mine.append((tensor_number, _used(group.kv_cache_spec, place[1])))
        owned.append(tuple(mine))
    return DeviceLayout(tensors=tuple(size for _, size in order), owned=tuple(owned))


def _used(spec: Any, block_bytes: int) -> int:  # noqa: ANN401 - vLLM's KVCacheSpec
    """Return how many of a block's bytes a layer uses; all where that is not known."""
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        return block_bytes
    # The scheduler's copy of a uniform group has the specification of one layer.
    if spec.page_size_bytes != block_bytes:
        return block_bytes
    return int(spec.real_page_size_bytes)


def shares_of(config: Any, kv: Any, group_ids: Sequence[int]) -> tuple[int, ...]:  # noqa: ANN401 - vLLM's VllmConfig and KVCacheConfig
    """Return how many ranks' shares of heads make a whole page, for each group.

    Latent pages are the same on all ranks, and so are heads that are fewer than ranks.
    """
    ranks = int(config.parallel_config.tensor_parallel_size)
    shares = min(ranks, int(config.model_config.get_total_num_kv_heads()))
    specs = (type(kv.kv_cache_groups[one].kv_cache_spec).__name__ for one in group_ids)
    return tuple(1 if spec == "MLAAttentionSpec" else shares for spec in specs)


def check_layout(expected: DeviceLayout, caches: Any, *, canonical: bool) -> None:  # noqa: ANN401 - vLLM's CanonicalKVCaches
    """Reject device tensors that do not lie in a slot as was expected.

    Where they did not, the bytes of some layer would not be stored, and a restored
    row would hold another request's.

    Raises:
        KvdockError: With both layouts.
    """
    found = _registered(caches, canonical=canonical)
    fits = found.tensors == expected.tensors and len(found.owned) == len(expected.owned)
    for actual, mine in zip(found.owned, expected.owned, strict=False):
        room = dict(mine)
        fits = fits and all(nbytes <= room.get(at, 0) for at, nbytes in actual)
    if not fits:
        raise KvdockError(
            f"vLLM lays out its host memory as {found}, and {expected} was expected",
            fix="Report this model and the version of vLLM to kvdock.",
        )


def _registered(caches: Any, *, canonical: bool) -> DeviceLayout:  # noqa: ANN401 - vLLM's CanonicalKVCaches
    """Return the layout that a worker has registered."""
    tensors = tuple(int(one.page_size_bytes) for one in caches.tensors)
    owned = tuple(
        tuple(
            (
                int(ref.tensor_idx),
                int(ref.mapping.canonical_page_size_bytes)
                if canonical
                else int(ref.page_size_bytes),
            )
            for ref in refs
        )
        for refs in caches.group_data_refs
    )
    if canonical:
        tensors = _sizes(owned, len(tensors))
    return DeviceLayout(tensors=tensors, owned=owned)


def _sizes(owned: Iterable[Iterable[tuple[int, int]]], tensors: int) -> tuple[int, ...]:
    """Return the bytes of each tensor's largest layer."""
    found = [0] * tensors
    for at, nbytes in (one for mine in owned for one in mine):
        found[at] = max(found[at], nbytes)
    return tuple(found)


def rows_of(
    group: Group, *, row_bytes: int, slot_bytes: int, ranks: int, whole: bool
) -> RowLayout:
    """Return which bytes of a row are the page of a group.

    If `whole`, ranks may have other layers than this process knows of, so that all of
    their slots are stored.
    """
    return RowLayout(
        row_bytes=row_bytes,
        pieces=((0, slot_bytes),) if whole else group.pieces,
        slots=tuple(rank * slot_bytes for rank in range(ranks)),
    )


def pool_names(groups: Sequence[Group]) -> dict[int, str]:
    """Return each group's pool name by the group's number.

    Raises:
        KvdockError: If a group is of a class that this package does not know.
    """
    names: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for group in groups:
        if group.spec_class not in KINDS:
            raise KvdockError(
                f"KV cache group {group.number} is of class {group.spec_class}, which "
                f"kvdock-vllm does not know",
                fix=f"It knows {', '.join(sorted(KINDS))}. Look for a newer one.",
            )
        name = str(KINDS[group.spec_class][0])
        names[group.number] = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
    return names


def pool_of(group: Group, name: str, rows: RowLayout) -> PoolSpec:
    """Describe a group as a pool of whole pages.

    What the bytes of a page mean is in its part's encoding: vLLM's own
    specification, with the class and the layers.
    """
    kind = KINDS[group.spec_class][1]
    return PoolSpec(
        name=name,
        kind=kind,
        layers=(0,),
        page_tokens=group.tokens,
        parts=(
            Part(
                "rows",
                DType.U8,
                (rows.page_bytes,),
                Per.PAGE,
                encoding=f"{group.spec} of {', '.join(group.layers)}",
            ),
        ),
        layout=Layout.PAGE_OBJECT,
        pieces=len(rows.runs),
        engine_hits=True,
    )


def pools(
    groups: Sequence[Group],
    *,
    row_bytes: int,
    slot_bytes: int,
    ranks: int,
    whole: bool,
) -> dict[int, tuple[PoolSpec, RowLayout]]:
    """Return pool and rows of each group, by the group's number.

    Raises:
        KvdockError: If a group is of an unknown class, or does not lie in its row.
    """
    names = pool_names(groups)
    found = {}
    for group in groups:
        rows = rows_of(
            group,
            row_bytes=row_bytes,
            slot_bytes=slot_bytes,
            ranks=ranks,
            whole=whole,
        )
        found[group.number] = (pool_of(group, names[group.number], rows), rows)
    return found
