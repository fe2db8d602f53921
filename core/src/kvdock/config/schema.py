"""What a settings class says of itself, and why it refuses what it is given.

A message names the setting, with dots, and the source that it comes from; it
never shows the value of a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import attrs

from kvdock.config.convert import converter
from kvdock.config.fields import Alias, ForeignFile
from kvdock.errors import SettingsError, did_you_mean

T = TypeVar("T")
NOTHING_GIVEN: Mapping[str, str] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class NoSettings:
    """The settings of what has none."""


HIDDEN = "<hidden>"
"""What is shown of a secret."""
_LONG = 16
"""Characters of a secret that is part of no word by chance."""


CORE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "plugin": "The plugin of which this is a named instance.",
        "wrap": "Wrappers around its stores, the innermost first.",
    }
)
"""Words among the settings of a backend that are the core's, with their help."""


def own_settings(given: Mapping[str, object]) -> Mapping[str, object]:
    """Return what is left for the plugin of all that is given for a backend."""
    return {key: one for key, one in given.items() if key not in CORE_WORDS}


def check_known(
    cls: type,
    given: Mapping[str, object],
    *,
    where: str,
    origins: Mapping[str, str] = NOTHING_GIVEN,
    path: str = "",
) -> None:
    """Refuse settings that a class, or a group in it, does not know.

    Raises:
        SettingsError: On an unknown key, with the right or the nearest one.
    """
    fields = fields_of(cls)
    for key, value in given.items():
        name = f"{path}{key}"
        if key not in fields:
            what = f"{where}: unknown setting {name!r}{origin_suffix(origins, name)}"
            raise SettingsError(what, fix=_right_name(key, fields))
        if group := group_of(fields[key]):
            if not isinstance(value, Mapping):
                found_in = origin_suffix(origins, name)
                raise SettingsError(
                    f"{where}: {name!r} is a group of settings{found_in}"
                )
            check_known(group, value, where=where, origins=origins, path=f"{name}.")


def check_complete(
    cls: type, given: Mapping[str, object], *, where: str, path: str = ""
) -> None:
    """Refuse settings that lack one without a default."""
    for name, field in fields_of(cls).items():
        if name in given and (group := group_of(field)):
            below = cast("Mapping[str, object]", given[name])
            check_complete(group, below, where=where, path=f"{path}{name}.")
        elif name not in given and field.default is attrs.NOTHING:
            raise SettingsError(f"{where}: setting {f'{path}{name}'!r} is missing")


def fields_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of a settings class by name, their types resolved."""
    attrs.resolve_types(cls)
    return {field.name: field for field in attrs.fields(cls)}


def alias_of(field: attrs.Attribute[Any]) -> Alias:
    """Return what others call a setting."""
    found: Alias = field.metadata.get("alias") or Alias()
    return found


def origin_suffix(origins: Mapping[str, str], name: str) -> str:
    """Say in brackets where a setting, or what lies below it, comes from."""
    found_in = {
        origin
        for path, origin in origins.items()
        if path == name or path.startswith(f"{name}.")
    }
    return f" ({', '.join(sorted(found_in))})" if found_in else ""


def group_of(field: attrs.Attribute[Any]) -> type | None:
    """Return the class of a setting that is a group of settings."""
    kind = field.type
    return kind if isinstance(kind, type) and attrs.has(kind) else None


def _right_name(key: str, fields: Mapping[str, attrs.Attribute[Any]]) -> str:
    """Say what a setting is called here, as well as that can be known."""
    for name, field in fields.items():
        if key in alias_of(field).names:
            return f"Here it is {name!r}: {field.metadata.get('help', '')}"
    return (
        did_you_mean(key, fields) or f"Known settings: {', '.join(fields) or 'none'}."
    )


def explain_error(
    cls: type,
    given: Mapping[str, object],
    where: str,
    origins: Mapping[str, str],
    error: Exception,
) -> SettingsError:
    """Say what is wrong, with which setting, and where that comes from."""
    reasons = tuple(_leaves(error))
    texts = [str(reason) for reason in reasons]
    found = [
        (name, field, reason)
        for name, field, value in _walked(cls, given)
        if (reason := _field_error(field, value)) and str(reason) in texts
    ]
    if not found:
        # The settings do not fit together.
        what = "; ".join(_words(reason)[0] for reason in reasons)
        what = hide_secrets(what, [*secret_values(cls, given)])
        return SettingsError(f"{where}: {what}", fix=_words(reasons[0])[1])
    said = []
    for name, field, reason in found:
        what, _ = _words(reason)
        hidden = f"{HIDDEN} is not what it takes"
        what = f": {hidden if _hides(field, reason) else what}"
        # Some reasons begin with the name as the class has it.
        what = re.sub(f"^: {field.name}(?![.])", "", what)
        said.append(f"{name}{origin_suffix(origins, name)}{what}")
    _, field, reason = found[0]
    fix = "" if _hides(field, reason) else _words(reason)[1]
    return SettingsError(f"{where}: {'; '.join(said)}", fix=fix)


def _hides(field: attrs.Attribute[Any], reason: BaseException) -> bool:
    """Return whether what is wrong with a setting may show a secret."""
    explains = isinstance(reason, SettingsError) and field.metadata.get("explains")
    return is_secret(field) and not explains


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what cattrs has gathered in groups."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def _walked(
    cls: type, given: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, attrs.Attribute[Any], object]]:
    """Yield the settings that are given: name with dots, field, value."""
    for name, field in fields_of(cls).items():
        if name in given and (group := group_of(field)):
            below = cast("Mapping[str, object]", given[name])
            yield from _walked(group, below, f"{path}{name}.")
        elif name in given:
            yield f"{path}{name}", field, given[name]


def check_values(
    cls: type,
    given: Mapping[str, object],
    *,
    where: str,
    origins: Mapping[str, str] = NOTHING_GIVEN,
) -> None:
    """Reject values that a class does not take, also where others are missing.

    Raises:
        SettingsError: Naming every setting with such a value.
    """
    wrong = [
        reason
        for _, field, value in _walked(cls, given)
        if (reason := _field_error(field, value))
    ]
    if wrong:
        error = explain_error(cls, given, where, origins, ExceptionGroup(where, wrong))
        raise error from (None if any(secret_values(cls, given)) else wrong[0])


def read_value(field: attrs.Attribute[Any], value: object) -> object:
    """Return the value of a setting as its class has it.

    Raises:
        Exception: Whatever the schema raises on a value that it does not take.
    """
    change: Any = field.converter
    if isinstance(change, attrs.Converter):
        value = cast("Any", change)(value, None, field)
    elif change:
        value = change(value)
    else:
        value = converter().structure(value, cast("type", field.type))
    if field.validator:
        field.validator(None, field, value)
    return value


def _field_error(field: attrs.Attribute[Any], value: object) -> Exception | None:
    """Return why a setting does not take a value, whatever the others are."""
    try:
        read_value(field, value)
    except Exception as error:  # noqa: BLE001 - whatever a schema raises
        return next(one for one in _leaves(error) if isinstance(one, Exception))
    return None


def _words(reason: BaseException) -> tuple[str, str]:
    if isinstance(reason, SettingsError):
        return reason.what, reason.fix
    if isinstance(reason, ValueError):
        return str(reason).rstrip("."), ""
    return f"{type(reason).__name__}: {reason}".rstrip("."), ""


def is_secret(field: attrs.Attribute[Any]) -> bool:
    """Return whether the value of a setting is never shown."""
    return bool(field.metadata.get("secret"))


def hide_secrets(text: str, secrets: Collection[str]) -> str:
    """Return a text without secrets.

    All of it goes if a short one is there: it may be part of another word, and the gaps
    would show which part.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if secret and secret in text:
            if len(secret) < _LONG:
                return HIDDEN
            text = text.replace(secret, HIDDEN)
    return text


def secret_values(cls: type, given: Mapping[str, object]) -> Iterator[str]:
    """Yield the secrets among settings, as text."""
    for _, field, value in _walked(cls, given):
        if is_secret(field) and value:
            yield str(value)


def structure(
    cls: type[T],
    given: Mapping[str, object],
    *,
    where: str,
    origins: Mapping[str, str] = NOTHING_GIVEN,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build a settings class from a mapping.

    What is not given is taken from the files and variables of others that the
    class names, and then from its defaults.

    Args:
        cls: An attrs class.
        given: Setting names and values; text is read as what is wanted.
        where: Whose settings these are, for messages.
        origins: Setting, with dots, to where it comes from, for messages.
        environ: Where the variables of others are read, and names of files.

    Raises:
        SettingsError: On an unknown key (with the right one, or the nearest),
            a missing one, or a value of the wrong kind.
    """
    environ = os.environ if environ is None else environ
    check_known(cls, given, where=where, origins=origins)
    full, more = with_fallbacks(cls, given, environ)
    check_complete(cls, full, where=where)
    try:
        return converter().structure(full, cls)
    except Exception as error:  # noqa: BLE001 - whatever a schema raises
        wrong = explain_error(cls, full, where, {**origins, **more}, error)
        # The cause would show what is secret in a traceback.
        raise wrong from (None if any(secret_values(cls, full)) else error)


def with_fallbacks(
    cls: type, given: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> tuple[dict[str, object], dict[str, str]]:
    """Take what is not given from the files and the variables of others.

    A file goes before a variable, as it does for the engines that read both.

    Returns:
        All that is known of the settings, and where each comes from that was
        not given, by name with dots.
    """
    environ = os.environ if environ is None else environ
    full, origins = dict(given), dict[str, str]()
    filed = _in_files(cls, environ)
    for name, field in fields_of(cls).items():
        below = given.get(name, {})
        if (group := group_of(field)) and isinstance(below, Mapping):
            more, found_in = with_fallbacks(group, below, environ)
            if found_in:
                full[name] = more
                origins |= {f"{name}.{one}": of for one, of in found_in.items()}
            continue
        other = alias_of(field)
        if name in given:
            continue
        if name in filed:
            full[name], origins[name] = filed[name]
        elif text := environ.get(other.env):
            origins[name] = f"environment {other.env}"
            try:
                full[name] = other.parse(text)
            except SettingsError as error:
                what = f"{name} ({origins[name]}): {error.what}"
                raise SettingsError(what, fix=error.fix) from None
    return full, origins


def _in_files(cls: type, environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Return what the files of others set: the value and its origin by name."""
    files: tuple[ForeignFile, ...] = getattr(cls, "foreign_files", ())
    found: dict[str, tuple[object, str]] = {}
    for file in files:
        path = environ.get(file.variable)
        if not path:
            continue
        origin = f"file {path}, named by {file.variable}"
        try:
            values = file.read(_content(Path(path)))
        except (OSError, ValueError, RecursionError, SettingsError) as error:
            what = error.what if isinstance(error, SettingsError) else str(error)
            raise SettingsError(
                f"{origin}, cannot be read: {what}",
                fix=f"Correct the file, or unset {file.variable}.",
            ) from error
        found |= {name: (value, origin) for name, value in values.items()}
    return found


def _content(path: Path) -> Mapping[str, object]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise SettingsError(f"it holds no settings but a {type(found).__name__}")
    return found
