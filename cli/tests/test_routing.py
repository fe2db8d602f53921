from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvdock.errors import NoRoute, PluginError
from kvdock_cli.output import UsageProblem
from kvdock_cli.routing import route

if TYPE_CHECKING:
    from conftest import Shelf

KV = "name=kv,kind=mha,layers=4,heads=8,dim=128"
DRAFT = "name=draft,kind=mha,layers=1,heads=8,dim=128,draft,required=false"
MLA = "name=kv,kind=mla,layers=4,dim=576"


@pytest.fixture
def good(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A backend that takes MHA pools, says nothing of drafts, and is alone."""
    shelf.add_backend("good")
    monkeypatch.setenv("KVDOCK_PLUGINS", "good")
    return shelf


def test_the_real_command_prints_the_plan(good: Shelf) -> None:
    done = good.kvdock("route", "--pool", KV, "--pool", DRAFT, "--tp", "1/4")
    assert (done.stderr, done.returncode) == ("", 0)
    head, anchor, draft = done.stdout.splitlines()
    assert head.split() == ["POOL", "KIND", "NEED", "PAGE", "BACKEND", "WHY"]
    assert anchor.split()[:6] == ["kv", "mha", "anchor", "262144", "B", "good"]
    assert draft.endswith("good says nothing about draft for mha pools")


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


def test_no_route_is_a_problem_with_the_whole_table(good: Shelf) -> None:
    done = good.kvdock("route", "--pool", MLA, "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["error"]["type"] == "NoRoute"
    assert "good does not take mla pools" in done.stderr


def test_strict_takes_optional_pools_for_required_ones(good: Shelf) -> None:
    del good
    with pytest.raises(NoRoute, match="no backend takes draft"):
        route(pool=(KV, DRAFT), strict=True)


@pytest.mark.parametrize("choice", [{"prefer": ("god",)}, {"to": ("kv=god",)}])
def test_a_backend_that_is_not_there_is_named(
    good: Shelf, choice: dict[str, tuple[str, ...]]
) -> None:
    del good
    with pytest.raises(PluginError, match="Did you mean 'good'"):
        route(pool=(KV,), prefer=choice.get("prefer", ()), to=choice.get("to", ()))


def test_pools_come_from_a_file_and_flags_add_to_it(
    good: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    path = good.root / "pools.toml"
    path.write_text(
        "[shard]\ntp_size = 2\n[[pools]]\nname = 'kv'\nkind = 'mha'\nlayers = 4\n"
        "[[pools.parts]]\nname = 'k'\ndtype = 'f16'\nshape = [8, 64]\nshard_axis = 0\n"
    )
    assert route(path, pool=(DRAFT,), tp="3/4", page_tokens=16, json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["shard"]["tp_rank"] == 3
    assert [one["pool"] for one in data["routes"]] == ["kv", "draft"]
    assert data["routes"][0]["page_bytes"] == 4 * 16 * 2 * 64 * 2


@pytest.mark.parametrize("tp", ["4", "a/b", "/2"])
def test_ranks_are_a_rank_and_a_size(good: Shelf, tp: str) -> None:
    del good
    with pytest.raises(UsageProblem, match="no rank and size"):
        route(pool=(KV,), tp=tp)


@pytest.mark.parametrize("texts", [(KV, KV), (f"{KV},anchor", f"{KV},name=x,anchor")])
def test_pools_that_do_not_belong_together_are_a_usage_error(
    good: Shelf, texts: tuple[str, ...]
) -> None:
    del good
    with pytest.raises(UsageProblem):
        route(pool=texts)
