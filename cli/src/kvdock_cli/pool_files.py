"""Pools as people write them: in a TOML or JSON file, or as words of a flag.

Both spell the fields of `PoolSpec`, `Part` and `Shard`; nothing else.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvdock.errors import PoolError, nearest
from kvdock.pools import Part, Per, PoolKind, PoolSpec, Shard
from kvdock_cli.output import UsageProblem

_SHORT = ("heads", "dim", "dtype")
"""Words of a flag that stand for the parts of a plain attention pool."""

Table = Mapping[str, Any]


@attrs.frozen
class Description:
    """Pools of an engine, and the slice that one process holds."""

    pools: tuple[PoolSpec, ...]
    shard: Shard


def read(path: Path) -> Table:
    """Read a description file.

    Raises:
        UsageProblem: If it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageProblem(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UsageProblem(f"{path} holds no table of pools")
    return found


def describe(given: Table, *, where: str) -> Description:
    """Build pools and shard from plain values.

    Args:
        given: `pools`, a list of tables; `shard`, a table; `page_tokens`, for
            pools that do not say it themselves.
        where: What is being read, for messages.

    Raises:
        UsageProblem: On an unknown key, or a description that contradicts
            itself.
    """
    _known(given, ("pools", "shard", "page_tokens"), where)
    tables = given.get("pools")
    if not isinstance(tables, list | tuple) or not tables:
        raise UsageProblem(
            f"{where}: there are no pools", fix="Give --pool, or [[pools]] in a file."
        )
    common = {"page_tokens": given.get("page_tokens", 64)}
    tables = [common | _table(table, f"{where}: a pool") for table in tables]
    if not any(table.get("anchor") for table in tables):
        # The first pool is what nearly everybody means.
        tables[0]["anchor"] = True
    shard = _table(given.get("shard", {}), f"{where}: shard")
    _fields(shard, Shard, f"{where}: shard")
    if isinstance(shard.get("layers"), list):
        shard["layers"] = tuple(shard["layers"])
    try:
        pools = tuple(_pool(table, where) for table in tables)
        return Description(pools, Shard(**shard))
    except PoolError as error:
        raise UsageProblem(f"{where}: {error.what}", fix=error.fix) from error
    except (TypeError, ValueError) as error:
        raise UsageProblem(f"{where}: {error}") from error


def _table(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageProblem(f"{where} is a table of keys, not {given!r}")
    return dict(given)


def _known(table: Table, known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UsageProblem(
                f"{where}: unknown key {key!r}",
                fix=nearest(key, known) or f"Known keys: {', '.join(known)}.",
            )


def _fields(table: Table, cls: type[attrs.AttrsInstance], where: str) -> None:
    """Hold a table against the fields of a record."""
    fields = attrs.fields_dict(cls)
    _known(table, fields, where)
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in table:
            raise UsageProblem(f"{where}: key {name!r} is missing")


def _pool(table: Table, where: str) -> PoolSpec:
    fields = dict(table)
    where = f"{where}: pool {fields.get('name', '?')!r}"
    fields.setdefault("parts", ())
    _fields(fields, PoolSpec, where)
    if isinstance(fields.get("layers"), int):
        fields["layers"] = range(fields["layers"])
    parts = [_table(part, f"{where}: a part") for part in fields["parts"]]
    for part in parts:
        _fields(part, Part, f"{where}: part")
    fields["parts"] = [Part(**part) for part in parts]
    return PoolSpec(**fields)


def from_words(text: str) -> dict[str, Any]:
    """Read a pool from a flag: `name=kv,kind=mha,layers=32,heads=8,dim=128`.

    `heads`, `dim` and `dtype` (bf16 unless said) stand for the parts of MHA,
    SWA, K-only, MLA and indexer pools; any other pool spells its `parts`:
    `NAME:DTYPE:SHAPE[@AXIS][/page]`, joined by `+`, a shape like `8x128` and
    the axis that ranks divide, such as `temporal:f32:16x64x64@0/page`.

    Raises:
        UsageProblem: If it cannot be read.
    """
    table: dict[str, Any] = {}
    try:
        for word in filter(None, text.split(",")):
            key, equals, value = word.strip().partition("=")
            table[key] = _value(key, value) if equals else True
        short = {key: table.pop(key) for key in _SHORT if key in table}
        if "parts" in table:
            table["parts"] = [_part(one) for one in str(table["parts"]).split("+")]
        elif short:
            table["parts"] = _attention(table.get("kind", ""), **short)
    except PoolError as error:
        raise UsageProblem(f"--pool {text}: {error.what}", fix=error.fix) from error
    except (TypeError, ValueError) as error:
        raise UsageProblem(
            f"--pool {text}: {error}", fix="See `kvdock route --help`."
        ) from error
    return table


def _value(key: str, value: str) -> Any:  # noqa: ANN401 - a number, a flag or a word
    if key == "layers" and "-" in value:
        first, _, last = value.partition("-")
        return list(range(int(first), int(last)))
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.isdecimal() else value


def _part(text: str) -> dict[str, Any]:
    text, slash, per = text.partition("/")
    name, _, rest = text.partition(":")
    dtype, _, shape = rest.partition(":")
    if not shape:
        raise ValueError(f"{text!r} is no part, write NAME:DTYPE:SHAPE")
    shape, at, axis = shape.partition("@")
    return {
        "name": name,
        "dtype": dtype,
        "shape": [int(extent) for extent in shape.split("x")],
        "shard_axis": int(axis) if at else None,
        "per": per if slash else Per.TOKEN.value,
    }


def _attention(
    kind: str, *, dim: int = 0, heads: int = 0, dtype: str = "bf16"
) -> list[dict[str, Any]]:
    """Spell the parts of a plain pool."""
    if not dim:
        raise ValueError("`dim` is missing")
    names = {
        PoolKind.MHA: ("k", "v"),
        PoolKind.SWA: ("k", "v"),
        PoolKind.K_ONLY: ("k",),
        PoolKind.MLA: ("kv",),
        PoolKind.INDEXER: ("indexer",),
    }.get(PoolKind(kind))
    if names is None:
        raise ValueError(f"a {kind} pool needs its parts spelt")
    shape = [heads, dim] if heads else [dim]
    axis = 0 if heads else None
    return [
        {"name": name, "dtype": dtype, "shape": shape, "shard_axis": axis}
        for name in names
    ]
