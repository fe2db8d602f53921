"""Why recurrent states stay with their TP size, by SGLang's own buffers.

When one of these fails, SGLang has changed what decision record 80 rests on.
"""

from __future__ import annotations

import pytest
import zoo
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_blocks
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo

QUERY, KEY, VALUE = 8, 8, 16
"""Channels of the fused projections, over all ranks."""


def test_the_pages_of_states_never_lie_by_head() -> None:
    """SGLang divides objects by head where the heads of a page lie apart."""
    with pytest.raises(AssertionError, match="Unsupported layout: page_head"):
        zoo.mamba_host("page_head")


def test_the_buffers_of_states_do_not_say_where_fused_channels_end() -> None:
    assert set(MambaStateBufferInfo.__struct_fields__) == {
        "temporal",
        "conv",
        "extra_checkpoint_buffers",
    }
    pool = zoo.mamba_host()
    assert [name for name in vars(pool) if "group" in name or "shard" in name] == []


def test_the_channels_of_a_rank_are_several_runs_of_those_of_fewer_ranks() -> None:
    """One run each would be other projections' channels: wrong values."""
    of_two = (QUERY + KEY + VALUE) // 2
    first = [*range(QUERY // 2), *range(QUERY, QUERY + KEY // 2)]
    first += range(QUERY + KEY, QUERY + KEY + VALUE // 2)

    def held(groups: list[int] | None, rank: int) -> list[int]:
        """Return the channels of a rank of four, out of the first one of two."""
        blocks = compute_mamba_state_slice_blocks(
            src_dim=of_two,
            dst_dim=of_two // 2,
            src_attn_tp_size=2,
            dst_attn_tp_size=4,
            dst_tp_rank_in_group=rank,
            local_tp_rank_in_group=0,
            conv_shard_groups=groups,
        )
        return [first[at] for start, _, n in blocks for at in range(start, start + n)]

    # Its second rank of four: the second quarter of query, key and value.
    assert held([QUERY, KEY, VALUE], 1) == [2, 3, 10, 11, 20, 21, 22, 23]
    assert held(None, 1) == [16, 17, 18, 19, 20, 21, 22, 23]
