"""The reference of model descriptions against the code that reads them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvdock.models import Deployment, assemble, parse_description
from kvdock.pools import FAMILIES

PAGE = Path(__file__).parents[1] / "docs/reference/model-descriptions.md"


@pytest.mark.parametrize("packed", [False, True])
def test_the_example_can_be_assembled(packed: bool) -> None:  # noqa: FBT001 - a case
    found = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    model = parse_description("example", tomllib.loads(found[1]))
    pools = assemble(model, Deployment(tp_size=2, packed=packed), draft="mtp").pools
    names = [pool.name for pool in pools]
    assert names == (["kv", "mamba"] if packed else ["kv", "mamba", "draft"])


def test_every_family_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        "mha",
        "swa",
        "k_only",
        "mla",
        "indexer",
        "mamba",
        "compressed",
        "ring_state",
        "logical",
    ]
    assert set(rows) == set(FAMILIES)
