"""What an engine's configuration and a model's files contribute to a namespace.

A list of fields that matter always lacks one, and that one mixes the pages of two
engines. So everything in a configuration counts, except what an engine's adapter
lists as harmless, each with its reason; a list of these that lacks one only misses.
Files count by their content, never by their name or place.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import attrs

from kvdock.errors import NamespaceError
from kvdock.strict_enum import StrictEnum


@attrs.frozen
class Exemption:
    """A field of a configuration that does not change the bytes of a page.

    Args:
        field: Its dotted name; `group.*` for everything below a group.
        reason: Why, with the place in the engine's source that shows it.
        holds: Whether the exemption holds for a configuration; None for any.
    """

    field: str
    reason: str
    holds: Callable[[object], bool] | None = None

    def covers(self, name: str) -> bool:
        """Return whether a dotted name is this field, or lies below this group."""
        if self.field.endswith(".*"):
            return f"{name}.".startswith(self.field[:-1])
        return name == self.field


def read_exemptions(
    tables: Iterable[Mapping[str, str]],
    group: str = "",
    conditions: Mapping[str, Callable[[object], bool]] = MappingProxyType({}),
) -> tuple[Exemption, ...]:
    """Return the exemptions that tables of a TOML file list.

    >>> read_exemptions([{"fields": "a b", "group": "g", "reason": "why"}])[1].field
    'g.b'

    Args:
        tables: Each has a `reason` and `fields`, with spaces between their names;
            perhaps the `group` that the fields lie in, and `when`, a condition.
        group: A group around all of them.
        conditions: The conditions by name.
    """
    return tuple(
        Exemption(
            ".".join(filter(None, (group, table.get("group"), field))),
            " ".join(table["reason"].split()),
            conditions[table["when"]] if "when" in table else None,
        )
        for table in tables
        for field in table["fields"].split()
    )


def identity_fields(
    config: object, exemptions: Iterable[Exemption]
) -> dict[str, object]:
    """Return everything in a configuration that is not exempt, as plain data.

    Args:
        config: A record (attrs, dataclass) or any object with attributes. Those that
            begin with an underscore are the object's own.
        exemptions: What does not count. Those whose condition fails do count.

    Returns:
        Dotted name to value; JSON has all of them.

    Raises:
        NamespaceError: If two processes would describe a value differently.
    """
    exempt = [one for one in exemptions if one.holds is None or one.holds(config)]
    found: dict[str, object] = {}

    def visit(name: str, value: object, above: tuple[int, ...]) -> None:
        if any(one.covers(name) for one in exempt):
            return
        below = _fields(value)
        if below is None:
            found[name] = canonical_value(value, where=name)
            return
        if id(value) in above:
            return
        if name:
            found[name] = type(value).__name__
        for field, one in below.items():
            visit(f"{name}.{field}" if name else field, one, (*above, id(value)))

    visit("", config, ())
    return found


def canonical_value(value: object, *, where: str) -> object:
    """Return a value as JSON has it: the same in every process, or an error.

    >>> canonical_value({"b": {2, 1}, "a": (1, None)}, where="it")
    {'a': [1, None], 'b': [1, 2]}

    Args:
        value: Plain data, records, or what `str` describes without an address.
        where: The field's name, for messages.

    Raises:
        NamespaceError: If two processes would describe it differently.
    """
    return _canonical(value, where, ())


def _canonical(value: object, where: str, above: tuple[int, ...]) -> object:
    plain = _plain(value)
    if plain is not value:
        return _canonical(plain, where, above)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above:
        raise _unreadable(value, where)
    above = (*above, id(value))
    if isinstance(value, Mapping):
        named = {str(key): one for key, one in value.items()}
        return {
            key: _canonical(named[key], f"{where}.{key}", above)
            for key in sorted(named)
        }
    if isinstance(value, AbstractSet | Sequence):
        members = [_canonical(one, where, above) for one in value]
        in_order = isinstance(value, Sequence)
        return members if in_order else sorted(members, key=repr)
    below = _fields(value)
    if below is not None:
        described = _canonical(below, where, above)
        return {"class": type(value).__qualname__, "fields": described}
    return _named(value, where)


def _plain(value: object) -> object:
    """Return what a value stands for; itself where it is plain or has parts."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _named(value: object, where: str) -> str:
    """Describe a class, a function or an engine's own kind of constant by its name."""
    name = str(value)
    if callable(value):
        module = getattr(value, "__module__", None)
        name = f"{module}.{getattr(value, '__qualname__', '<>')}"
    # An address, or a function without a name of its own.
    if re.search(r"\bat 0x|<", name):
        raise _unreadable(value, where)
    return name


def _unreadable(value: object, where: str) -> NamespaceError:
    return NamespaceError(
        f"{where} is a {type(value).__qualname__}, and nothing says whether another "
        "process has the same",
        fix="Give it as plain data, or report this configuration to kvdock.",
    )


def _fields(value: object) -> Mapping[str, object] | None:
    """Return the fields of a record; None for plain data."""
    if isinstance(value, str | Mapping | Sequence | AbstractSet | enum.Enum | type):
        return None
    if callable(value) or isinstance(value, os.PathLike):
        return None
    own = getattr(value, "__dict__", None)
    if own is None and attrs.has(type(value)):
        names = [one.name for one in getattr(type(value), "__attrs_attrs__", ())]
        own = {name: getattr(value, name) for name in names}
    if own is None:
        return None
    return {name: one for name, one in own.items() if not name.startswith("_")}


class WeightsBy(StrictEnum):
    """How much of a file of weights is read to know it."""

    WHOLE = "whole"
    """All of it: the same wherever the file was copied to."""
    HEADERS = "headers"
    """Header, size and time of a safetensors file. A copy has another time, unless it
    was made to keep it, and a file that was replaced under its old header, size and
    time is not noticed. Files of other formats, and those whose times have no fraction
    of a second (image builders and archives set such times), are read whole."""


_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_TEXTS = frozenset({".json", ".py", ".jinja"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PROVIDE = 'Provide "revision" in the settings, and change it with the weights.'
_THREADS = 4
_SECOND_NS = 10**9


Ignored = Callable[[str], bool]
"""Whether no page depends on a file of this name."""


def _counts_all(_: str) -> bool:
    return False


def model_identity(
    model: str,
    *,
    revision: str = "",
    commit: str = "",
    weights: WeightsBy = WeightsBy.WHOLE,
    ignored: Ignored = _counts_all,
) -> str:
    """Return what stands for the files of a model.

    A snapshot in the hub's cache is its commit, and the content of those files that
    are not the ones that the hub delivered.

    Args:
        model: Path of a folder or a file, or a name of a hub.
        revision: The hub's revision that the operator asked for.
        commit: The hub's commit that was loaded, where the engine knows it.
        weights: How much of the weights is read.
        ignored: Which files do not count.

    Raises:
        NamespaceError: If nothing says which weights these are.
    """
    path = Path(model)
    if path.exists():
        snapshot = path.resolve()
        if snapshot.parent.name == "snapshots" and _COMMIT.fullmatch(snapshot.name):
            files = identity_files(path, ignored)
            changed = [one for one in files if not _is_delivered(one)]
            own = f" with {_digest(changed, path, weights)}" if changed else ""
            return f"commit:{snapshot.name}{own}"
        return f"files:{files_digest(path, weights=weights, ignored=ignored)}"
    if commit or _COMMIT.fullmatch(revision):
        return f"commit:{commit or revision}"
    raise NamespaceError(f"nothing says which weights {model!r} are", fix=_PROVIDE)


def locate_model(
    name: str, *, revision: str = "", cache: str = "", file: str = "config.json"
) -> Path | None:
    """Return where the files of a model or an adapter lie; None if not on this host.

    Args:
        name: A path, or a name whose files are in the hub's cache.
        revision: The hub's revision or commit; "" for its main one.
        cache: The folder of the cache; "" for the user's.
        file: A file that the cached folder has.
    """
    if (path := Path(name)).exists():
        return path
    try:
        hub = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(
            name, file, cache_dir=cache or None, revision=revision or None
        )
    except (ImportError, ValueError):  # not the hub's, or no name of it
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_in(name: str, weights: WeightsBy) -> str:
    """Return what stands for weights that an engine has loaded from files.

    That is their name alone where they are not on this host.

    Raises:
        NamespaceError: If they cannot be read.
    """
    place = locate_model(name)
    return model_identity(str(place), weights=weights) if place else name


def files_digest(
    path: Path,
    *,
    weights: WeightsBy = WeightsBy.WHOLE,
    ignored: Ignored = _counts_all,
) -> str:
    """Return a digest of what a model's, or an adapter's, files hold, in hex.

    Raises:
        NamespaceError: If there is no file of weights, or one cannot be read.
    """
    files = identity_files(path, ignored)
    if not any(file.suffix in _WEIGHTS for file in files):
        raise NamespaceError(f"{str(path)!r} has no files of weights", fix=_PROVIDE)
    return _digest(files, path, weights)


def texts_digest(path: Path, *, ignored: Ignored = _counts_all) -> str:
    """Return a digest of the small files of a folder, without its weights, in hex."""
    files = [one for one in identity_files(path, ignored) if one.suffix not in _WEIGHTS]
    return _digest(files, path, WeightsBy.WHOLE)


def folder_digest(path: Path) -> str:
    """Return a digest of every file below a folder, or of one file, in hex.

    What Python compiles is left out: it says nothing that its source does not.

    Raises:
        NamespaceError: If one cannot be read.
    """
    below = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [one for one in below if one.is_file() and one.parent.name != "__pycache__"]
    whole = hashlib.sha256()
    try:
        for file in files:
            name = file.relative_to(path).as_posix()
            whole.update(f"{name}\0{_content(file)}\0".encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise _cannot_read(path, error) from error
    return whole.hexdigest()


def code_elsewhere(auto_map: object, *, revision: str = "") -> dict[str, str]:
    """Return digests of code that a model's description takes from other models.

    A class `repository--module.Class` of its `auto_map`, of a revision of its own,
    changes without the model. What is not on this host was not loaded.
    """
    found: dict[str, str] = {}
    for names in auto_map.values() if isinstance(auto_map, Mapping) else ():
        for name in [names] if isinstance(names, str) else names:
            repository, elsewhere, _ = str(name).partition("--")
            if elsewhere and (place := locate_model(repository, revision=revision)):
                found[f"code of {repository}"] = texts_digest(place)
    return found


def identity_files(path: Path, ignored: Ignored = _counts_all) -> list[Path]:
    """Return the files of a folder that count: weights, and json, py and jinja.

    Raises:
        NamespaceError: If the folder cannot be read.
    """
    if path.is_file():
        return [path]
    try:
        files = sorted(filter(_counts, path.iterdir()))
    except OSError as error:
        raise _cannot_read(path, error) from error
    return [one for one in files if one.suffix in _WEIGHTS or not ignored(one.name)]


def _counts(file: Path) -> bool:
    return file.suffix in _WEIGHTS | _TEXTS and not file.is_dir()


def files_state(path: Path) -> tuple[tuple[object, ...], ...]:
    """Return what changes when one of the files does, without reading them.

    Raises:
        KvdockError: If the folder cannot be read.
        OSError: If a file cannot be looked at.
    """
    return tuple(_states(identity_files(path)))


def _states(files: Iterable[Path]) -> Iterator[tuple[object, ...]]:
    for file in files:
        seen = os.stat(file)  # noqa: PTH116 - per request: half the time of Path.stat
        # A write sets the last one, whatever time it gives the file.
        times = (seen.st_mtime_ns, seen.st_ctime_ns)
        yield (str(file), seen.st_size, seen.st_dev, seen.st_ino, *times)


def _digest(files: Sequence[Path], path: Path, weights: WeightsBy) -> str:
    def of(file: Path) -> str:
        if weights is WeightsBy.HEADERS and file.suffix == ".safetensors":
            return _by_header(file)
        return _content(file)

    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = list(threads.map(of, files))
    except OSError as error:
        raise _cannot_read(path, error) from error
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name}\0{digest}\0".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _cannot_read(path: Path, error: OSError) -> NamespaceError:
    return NamespaceError(
        f"{str(path)!r} cannot be read: {error.strerror}", fix=_PROVIDE
    )


def _content(file: Path) -> str:
    with file.open("rb") as data:
        if file.suffix == ".json":
            return hashlib.sha256(_as_json_says(data.read())).hexdigest()
        return hashlib.file_digest(data, "sha256").hexdigest()


def _as_json_says(data: bytes) -> bytes:
    """Return JSON as it is read, whatever its indent; the data where it is none.

    The order of members may count (patterns that name layers are tried in it), and
    readers differ in which of two members of one name they take.
    """
    try:
        said = json.loads(data, object_pairs_hook=lambda pairs: {"": pairs})
        return json.dumps(said).encode()
    except (ValueError, RecursionError):
        return data


def _by_header(file: Path) -> str:
    seen = file.stat()
    if seen.st_mtime_ns % _SECOND_NS == 0:
        return _content(file)
    with file.open("rb") as data:
        length = min(int.from_bytes(data.read(8), "little"), seen.st_size)
        header = hashlib.sha256(data.read(length)).hexdigest()
    return f"{header} {seen.st_size} {seen.st_mtime_ns}"


def _is_delivered(file: Path) -> bool:
    """Return whether a file of a snapshot is the one that its hub delivered.

    The hub's cache names content by SHA-256, or by git's own SHA-1 of small files.
    Weights are trusted by that name, as the commit is.
    """
    blob = file.resolve()
    if blob.parent.name != "blobs":
        return False
    if file.suffix in _WEIGHTS:
        return _SHA256.fullmatch(blob.name) is not None
    try:
        data = blob.read_bytes()
    except OSError as error:
        raise _cannot_read(file, error) from error
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return blob.name in (git.hexdigest(), hashlib.sha256(data).hexdigest())
