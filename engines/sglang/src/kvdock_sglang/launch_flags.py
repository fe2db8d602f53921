"""Read and write SGLang's launch flags for the storage tier."""

from __future__ import annotations

import importlib
import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.config import nest_settings
from kvdock.errors import SettingsError, did_you_mean
from kvdock_sglang.host_pools import LAYOUTS

EXTRA = "--hicache-storage-backend-extra-config"
PREFETCH = "--hicache-storage-prefetch-policy"
WAIT = "wait_complete"
BACKEND = "--hicache-storage-backend"
ENABLE = "--enable-hierarchical-cache"
LAYOUT = "--hicache-mem-layout"
PAGE = "--page-size"

LOADER_KEYS = {
    "backend_name": "kvdock",
    "module_path": "kvdock_sglang",
    "class_name": "KvdockStorage",
}
"""What SGLang's configuration needs to load kvdock's class."""

GROUPS = ("core", "routes", "backends", "observers")
"""Keys of the configuration that are groups of settings."""

_NEXT_COMMAND = ("|", "|&", "||", "&", "&&", ";")
"""Words at which a shell ends one command."""

ENGINE_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "prefetch_threshold": (int,),
        "prefetch_timeout_base": (int, float),
        "prefetch_timeout_per_ki_token": (int, float),
        "hicache_storage_pass_prefix_keys": (bool,),
        "tp_lcm_size": (int,),
    }
)
"""Keys that SGLang itself reads, and rejects if they are of another type."""


@attrs.frozen
class Flags:
    """The storage flags of a command line.

    Args:
        given: Flag to value; a switch has the value "".
    """

    command: str
    given: Mapping[str, str]

    @classmethod
    def of(cls, command: str) -> Flags:
        """Read a command line; only its flags matter.

        Raises:
            SettingsError: If a shell could not read it, or would go on to
                another command, which would get the flags that are added.
        """
        given: dict[str, str] = {}
        flag = ""
        try:
            words = shlex.split(command.replace("\\\n", " "))
        except ValueError as error:
            raise SettingsError(
                f"the command line cannot be read: {error}",
                fix="Close its quotes; in a shell, put all of it in double quotes.",
            ) from error
        if ends := [word for word in words if word in _NEXT_COMMAND]:
            raise SettingsError(
                f"the command line goes on after {ends[0]!r}",
                fix="Leave out what does not belong to SGLang's own command.",
            )
        for word in words:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                given[flag] = value
            elif flag and not given[flag]:
                given[flag] = word
        return cls(command.strip(), given)

    def problems(self) -> tuple[tuple[str, str], ...]:
        """Return what is missing or wrong, each with what to do."""
        found = []
        if ENABLE not in self.given:
            found.append(("the hierarchical cache is off", f"Add {ENABLE}."))
        if self.given.get(BACKEND) != "dynamic":
            said = self.given.get(BACKEND) or "nothing"
            found.append(
                (f"{BACKEND} says {said}", f"kvdock is loaded by {BACKEND} dynamic.")
            )
        if EXTRA not in self.given:
            found.append((f"{EXTRA} is missing", "It names the class and the plugin."))
        layout = self.given.get(LAYOUT)
        if layout is not None and layout not in LAYOUTS:
            hint = (
                did_you_mean(layout, LAYOUTS) or f"Known: {', '.join(sorted(LAYOUTS))}."
            )
            found.append((f"{LAYOUT} {layout} is not known to kvdock", hint))
        return tuple(found)

    def completed(self) -> str:
        """Return the command with what it lacks; the last of two flags counts."""
        wanted = {ENABLE: "", BACKEND: "dynamic", PREFETCH: WAIT}
        lacking = [
            f"{flag} {value}".rstrip()
            for flag, value in wanted.items()
            if flag not in self.given or (value and self.given[flag] != value)
        ]
        return _in_lines([self.command, *lacking])


def configuration(text: str) -> dict[str, object]:
    """Read an extra configuration, given as JSON or as @file."""
    read: Callable[[str], Any] = json.loads
    kind, hint = "JSON", "Quote it with single quotes in a shell."
    if text.startswith("@"):
        path = Path(text[1:])
        kind, read = _reader(path)
        hint = f"It is read from {path}."
        try:
            text = path.read_text()
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = read(text)
    except Exception as error:  # each reader has errors of its own
        raise SettingsError(
            f"the extra configuration is not {kind}: {error}", fix=hint
        ) from error
    if not isinstance(found, dict):
        raise SettingsError(f"the extra configuration is not a {kind} object")
    return found


def _reader(path: Path) -> tuple[str, Callable[[str], Any]]:
    """Choose as SGLang does: by the name of the file."""
    match path.suffix.lower():
        case ".json":
            return "JSON", json.loads
        case ".toml":
            return "TOML", tomllib.loads
        case ".yaml" | ".yml":
            try:
                return "YAML", importlib.import_module("yaml").safe_load
            except ImportError as error:
                raise SettingsError(
                    f"{path} cannot be read without PyYAML",
                    fix="Run the doctor where SGLang is installed, which needs it too.",
                ) from error
    raise SettingsError(
        f"{path} is not a kind of file that SGLang reads",
        fix="Name it .json, .toml, .yaml or .yml.",
    )


def from_words(settings: Mapping[str, object]) -> dict[str, object]:
    """Build a configuration from pairs: `core.deadlines.get` is in two groups."""
    return nest_settings({name: _read(name, value) for name, value in settings.items()})


def _read(name: str, value: object) -> object:
    if name in GROUPS and isinstance(value, str):
        return configuration(value)
    if name not in ENGINE_TYPES:
        return value
    try:
        return json.loads(str(value))
    except ValueError:
        return value


def engine_problems(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return which of SGLang's own keys it would reject, with what to do."""
    return tuple(
        (
            f"{key} is {given[key]!r}, which SGLang rejects",
            f"Write it as {' or '.join(one.__name__ for one in types)}, unquoted.",
        )
        for key, types in ENGINE_TYPES.items()
        if key in given and type(given[key]) not in types
    )


def command_line(extra: Mapping[str, object]) -> str:
    """Return the command that starts SGLang with an extra configuration.

    By itself SGLang waits a second for pages. The first prompts after a start
    take longer, as it sets up its hashing then, and would find nothing. All
    calls of kvdock end by their deadline, so waiting for them is bounded.
    """
    return _in_lines(
        [
            "sglang serve --model-path MODEL",
            ENABLE,
            f"{BACKEND} dynamic",
            f"{EXTRA} {shlex.quote(json.dumps(extra))}",
            f"{PREFETCH} {WAIT}",
            f"{PAGE} 64",
        ]
    )


def _in_lines(words: list[str]) -> str:
    return " \\\n  ".join(words)
