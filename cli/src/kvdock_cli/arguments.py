"""Arguments of the command line as settings and as pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock import RouteRequirements
from kvdock.config import load_configuration, structure
from kvdock.errors import PoolError, SettingsError
from kvdock.models import (
    ModelDescription,
    load_model,
    parse_description,
    shipped_models,
)
from kvdock_cli.output import UsageProblem

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock import Backend

_LONGEST_S = 1_000_000


def settings_of(
    pairs: Iterable[str], option: str = "--set", form: str = "KEY=VALUE"
) -> dict[str, str]:
    """Read what is given as KEY=VALUE, or as what a form says."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageProblem(
                f"{option} {pair!r} is not {form}",
                fix=f"Write {option} {form}.",
            )
        if key in found:
            raise UsageProblem(f"{option} {key} is given twice")
        found[key] = value
    return found


def text_of(path: Path) -> str:
    """Return the text of a file that was named.

    Raises:
        UsageProblem: If it has none.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageProblem(f"{path} cannot be read: {why}") from error


def hashes_of(path: Path | None) -> tuple[str, ...]:
    """Return the keys, or page hashes, of a file, if one is named.

    Raises:
        UsageProblem: If it has none: all pages would be meant.
    """
    lines = tuple(text_of(path).split()) if path else ()
    if path and not lines:
        raise UsageProblem(f"{path} has no page hashes", fix="Write one a line.")
    return lines


def patience(timeout_s: float, option: str = "--timeout") -> float:
    """Return how long to wait, if that is a time."""
    if 0 < timeout_s <= _LONGEST_S:
        return timeout_s
    raise UsageProblem(
        f"{option} {timeout_s:g} is not a time to wait",
        fix=f"Give seconds, more than 0 and at most {_LONGEST_S}.",
    )


def backend_settings(name: str, pairs: Iterable[str]) -> Mapping[str, object]:
    """Return all that is said about a backend, `--set` over the other sources."""
    given = {"backends": {name: settings_of(pairs)}}
    return load_configuration(given).backends[name]


def typed_settings(
    backend: Backend, given: Mapping[str, object], command: str
) -> object:
    """Return a backend's settings; say what to type where some are missing."""
    try:
        return backend.settings(given)
    except SettingsError as error:
        fix = (
            f"Write `kvdock {command} {backend.name} --set KEY=VALUE`; `kvdock list "
            f"{backend.name}` lists its settings."
        )
        raise SettingsError(error.what, fix=error.fix or fix) from error


def needs_of(words: Iterable[str]) -> RouteRequirements:
    """Read what a deployment needs, as FIELD=VALUE or FIELD."""
    needs = settings_of(map(_assigned, words), "--need")
    return structure(RouteRequirements, needs, where="--need")


def model_of(name: str, pools: Sequence[str], layers: int) -> ModelDescription:
    """Return the model that is named, the one that pools describe, or both.

    Args:
        name: A shipped description, a file, or "".
        pools: Pools in words, added to those of the model.
        layers: Layers of a model that is not named.

    Raises:
        UsageProblem: If neither is given, or one cannot be read.
    """
    tables = [_table(text) for text in pools]
    try:
        if name:
            model = load_model(name)
            return attrs.evolve(model, pools=(*model.pools, *tables))
        if tables and not any(table.get("anchor") for table in tables):
            # The first one is what is nearly always meant.
            tables[0]["anchor"] = True
        if tables:
            about = {"model": "--pool", "summary": "", "page_tokens": 64}
            return parse_description(
                "--pool", about | {"layers": layers, "pools": tables}
            )
    except PoolError as error:
        raise UsageProblem(error.what, fix=error.fix) from error
    raise UsageProblem(
        "no pools are given",
        fix="Give --pool, or --model with a file or one of "
        f"{', '.join(shipped_models())}.",
    )


def _table(text: str) -> dict[str, object]:
    """Read `family=mha,name=kv,heads=8`; a word without a value is true."""
    words = filter(None, (word.strip() for word in text.split(",")))
    pairs = settings_of(map(_assigned, words), f"--pool {text}:")
    return {
        # A number of a layer, not of layers; commas part the fields.
        key: value.replace("+", ",") if key == "layers" else _value(value)
        for key, value in pairs.items()
    }


def _assigned(word: str) -> str:
    """Return FIELD=VALUE; a field alone is true."""
    return word if "=" in word else f"{word}=true"


def _value(text: str) -> object:
    """Read a whole number, a shape such as 16x64, true, false, or a word."""
    if text in ("true", "false"):
        return text == "true"
    if text.removeprefix("-").isdecimal():
        return int(text)
    shapes = [shape.split("x") for shape in text.split("+")]
    if "x" in text and all(word.isdecimal() for shape in shapes for word in shape):
        numbers = [[int(word) for word in shape] for shape in shapes]
        return numbers if "+" in text else numbers[0]
    return text
