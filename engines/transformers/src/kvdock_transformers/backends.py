"""Which backend a trial uses, judged by manifests; loads no torch."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

from kvdock import AttachConfig, Dock, KvdockError, Plan, Scope
from kvdock.config import load_configuration
from kvdock.errors import PluginError, SettingsError
from kvdock.plugin import import_entry_point, list_entry_points

SERVERS = "kvdock.servers"
"""Entry points of servers that backends bring for demos, by backend."""

Settings = Mapping[str, object]
"""What was given for a backend: setting to value."""


def choose(dock: Dock, wanted: str = "") -> str:
    """Return the name of a backend whose pages outlive the process.

    Args:
        dock: The loaded backends.
        wanted: The backend that was asked for, or "" for the first that
            needs nothing but a directory.

    Raises:
        KvdockError: If there is none; a PluginError where the one asked for
            cannot do it.
    """
    fit = [
        name
        for name, backend in sorted(dock.backends.items())
        if backend.manifest.durability >= Scope.PROCESS
    ]
    if not wanted:
        for name in fit:
            if path_setting(dock.backends[name].manifest.settings):
                return name
        raise KvdockError(
            "no backend is installed that keeps pages in a directory",
            fix="Install one, for example with: pip install kvdock-file",
        )
    if wanted not in fit:
        raise PluginError(
            f"backend {wanted!r} keeps pages no longer than the process that stored "
            "them",
            fix=f"The demo ends its processes. Backends that would do: {fit}",
        )
    return wanted


def configured(dock: Dock, name: str, given: Settings) -> Settings:
    """Return what is given, over what kvdock's file and environment say.

    All but the directory, where a backend keeps one: a demo has its own, in
    which it harms pages.

    Raises:
        SettingsError: If the file or the environment cannot be read, or the
            directory is given.
    """
    found = dict(load_configuration().backends.get(name, {}))
    path = path_setting(dock.backends[name].manifest.settings)
    if path and path in given:
        raise SettingsError(
            f"--set {path} is not for the demo, which damages a store of its own",
            fix="Say where that shall lie with --dir, or leave it out.",
        )
    if path:
        found.pop(path, None)
    return {**found, **given}


def check_settings(dock: Dock, name: str, given: Settings) -> None:
    """Refuse settings that a backend does not know.

    Raises:
        SettingsError: With the setting and what is wrong with it.
    """
    backend = dock.backends[name]
    path = path_setting(backend.manifest.settings)
    # The demo brings a directory where none is given.
    backend.settings({path: "/", **given} if path else given)


def check_room(dock: Dock, name: str, directory: Path, given: Settings) -> None:
    """Raise what a backend that keeps a directory finds wrong with it.

    A disk without room would otherwise show as a prefix that is not restored,
    after a minute of prefilling.

    Raises:
        KvdockError: With the first problem that its probe finds.
    """
    backend = dock.backends[name]
    if not path_setting(backend.manifest.settings):
        return
    settings = completed(dock, [name], directory, {name: given})[name]
    for finding in backend.probe(AttachConfig(settings=backend.settings(settings))):
        if not finding.ok:
            advice = "The demo takes another directory with --dir."
            raise KvdockError(
                f"backend {name!r} cannot store pages here: {finding.what}",
                fix=f"{finding.hint} {advice}".strip(),
            )


@contextmanager
def served(name: str, given: Settings) -> Iterator[tuple[Settings, str]]:
    """Bring the server that a backend needs, if it announces one.

    Args:
        name: The backend.
        given: The user's settings for it.

    Yields:
        The settings to use, and a sentence that says what was started, "" if
        nothing was.

    Raises:
        KvdockError: If the server cannot be started.
    """
    for candidate in list_entry_points(SERVERS):
        if candidate.name == name:
            bring: Any = import_entry_point(candidate)
            with bring(given) as (settings, notice):
                yield settings, notice
            return
    yield given, ""


def settings_for(
    dock: Dock, plan: Plan, directory: Path, given: Mapping[str, Settings]
) -> dict[str, Settings]:
    """Return the settings of every backend of a plan; see `completed`."""
    used = {route.backend for route in plan.accepted if route.backend}
    return completed(dock, used, directory, given)


def completed(
    dock: Dock, names: Iterable[str], directory: Path, given: Mapping[str, Settings]
) -> dict[str, Settings]:
    """Return the settings of some backends.

    One that keeps files gets a directory of its own, if it is given none.

    Args:
        dock: The loaded backends.
        names: Which of them.
        directory: Where directories are made.
        given: Backend to the settings that the user gave.
    """
    settings: dict[str, Settings] = {}
    for name in names:
        path = path_setting(dock.backends[name].manifest.settings)
        own: Settings = {path: str(directory / name)} if path else {}
        settings[name] = {**own, **given.get(name, {})}
    return settings


def path_setting(settings: type | None) -> str | None:
    """Return the name of the first setting whose type is a path, or None.

    A backend says by this type where it wants its directory, so no setting
    has to be known by name here.
    """
    if settings is None:
        return None
    for name, hint in get_type_hints(settings).items():
        if Path in (hint, *getattr(hint, "__args__", ())):
            return name
    return None
