"""Descriptions of models: which pools a model has, as a data file says it.

A description names dimensions, not bytes: `kvdock.pools.factories` turns them into
pools. The ones that are shipped lie in the folder `descriptions`, one TOML
file for each model, and are read when they are asked for.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import attrs

from kvdock.errors import KvdockError, PoolError, did_you_mean
from kvdock.strict_enum import StrictEnum
from kvdock.validators import is_int

Table = Mapping[str, object]


MAX_LAYERS = 1 << 16
"""A model of more is a slip of the keyboard."""


MAX_PAGE_TOKENS = 1 << 24
"""As much as the longest contexts there are."""


_FOLDER = "models/descriptions"


_SHAPES = Sequence[Sequence[int]]


_PLAIN: Mapping[Any, tuple[Callable[[object], bool], str]] = MappingProxyType(
    {
        bool: (lambda value: isinstance(value, bool), "true or false"),
        int: (is_int, "a whole number"),
        str: (lambda value: isinstance(value, str), "text"),
        str | None: (lambda value: isinstance(value, str), "text"),
    }
)


@attrs.frozen
class _Parameter:
    """What a constructor takes: field to type, and what it cannot do without."""

    types: Mapping[str, Any]
    required: frozenset[str]


def bind_arguments(
    where: str,
    constructor: Callable[..., object],
    given: Mapping[str, object],
    *,
    besides: Collection[str],
) -> dict[str, Any]:
    """Read a table as keywords of a constructor.

    The constructor has keywords and types, the last of them perhaps an unpacked
    `TypedDict`. The arguments in `besides` come from elsewhere.
    """
    wanted = _parameters(constructor)
    known = [name for name in wanted.types if name not in besides]
    for name in given:
        if name not in known:
            raise PoolError(
                f"{where}: unknown field {name!r}",
                fix=did_you_mean(name, known) or f"Known are {', '.join(known)}.",
            )
    for name in known:
        if name in wanted.required and name not in given:
            raise PoolError(f"{where}: field {name!r} is missing")
    return {
        name: _read(f"{where}: {name}", value, wanted.types[name])
        for name, value in given.items()
    }


def _parameters(constructor: Callable[..., object]) -> _Parameter:
    hints = get_type_hints(constructor)
    types: dict[str, Any] = {}
    required: set[str] = set()
    for name, one in inspect.signature(constructor).parameters.items():
        if one.kind is one.VAR_KEYWORD:
            (options,) = get_args(hints[name])
            types |= get_type_hints(options)
            required |= options.__required_keys__
        else:
            types[name] = hints[name]
            if one.default is one.empty:
                required.add(name)
    return _Parameter(types, frozenset(required))


def _read(where: str, value: object, wanted: Any) -> object:  # noqa: ANN401 - any annotation
    if inspect.isclass(wanted) and issubclass(wanted, StrictEnum):
        try:
            return wanted(value)  # type: ignore[arg-type]  # a word refuses what is none
        except KvdockError as error:
            raise PoolError(f"{where}: {error.what}", fix=error.fix) from error
    for kind, (fits, what) in _PLAIN.items():
        if wanted == kind:
            if not fits(value):
                raise PoolError(f"{where} is {what}, not {value!r}")
            return value
    return _shapes(where, value) if wanted == _SHAPES else _shape(where, value)


def _shape(where: str, value: object) -> tuple[int, ...]:
    """Read a shape; one number is a shape of one axis."""
    extents = value if isinstance(value, list | tuple) else [value]
    if not all(map(is_int, extents)):
        raise PoolError(f"{where} is a shape of whole numbers, not {value!r}")
    return tuple(extents)


def _shapes(where: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Read a list of shapes; one shape is a list of one."""
    if isinstance(value, list | tuple) and not any(map(is_int, value)):
        return tuple(_shape(where, one) for one in value)
    return (_shape(where, value),)


@attrs.frozen
class DraftDescription:
    """A draft model that goes with a target.

    Args:
        layers: How many layers it has; numbered after the target's.
        source: Where its dimensions come from, if not from the target's file.
    """

    summary: str
    layers: int
    pools: tuple[Table, ...]
    source: str = ""


@attrs.frozen
class ModelDescription:
    """A model as far as its cached state goes.

    Args:
        name: What it is called here.
        model: The model's public name.
        summary: Which kinds of state it has, in one line.
        layers: Layers of the target.
        page_tokens: Tokens of a page that its engines use by default.
        pools: One table for each pool, anchor first.
        drafts: Draft models by name.
        source: Where the dimensions come from.
    """

    name: str
    model: str
    summary: str
    layers: int
    page_tokens: int
    pools: tuple[Table, ...]
    drafts: Mapping[str, DraftDescription]
    source: str = ""


def shipped_models() -> tuple[str, ...]:
    """Return the names of the descriptions that kvdock brings."""
    folder = resources.files("kvdock").joinpath(_FOLDER)
    names = (Path(entry.name) for entry in folder.iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".toml"))


def load_model(name: str) -> ModelDescription:
    """Read a description: a shipped one by name, or a TOML or JSON file.

    Raises:
        PoolError: If there is none, or it is not a description.
    """
    path = Path(name)
    if path.suffix in (".toml", ".json"):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PoolError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PoolError(
                f"cannot read {path}: byte {error.start} is not UTF-8"
            ) from error
        return parse_description(path.stem, _parsed(path.name, text))
    known = shipped_models()
    if name not in known:
        raise PoolError(
            f"no model {name!r} is described",
            fix=did_you_mean(name, known)
            or f"Known are {', '.join(known)}; or pass a .toml or .json file.",
        )
    entry = resources.files("kvdock").joinpath(_FOLDER, f"{name}.toml")
    return parse_description(name, _parsed(name, entry.read_text(encoding="utf-8")))


def _parsed(name: str, text: str) -> Table:
    try:
        found = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except ValueError as error:
        raise PoolError(f"{name} cannot be parsed: {error}") from error
    except RecursionError as error:
        raise PoolError(f"{name} cannot be parsed: it is nested too deeply") from error
    if not isinstance(found, dict):
        raise PoolError(f"{name} does not hold a table")
    return found


def parse_description(name: str, data: Table) -> ModelDescription:
    """Check the outer form of a description.

    Raises:
        PoolError: If a field is missing, unknown or of the wrong kind.
    """
    where = f"model {name!r}"
    drafts = data.get("drafts", {})
    if not isinstance(drafts, Mapping):
        raise PoolError(f"{where}: drafts is not a table of drafts")
    return ModelDescription(
        name=name,
        drafts={
            draft: _parse_draft(f"{where}: draft {draft!r}", table)
            for draft, table in drafts.items()
        },
        **_fields(where, ModelDescription, data, ("name", "drafts")),
    )


def _parse_draft(where: str, data: object) -> DraftDescription:
    if not isinstance(data, Mapping):
        raise PoolError(f"{where} is not a table")
    return DraftDescription(**_fields(where, DraftDescription, data))


def _fields(
    where: str, kind: type, data: Table, besides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read the fields of a description, its pools as they are."""
    apart = ("pools", *besides)
    found = bind_arguments(
        where,
        kind,
        {name: one for name, one in data.items() if name not in apart},
        besides=apart,
    )
    for field, most in (("layers", MAX_LAYERS), ("page_tokens", MAX_PAGE_TOKENS)):
        if not 1 <= found.get(field, 1) <= most:
            raise PoolError(f"{where}: {field} is at least 1 and at most {most}")
    pools = data.get("pools")
    if (
        not isinstance(pools, list)
        or not pools
        or not all(isinstance(one, Mapping) for one in pools)
    ):
        raise PoolError(f"{where}: pools is a list of tables, one for each pool")
    return found | {"pools": tuple(pools)}
