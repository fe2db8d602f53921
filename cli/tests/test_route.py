from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvdock.errors import NoRoute, PluginError, SettingsError
from kvdock.models import HostBudget
from kvdock.pools import ContextSplit
from kvdock_cli.commands.route import route
from kvdock_cli.output import UsageProblem

if TYPE_CHECKING:
    from pathlib import Path

    from tiny import Shelf

KV = "family=mha,name=kv,heads=8,head_dim=128"
DRAFT = "family=mha,name=draft,layers=0-0,heads=8,head_dim=128,draft,required=false"
MLA = "family=mla,name=kv,latent=512,rope=64"


@pytest.fixture
def good(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A backend that takes MHA pools, says nothing of drafts, and is alone."""
    shelf.add_backend("good")
    monkeypatch.setenv("KVDOCK_PLUGINS", "good")
    return shelf


def test_the_real_command_prints_the_plan(good: Shelf) -> None:
    done = good.kvdock(
        "route", "--pool", KV, "--pool", DRAFT, "--tp", "4", "--layers", "4"
    )
    assert (done.stderr, done.returncode) == ("", 0)
    head, anchor, draft, other = done.stdout.splitlines()
    assert head.split() == ["POOL", "KIND", "NEED", "PAGE", "BACKEND", "WHY"]
    assert anchor.split()[:6] == ["kv", "mha", "anchor", "256.0", "KiB", "good"]
    assert draft.endswith("-        not stored")
    assert other.endswith(
        "good     not chosen: good says nothing about draft for mha pools"
    )


def test_the_object_has_every_backends_answer(
    good: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    del good
    assert route(pool=(KV, DRAFT), json=True) == 0
    data = json.loads(capsys.readouterr().out)
    first, second = data["routes"]
    assert (first["backend"], first["path"]) == ("good", "staged")
    assert (second["backend"], second["required"]) == (None, False)
    verdicts = {
        one["capability"]: one["support"] for one in second["options"][0]["verdicts"]
    }
    assert verdicts["draft"] == "?"


def test_configured_tiers_are_shown_with_their_rules(
    good: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del good
    monkeypatch.setenv("KVDOCK_TIERS", "good,far")
    monkeypatch.setenv("KVDOCK_BACKENDS__FAR__PLUGIN", "good")
    assert route(pool=(KV,), json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["routes"]
    rest = {"promote": "second", "locality": "auto"}
    assert [one["tier"] for one in found["placements"]] == [
        {"backend": "good", "write": "through"} | rest,
        {"backend": "far", "write": "behind"} | rest,
    ]
    assert "far: written behind, promoted at the second use" in found["reason"]


def test_quotas_of_tenants_that_are_not_kept_are_said(
    good: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del good
    file = tmp_path / "kvdock.toml"
    file.write_text('[tenants.a]\nsalt = "a"\nquota = "1 GB"\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert route(pool=(KV,), json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["routes"]
    assert "keeps no quotas of tenants" in found["reason"]


def test_no_route_is_a_problem_with_the_whole_table(good: Shelf) -> None:
    done = good.kvdock("route", "--pool", MLA, "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["error"]["type"] == "NoRoute"
    assert "good does not take mla pools" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "Install a backend that does, or see `kvdock list`."
    )


def test_strict_takes_optional_pools_for_required_ones(good: Shelf) -> None:
    del good
    with pytest.raises(NoRoute, match="no backend takes draft"):
        route(pool=(KV, DRAFT), strict=True)


@pytest.mark.parametrize(("backend", "to"), [(("god",), ()), ((), ("kv=god",))])
def test_a_backend_that_is_not_there_is_named(
    good: Shelf, backend: tuple[str, ...], to: tuple[str, ...]
) -> None:
    del good
    with pytest.raises(PluginError, match="Did you mean 'good'"):
        route(pool=(KV,), backend=backend, to=to)


def test_a_shipped_model_is_routed_with_its_draft(
    good: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    del good
    code = route(model="llama-3.1-8b", draft="eagle3", tp=4, rank=3, json=True)
    data = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (data["shard"]["tp_rank"], data["shard"]["tp_size"]) == (3, 4)
    assert [one["pool"] for one in data["routes"]] == ["kv", "draft"]
    assert data["routes"][0]["page_bytes"] == 32 * 64 * 2 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": ("family=mh,name=kv",)}, "Did you mean 'mha'"),
        ({"pool": (f"{KV},hads=3",)}, "Did you mean 'heads'"),
        ({"pool": (KV, KV)}, "described twice"),
        ({"pool": (KV,), "tp": 3}, "8 heads"),
        ({"pool": (KV,), "tp": 0}, "tp_size must be at least 1, not 0"),
        ({"pool": (KV,), "pp": 0}, "pp_size must be at least 1, not 0"),
        (
            {"pool": (KV,), "tp": 4, "rank": 4},
            "rank 4 does not exist among 4 processes",
        ),
        ({"pool": (KV,), "rank": -1}, "rank -1 does not exist among 1 processes"),
        ({"model": "llama-3.1-8b", "draft": "eagle"}, "Did you mean 'eagle3'"),
        ({"pool": (KV,), "to": ("kv",)}, "Write --to POOL=BACKEND"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    good: Shelf, options: dict[str, Any], message: str
) -> None:
    del good
    with pytest.raises(UsageProblem) as caught:
        route(**options)
    assert message in str(caught.value)


def test_what_a_deployment_needs_takes_part(
    good: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    del good
    with pytest.raises(NoRoute, match="good shares with none, not cluster"):
        route(pool=(KV,), need=("sharing=cluster",))
    with pytest.raises(NoRoute, match="good says nothing about integrity"):
        route(pool=(KV,), need=("native_integrity",))
    with pytest.raises(SettingsError, match="Did you mean 'sharing'"):
        route(pool=(KV,), need=("sharin=cluster",))
    with pytest.raises(SettingsError, match="Did you mean 'cluster'"):
        route(pool=(KV,), need=("sharing=clutser",))
    with pytest.raises(SettingsError, match="Known are none, namespace, process"):
        route(pool=(KV,), need=("durability",))
    assert route(pool=(KV,), need=("registrable=no",)) == 0
    assert "kv" in capsys.readouterr().out


def test_stages_and_context_ranks_may_be_given(
    good: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    del good
    code = route(
        model="llama-3.1-8b",
        pp_layers=(20, 12),
        cp=4,
        context=ContextSplit.LAYERS,
        rank=7,
        json=True,
    )
    data = json.loads(capsys.readouterr().out)
    assert code == 0
    assert data["shard"]["layers"] == [20, 32]
    assert data["routes"][0]["page_bytes"] == 3 * 64 * 2 * 8 * 128 * 2


@pytest.mark.usefixtures("good")
def test_ranks_divide_as_the_command_line_says() -> None:
    with pytest.raises(NoRoute, match="says nothing about split heads"):
        route(pool=(KV,), tp=2, share_tp=(2, 4))
    with pytest.raises(UsageProblem, match="in runs of 48"):
        route(pool=(KV,), tp=16, dcp=2, interleave_tokens=48)


def test_no_page_has_fewer_tokens_than_none() -> None:
    with pytest.raises(UsageProblem, match="page_tokens must be at least 0, not -1"):
        route(pool=(KV,), page_tokens=-1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("family=compressed,name=c,row_bytes=584,ratio=0", "ratio must be at least 1"),
        ("family=compressed,name=c,row_bytes=584,pad_to=0", "pad_to must be at"),
        ("family=indexer,name=c,head_dim=128,scale_block=0", "scale_block must be"),
        ("family=mha,name=c,heads=8,head_dim=-1", "negative extent"),
        ("family=mha,name=c,heads=8,head_dim=8,required=maybe", "not 'maybe'"),
        ("family=mha,name=c,heads=8,head_dim=8,kind=mamba", "of kind mamba"),
        ("family=mha,name=c,heads=8,head_dim=8,page_tokens=32", "one number for all"),
    ],
)
def test_a_pool_that_cannot_be_is_a_wrong_question(words: str, message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        route(pool=(KV, words))


@pytest.mark.usefixtures("good")
def test_what_so_many_pages_take_is_told_with_the_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = HostBudget(12 << 30, "control group /a", 10 << 30)
    monkeypatch.setattr(HostBudget, "measure", lambda: budget)
    assert route(pool=(KV,), pages=100, host_ranks=2) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "host memory has room for 4096 pages on each of 2 ranks: "
        "100 take 50.0 MiB of 2.0 GiB; "
        "control group /a has 12.0 GiB left, of which 10.0 GiB are kept in reserve"
    )
    assert route(pool=(KV,), pages=100, json=True) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == {
        "pages": 100,
        "fit": 8192,
        "ranks": 1,
        "bytes": 100 * 262144,
        "usable_bytes": 2 << 30,
        "free_bytes": 12 << 30,
        "reserve_bytes": 10 << 30,
        "limited_by": "control group /a",
    }


def test_pages_that_do_not_fit_are_a_problem_and_no_wrong_question(
    good: Shelf,
) -> None:
    done = good.kvdock("route", "--pool", KV, "--pages", str(10**10), "--json")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert 0 < found["memory"]["fit"] < found["memory"]["pages"] == 10**10
    shown = good.kvdock("route", "--pool", KV, "--pages", str(10**10)).stdout
    assert ", NOT for 10000000000: " in shown


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pages": -1}, "--pages at least 0"),
        ({"pages": 1, "host_ranks": 0}, "at least 1"),
    ],
)
def test_a_number_that_cannot_be_meant_is_a_wrong_question(
    options: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageProblem, match=what):
        route(pool=("family=mha,name=kv,heads=8,head_dim=128",), **options)


def test_what_other_deployments_do_not_find_is_said_with_the_pool_and_the_axis(
    capsys: pytest.CaptureFixture[str],
) -> None:
    route(model="qwen3-next-80b", draft="mtp", packed=True, tp=2, pp=2, share_tp=(3,))
    told = capsys.readouterr().out
    assert "pool mamba is not shared along tp: every rank keeps a state" in told
    assert "pool mamba is not shared along pp: an object holds the layers" in told
    assert "pool kv is not shared along draft: the last 1 layers" in told
    route(model="qwen3-next-80b", tp=2, share_tp=(4,), json=True)
    assert json.loads(capsys.readouterr().out)["not_shared"] == []
