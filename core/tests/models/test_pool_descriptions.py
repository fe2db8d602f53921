from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from geometries import second_geometry

from kvdock.errors import PoolError
from kvdock.models.assembly import Deployment, assemble
from kvdock.models.description import load_model, parse_description
from kvdock.pools.enums import ContextSplit, DType, PoolKind
from kvdock.pools.shard import Shard

if TYPE_CHECKING:
    from kvdock.models.description import (
        ModelDescription,
    )
    from kvdock.pools.spec import PoolSpec


def test_layers_are_written_as_ranges_with_steps() -> None:
    assert assemble(changed(layers="0-3:2")).pools[-1].layers == (0, 2)
    assert assemble(changed(layers="1, 2-3")).pools[-1].layers == (1, 2, 3)


def changed(**fields: object) -> ModelDescription:
    model = second_geometry()
    return attrs.evolve(model, pools=(*model.pools[:-1], {**model.pools[-1], **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "k_onyl"}, "no family 'k_onyl'. Did you mean 'k_only'"),
        ({"head_dimm": 3}, "unknown field 'head_dimm'. Did you mean 'head_dim'"),
        ({"layers": "0-9"}, "layer 4 is outside of 4 layers"),
        ({"layers": "3-99999999999"}, "layer 4 is outside of 4 layers"),
        ({"layers": "0, 9"}, "layer 9 is outside of 4 layers"),
        ({"layers": "2, 7-9"}, "layer 7 is outside of 4 layers"),
        ({"layers": "3-1"}, "layers '3-1' run backwards"),
        ({"layers": "0-2:0"}, "'0-2:0' is not a range of layers"),
        ({"layers": "x"}, "'x' is not a range of layers"),
        ({"layers": 3}, "neither text nor a list"),
        ({"layers": "2, 1"}, "not ascending"),
        ({"dtype": "bf17"}, "'bf17' is not a DType"),
        ({"indices_from": "nowhere"}, "which is not there"),
        ({"heads": "2"}, "model 'two-windows': pool 'indexer'"),
        ({"heads": 8.0}, "pool 'indexer': heads is a whole number, not 8.0"),
        ({"heads": True}, "pool 'indexer': heads is a whole number, not True"),
        ({"heads": -1}, "negative extent"),
        ({"required": "no"}, "pool 'indexer': required is true or false, not 'no'"),
        ({"anchor": "yes"}, "pool 'indexer': anchor is true or false, not 'yes'"),
        ({"layout": 3}, "pool 'indexer': layout: 3 is not a Layout"),
        ({"indices_from": 3}, "pool 'indexer': indices_from is text, not 3"),
        ({"name": 5}, "name is text, not 5"),
        ({"page_tokens": 32}, "page_tokens is one number for all pools"),
        ({"layers": [0, True]}, "neither text nor a list"),
        ({"kind": "mamba"}, "unknown field 'kind'"),
        ({"when": 3}, "`when` is a table"),
        ({"when": {"bf16": 3}}, "`when` is a table"),
        ({"when": {"bf17": {}}}, "'bf17', which is not an element type. Did you mean"),
        ({"name": "Indexer"}, "not a valid name"),
    ],
)
def test_the_first_offending_pool_is_named_and_there_are_no_pools(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        assemble(changed(**fields))


@pytest.mark.parametrize("at", range(4))
def test_a_missing_dimension_is_named(at: int) -> None:
    pools = list(second_geometry().pools)
    pools[at] = {key: value for key, value in pools[at].items() if key != "heads"}
    name = pools[at]["name"]
    with pytest.raises(PoolError, match=f"pool '{name}': field 'heads' is missing"):
        assemble(attrs.evolve(second_geometry(), pools=tuple(pools)))


def pool_of(**fields: object) -> PoolSpec:
    """Return a pool that is described beside a logical anchor."""
    anchor = {"family": "logical", "name": "kv", "anchor": True}
    model = attrs.evolve(second_geometry(), pools=(anchor, {"name": "p", **fields}))
    return assemble(model).pools[-1]


def test_a_family_takes_the_fields_of_its_constructor_and_no_others() -> None:
    with pytest.raises(PoolError, match="unknown field 'heads'"):
        pool_of(family="mla", latent=8, rope=8, heads=2)
    with pytest.raises(PoolError, match="unknown field 'hit_policy'"):
        pool_of(family="mamba", conv=[[8, 3]], hit_policy="all_pages")


@pytest.mark.parametrize("conv", [[8, 3], [[8, 3]], (8, 3)])
def test_one_shape_is_a_list_of_one(conv: object) -> None:
    assert pool_of(family="mamba", conv=conv).parts[0].shape == (8, 3)


@pytest.mark.parametrize("conv", ["8x3", [8, [3]], [[8, 3.0]], 8.5, [[True]]])
def test_what_is_no_shape_is_refused_by_name(conv: object) -> None:
    with pytest.raises(PoolError, match="pool 'p': conv is a shape of whole numbers"):
        pool_of(family="mamba", conv=conv)


def test_latents_may_have_a_window() -> None:
    latents = {"family": "mla", "latent": 8, "rope": 8}
    trailing = {"hit_policy": "trailing_pages", "window_pages": 2}
    by_tokens, by_pages = pool_of(**latents, window=128), pool_of(**latents, **trailing)
    assert by_tokens == by_pages
    assert by_tokens.window_pages == 2
    assert pool_of(**latents, window=128, kind="swa").kind is PoolKind.SWA
    with pytest.raises(PoolError, match="hit_policy say the same thing"):
        pool_of(**latents, window=128, **trailing)


def test_rows_of_fixed_bytes_may_say_what_an_element_type_changes() -> None:
    table = {
        "family": "compressed",
        "name": "rows",
        "row_bytes": 584,
        "when": {"bf16": {"row_bytes": 1152}},
    }
    anchor = {"family": "logical", "name": "kv", "anchor": True}
    model = attrs.evolve(second_geometry(), pools=(anchor, table))
    rows = assemble(model, Deployment(dtype=DType.BF16)).pools[-1]
    assert rows.page_bytes(Shard()) == 4 * 64 * 1152


def test_what_a_pool_says_of_its_division_stands_against_the_deployment() -> None:
    layers = {"context": "layers", "name": "other"}
    model = second_geometry()
    own = attrs.evolve(model, pools=(*model.pools, {**model.pools[1], **layers}))
    one, *_, other = assemble(own, Deployment(cp_size=2, context="pages")).pools
    assert (one.context, other.context) == (ContextSplit.PAGES, ContextSplit.LAYERS)


GOOD: dict[str, Any] = {
    "model": "org/Model",
    "summary": "one pool",
    "layers": 2,
    "page_tokens": 16,
    "pools": [{"family": "mla", "name": "kv"}],
}


def test_a_misspelled_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(PoolError, match=r"Did you mean 'deepseek-v3\.2'"):
        load_model("deepseek-v32")
    with pytest.raises(PoolError, match=r"Known are .*glm-5"):
        load_model("zzzzz")


@pytest.mark.parametrize("name", ["../errors", "", "/etc/passwd"])
def test_a_name_is_no_way_out_of_the_folder(name: str) -> None:
    with pytest.raises(PoolError, match="is described"):
        load_model(name)


def test_a_description_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    assert load_model(str(path)).name == "mine"
    toml = tmp_path / "mine.toml"
    toml.write_text(
        'model = "m"\nsummary = "s"\nlayers = 1\npage_tokens = 4\n'
        '[[pools]]\nname = "kv"'
    )
    assert load_model(str(toml)).pools == ({"name": "kv"},)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "cannot be parsed"),
        ("a.json", "[]", "does not hold a table"),
        ("a.toml", "x =", "cannot be parsed"),
        ("b.toml", None, "No such file"),
        ("c.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_description_is_refused(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(PoolError, match=message):
        load_model(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 2}, "unknown field 'layer'. Did you mean 'layers'"),
        ({"model": None}, "field 'model' is missing"),
        ({"layers": 0}, "layers is at least 1 and at most"),
        ({"layers": 10**10}, "layers is at least 1 and at most"),
        ({"layers": 8.0}, "layers is a whole number, not 8.0"),
        ({"page_tokens": True}, "page_tokens is a whole number, not True"),
        ({"pools": []}, "pools is a list of tables"),
        ({"pools": ["kv"]}, "pools is a list of tables"),
        ({"drafts": []}, "drafts is not a table"),
        ({"drafts": {"mtp": 1}}, "draft 'mtp' is not a table"),
        ({"drafts": {"mtp": {"layers": 1}}}, "draft 'mtp': field 'summary' is missing"),
    ],
)
def test_a_wrong_outer_form_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    data = {key: value for key, value in (GOOD | changes).items() if value is not None}
    with pytest.raises(PoolError, match=message):
        parse_description("mine", data)
