from __future__ import annotations

from pathlib import Path

import pytest

from kvdock.errors import PoolError
from kvdock.models.memory_budget import HostBudget
from kvdock.pools.factories import mla, swa
from kvdock.pools.shard import Shard

GIB = 1 << 30
KV = mla("kv", layers=range(2), page_tokens=1024, latent=500, rope=12, anchor=True)
DRAFT = mla(
    "draft", layers=[2], page_tokens=1024, latent=500, rope=12, indices_from="kv"
)
SWA = swa("swa", layers=[0], page_tokens=1024, window=9, heads=8, head_dim=128)
POOLS = [KV, DRAFT, SWA]


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_tightest_control_group_above_the_process_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "1000000\n",
            "sys/fs/cgroup/outer/memory.current": "900000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 50000\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "1\n",
        },
    )
    budget = HostBudget.measure(0, root=root)
    assert budget.free_bytes == 150_000
    assert budget.limited_by == "control group /outer"


def test_the_older_kind_of_control_group_counts_as_well(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,memory:/a\n4:cpuset:/b\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5000\n",
        },
    )
    assert HostBudget.measure(0, root=root).usable_bytes == 0


def test_a_group_whose_path_is_not_mounted_falls_back_to_the_root(
    tmp_path: Path,
) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../host/path\n",
            "sys/fs/cgroup/memory.max": "4096\n",
            "sys/fs/cgroup/memory.current": "1000\n",
        },
    )
    budget = HostBudget.measure(0, root=root)
    assert budget.free_bytes == 3096
    assert budget.limited_by == "control group /"


def test_without_control_groups_the_machine_itself_is_asked(tmp_path: Path) -> None:
    budget = HostBudget.measure(0, root=tmp_path)
    assert budget.limited_by == "the machine"
    assert budget.free_bytes > 1 << 20


def test_pages_that_fit_take_no_more_than_there_is() -> None:
    budget = HostBudget(GIB, "it", 0)
    # 2 MiB of kv, 1 MiB of draft, 4 MiB of swa for each page.
    assert budget.pages_that_fit(POOLS, Shard()) == 146
    assert budget.pages_that_fit(POOLS, Shard(), ranks=2) == 73


def test_a_host_is_shared_by_one_rank_at_least() -> None:
    budget = HostBudget(GIB, "it", 0)
    with pytest.raises(PoolError, match="0 ranks cannot share"):
        budget.pages_that_fit(POOLS, Shard(), ranks=0)


def test_a_reserve_is_not_negative() -> None:
    with pytest.raises(PoolError, match="reserve_bytes must be at least 0"):
        HostBudget(GIB, "it", -1)


def test_memory_that_does_not_fit_is_named_with_everything_that_came_before() -> None:
    budget = HostBudget(GIB, "the machine", 0)
    assert budget.check([("kv", GIB // 2), ("swa", GIB // 2)]) == GIB
    with pytest.raises(PoolError) as caught:
        budget.check([("kv", GIB // 2), ("swa", GIB)], times=" to copy", fix="Less.")
    assert str(caught.value) == (
        "pool 'swa' does not fit: kv 512.0 MiB, swa 1.0 GiB to copy make 1.5 GiB, but "
        "the machine has 1.0 GiB left, of which 0 B are kept in reserve. Less."
    )
