from __future__ import annotations

from pathlib import Path

import pytest

from kvdock.models import assemble
from kvdock.pools import mamba, mha
from kvdock_cli.arguments import backend_settings, model_of, settings_of
from kvdock_cli.output import UsageProblem

KV = "family=mha,name=kv,heads=8,head_dim=128"


def test_settings_are_keys_and_values() -> None:
    assert settings_of(["a=1", "b=", "c=x=y"]) == {"a": "1", "b": "", "c": "x=y"}


def test_settings_of_a_backend_go_before_those_of_file_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVDOCK_BACKENDS__STORE__A", "environment")
    monkeypatch.setenv("KVDOCK_BACKENDS__STORE__B", "environment")
    monkeypatch.setenv("KVDOCK_BACKENDS__OTHER__C", "environment")
    assert backend_settings("store", ["a=given"]) == {"a": "given", "b": "environment"}
    assert backend_settings("none", []) == {}


@pytest.mark.parametrize("pairs", [["a"], ["=1"], ["a=1", "a=2"]])
def test_what_is_no_setting_is_refused(pairs: list[str]) -> None:
    with pytest.raises(UsageProblem, match="--to"):
        settings_of(pairs, "--to")


def test_words_describe_a_pool_as_its_family_does() -> None:
    words = (
        "family=mamba,name=state,conv=1024x3+512x3,temporal=16x64x64,layers=0-1,"
        "required=false,conv_dtype=f16"
    )
    kv, state = assemble(model_of("", [KV, words], 4)).pools
    assert kv == mha(
        "kv", layers=range(4), page_tokens=64, heads=8, head_dim=128, anchor=True
    )
    assert state == mamba(
        "state",
        layers=range(2),
        page_tokens=64,
        conv=[[1024, 3], [512, 3]],
        temporal=[16, 64, 64],
        required=False,
        conv_dtype=kv.parts[0].dtype.F16,
    )


def test_the_first_pool_is_the_anchor_unless_one_says_so() -> None:
    other = KV.replace("name=kv", "name=other")
    one, two = model_of("", [KV, other], 1).pools
    assert (one.get("anchor"), two.get("anchor")) == (True, None)
    one, two = model_of("", [KV, f"{other},anchor"], 1).pools
    assert (one.get("anchor"), two.get("anchor")) == (None, True)


def test_pools_are_added_to_a_model_that_is_named() -> None:
    extra = "family=mamba,name=state,conv=8x3"
    named = model_of("llama-3.1-8b", [], 1)
    more = model_of("llama-3.1-8b", [extra], 1)
    assert [*named.pools, more.pools[-1]] == [*more.pools]
    assert more.pools[-1]["name"] == "state"


@pytest.mark.parametrize(
    ("words", "layers"),
    [("3", (3,)), ("0-1", (0, 1)), ("0+2-4+6-8:2", (0, 2, 3, 4, 6, 8)), ("all", None)],
)
def test_layers_are_numbers_and_ranges_with_a_plus_between(
    words: str, layers: tuple[int, ...] | None
) -> None:
    other = f"{KV},layers={words}".replace("name=kv", "name=other")
    _, pool = assemble(model_of("", [KV, other], 9)).pools
    assert pool.layers == (layers or tuple(range(9)))


def test_a_state_may_have_one_shape() -> None:
    one = "family=mamba,name=state,conv=8192x3,temporal=16"
    _, state = assemble(model_of("", [KV, one], 1)).pools
    assert [part.shape for part in state.parts] == [(16,), (8192, 3)]


@pytest.mark.parametrize(
    ("name", "pools", "message"),
    [
        ("", [f"{KV},heads=16"], "heads is given twice"),
        ("", [], "no pools are given"),
        ("lama-3.1-8b", [], "Did you mean 'llama-3.1-8b'?"),
        ("nowhere.toml", [], "cannot read nowhere.toml"),
    ],
)
def test_what_cannot_be_read_is_refused(
    name: str, pools: list[str], message: str
) -> None:
    with pytest.raises(UsageProblem) as caught:
        model_of(name, pools, 1)
    assert message in str(caught.value)


def test_a_model_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'model = "me/mine"\nsummary = "mine"\nlayers = 2\npage_tokens = 16\n'
        '[[pools]]\nfamily = "mha"\nname = "kv"\nanchor = true\nheads = 2\n'
        "head_dim = 8\n"
    )
    (pool,) = assemble(model_of(str(path), [], 1)).pools
    assert (pool.page_tokens, pool.heads) == (16, 2)
