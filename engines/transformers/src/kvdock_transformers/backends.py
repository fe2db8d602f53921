"""Which backend a trial uses, judged by manifests; loads no torch."""

from pathlib import Path
from typing import get_type_hints

from kvdock import Dock, KvdockError, Plan, Scope

_OUTLIVES_A_PROCESS = (Scope.HOST, Scope.CLUSTER)


def choose(dock: Dock, wanted: str = "") -> str:
    """Return the name of a backend whose pages outlive the process.

    Args:
        dock: The loaded backends.
        wanted: The backend that was asked for, or "" for the first that
            needs nothing but a directory.

    Raises:
        KvdockError: If there is none, or the one asked for cannot do it.
    """
    fit = [
        name
        for name, backend in sorted(dock.backends.items())
        if backend.manifest.durability in _OUTLIVES_A_PROCESS
        and path_setting(backend.manifest.settings)
    ]
    if not wanted:
        if fit:
            return fit[0]
        raise KvdockError(
            "no backend is installed that keeps pages in a directory",
            fix="Install one, for example with: pip install kvdock-file",
        )
    durability = dock.backends[wanted].manifest.durability
    if durability not in _OUTLIVES_A_PROCESS:
        raise KvdockError(
            f"backend {wanted!r} keeps pages no longer than a {durability}",
            fix=f"The demo ends its processes. Backends that would do: {fit}",
        )
    return wanted


def directory_settings(
    dock: Dock, plan: Plan, directory: Path
) -> dict[str, dict[str, object]]:
    """Give every backend of a plan that keeps files a directory of its own."""
    settings: dict[str, dict[str, object]] = {}
    for name in {route.backend for route in plan.accepted if route.backend}:
        path = path_setting(dock.backends[name].manifest.settings)
        if path:
            settings[name] = {path: str(directory / name)}
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
