"""SGLang's launch flags: read those that somebody has, write those that work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXTRA = "--hicache-storage-backend-extra-config"
PREFETCH = "--hicache-storage-prefetch-policy"
WAIT = "wait_complete"
BACKEND = "--hicache-storage-backend"
ENABLE = "--enable-hierarchical-cache"

DOOR = {
    "backend_name": "kvdock",
    "module_path": "kvdock_sglang",
    "class_name": "KvdockStorage",
}
"""How SGLang is told to load kvdock's class."""


@attrs.frozen
class Flags:
    """What a command line says about the storage tier.

    Args:
        given: Flag to value; a switch has the value "".
    """

    given: Mapping[str, str]

    @classmethod
    def of(cls, command: str) -> Flags:
        """Read a command line; only its flags matter."""
        given: dict[str, str] = {}
        flag = ""
        for word in shlex.split(command):
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                given[flag] = value
            elif flag and not given[flag]:
                given[flag] = word
        return cls(given)

    def problems(self) -> tuple[tuple[str, str], ...]:
        """Return what is missing, each with what to do."""
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
        return tuple(found)


def configuration(text: str) -> dict[str, object]:
    """Read an extra configuration, given as JSON or as @file.

    Raises:
        SettingsError: If it cannot be read.
    """
    if text.startswith("@"):
        path = Path(text[1:])
        if path.suffix != ".json":
            raise SettingsError(
                f"{path} is not a .json file", fix="Only JSON files are examined here."
            )
        try:
            text = path.read_text()
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SettingsError(
            f"the extra configuration is not JSON: {error}",
            fix="Quote it with single quotes in a shell.",
        ) from error
    if not isinstance(found, dict):
        raise SettingsError("the extra configuration is not a JSON object")
    return found


def command_line(plugin: str, settings: Mapping[str, object]) -> str:
    """Return the command that starts SGLang with a plugin.

    By itself SGLang waits a second for pages. The first prompts after a start
    take longer, as it sets up its hashing then, and would find nothing. All
    calls of kvdock end by their deadline, so waiting for them is bounded.
    """
    extra = json.dumps({**DOOR, "plugin": plugin, **settings})
    words: Sequence[str] = [
        "sglang serve --model-path MODEL",
        ENABLE,
        f"{BACKEND} dynamic",
        f"{EXTRA} {shlex.quote(extra)}",
        f"{PREFETCH} {WAIT}",
    ]
    return " \\\n  ".join(words)
