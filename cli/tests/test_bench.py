"""`kvdock bench`: figures, what they mean, and that nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from golden import check_report

from kvdock.errors import KvdockError, SettingsError
from kvdock_cli.bench import raw
from kvdock_cli.bench.measure import Figure
from kvdock_cli.commands.bench import bench
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports.bench import report

if TYPE_CHECKING:
    from kvdock_cli.reports._report import Report

GOLDEN = Path(__file__).with_name("golden")
MIB = 1 << 20
FIGURE = Figure(
    page_bytes=MIB, batch=8, threads=2, put_s=0.04, get_s=0.01, exists_s=0.002,
    raw_write_s=0.02, raw_read_s=0.005,
    spread_s={"put": (0.02, 0.08), "get": (0.009, 0.02), "exists": (0.001, 0.003)},
)  # fmt: skip


def run(recompute: float = 0.0) -> Report:
    return report(
        "file", [FIGURE], raw="disk", runs=5, token_bytes=64 << 10, recompute=recompute
    )


def test_bytes_of_all_threads_count() -> None:
    assert FIGURE.pace(FIGURE.get_s) == 1600 * MIB
    assert run().data["restored_tokens_per_s"] == 25_600


def test_the_break_even_is_where_both_take_the_same_time() -> None:
    tokens: Any = run(10_000).data["break_even_tokens"]
    start_s = FIGURE.exists_s + FIGURE.get_s
    assert start_s + tokens / 25_600 == pytest.approx(tokens / 10_000, rel=0.01)
    assert run(30_000).data["break_even_tokens"] is None
    assert run().data["break_even_tokens"] is None
    assert "restoring is faster from 197 tokens on" in run(10_000).text()
    assert "faster without storage" in run(30_000).text()


def test_the_slowest_and_the_fastest_run_stand_below_the_median() -> None:
    check_report(GOLDEN / "bench.txt", run(10_000))
    spread = run(10_000).text().splitlines()[-3]
    assert "200.0 MiB/s  800.0 MiB/s  800.0 MiB/s  1.7 GiB/s" in spread


def test_a_backend_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (f"root={tmp_path / 'kv'}", "free_space=0")
    code = bench(
        "file", set_=given, page=("4 KiB",), batch=(2,), threads=(1, 2), runs=3,
        json=True,
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert (code, found["raw"], len(found["figures"])) == (0, "disk", 2)
    assert all(one["get_s"] > 0 < one["raw_read_s"] for one in found["figures"])
    assert found["runs"] == 3
    for one in found["figures"]:
        for what, (least, most) in one["spread_s"].items():
            assert 0 < least <= one[f"{what}_s"] <= most
    assert not list(tmp_path.iterdir())


def test_a_store_without_room_is_an_error(tmp_path: Path) -> None:
    given = (f"root={tmp_path}", "quota=64 KiB", "free_space=0")
    with pytest.raises(KvdockError, match=r"pages were (stored|loaded)"):
        bench("file", set_=given, page=("16 KiB",), batch=(32,), threads=(1,))
    assert not list(tmp_path.iterdir())


def test_a_disk_below_its_floor_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    given = (f"root={tmp_path / 'kv'}", "free_space=1024 TiB")
    with pytest.raises(
        KvdockError, match="cannot store pages here: 0 B to use"
    ) as caught:
        bench("file", set_=given)
    assert "lower free_space" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_a_setting_that_is_missing_comes_with_what_to_type() -> None:
    with pytest.raises(SettingsError, match="setting 'root' is missing") as caught:
        bench("file")
    assert "kvdock bench file --set KEY=VALUE" in caught.value.fix
    assert "kvdock list file" in caught.value.fix


def test_figures_that_do_not_fit_into_memory_are_wrong_usage() -> None:
    with pytest.raises(UsageProblem, match=r"more than 1\.0 GiB"):
        bench("file", page=("64 MiB",), batch=(32,))
    with pytest.raises(UsageProblem, match="at least 1"):
        bench("file", batch=(0,))


def test_the_network_of_the_machine_is_measured() -> None:
    assert min(raw.network(3 * MIB + 5)) > 0
