from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdock.errors import PoolError
from kvdock.models.description import load_model, parse_description, shipped_models

GOOD: dict[str, Any] = {
    "model": "org/Model",
    "summary": "one pool",
    "layers": 2,
    "page_tokens": 16,
    "pools": [{"family": "mla", "name": "kv"}],
}


@pytest.mark.parametrize("name", shipped_models())
def test_a_shipped_description_says_where_its_dimensions_come_from(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert "config.json" in model.source
    assert str(model.layers) in model.source
    assert model.summary


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


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"model = '\xff\xfe'")
    with pytest.raises(PoolError, match="byte 9 is not UTF-8"):
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
