"""The section `kvdock doctor vllm`: would this engine store its pages?

    kvdock doctor vllm --set plugin=file --set root=/data/kv --set host_memory='10 GiB'
    kvdock doctor vllm --set config='{"plugin": "file", ...}'

Both end with the argument to start vLLM with. Groups of settings are spelled with
dots: `--set core.deadlines.get=2s`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import attrs

from kvdock import AttachConfig, Dock, Finding
from kvdock.errors import KvdockError, SettingsError
from kvdock.units import format_bytes
from kvdock_vllm.engine_api import (
    SUPPORTED,
    TESTED,
    installed_version,
    is_supported,
)
from kvdock_vllm.settings import collect

GROUPS = ("backends", "core", "observers", "routes")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM puts its host memory
LEFTOVERS = "vllm_offload_*.mmap"
_PLUGINS = "VLLM_PLUGINS"


def examine(settings: Mapping[str, object]) -> tuple[Finding, ...]:
    """Look at vLLM, at its plugin mechanism and at a configuration.

    Args:
        settings: `config`, or the settings that a configuration would have;
            nothing to look at the installation alone.
    """
    return (
        *_installation(),
        *_leftovers(),
        *_configuration(settings),
    )


def _installation() -> Iterator[Finding]:
    version = installed_version()
    if not version:
        yield Finding(
            ok=False,
            what="vLLM is not installed in this environment",
            hint=f"Install kvdock-vllm beside {SUPPORTED}.",
        )
    else:
        tested = version in TESTED
        yield Finding(
            ok=is_supported(version),
            what=f"vLLM {version}" + ("" if tested else ", which the tests do not run"),
            hint="" if is_supported(version) else f"Use {SUPPORTED}.",
        )
    names = {one.name for one in metadata.entry_points(group="vllm.general_plugins")}
    yield Finding(
        ok="kvdock" in names,
        what="vLLM's plugins: " + (", ".join(sorted(names)) or "none"),
        hint="" if "kvdock" in names else "Install kvdock-vllm again.",
    )
    allowed = os.environ.get(_PLUGINS)
    if allowed is not None and "kvdock" not in allowed.split(","):
        yield Finding(
            ok=False,
            what=f"{_PLUGINS} is {allowed!r}, so vLLM does not load kvdock",
            hint=f"Add kvdock to {_PLUGINS}, or unset it.",
        )


def _leftovers() -> Iterator[Finding]:
    """Name host memory that no process has mapped: an engine was killed."""
    mapped = _mapped_files()
    for path in sorted(SHARED_MEMORY.glob(LEFTOVERS)):
        if str(path) not in mapped:
            yield Finding(
                ok=False,
                what=f"{path} holds {format_bytes(path.stat().st_size)} of memory for "
                "an engine that is gone",
                hint=f"Remove it: rm {path}",
            )


def _mapped_files() -> set[str]:
    """Return the files in shared memory that a visible process has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:  # ended meanwhile, or another user's
            continue
        for line in text.splitlines():
            if str(SHARED_MEMORY) in line:
                found.add(line.split(maxsplit=5)[-1])
    return found


def _configuration(settings: Mapping[str, object]) -> Iterator[Finding]:
    if not settings:
        yield Finding(
            ok=True,
            what="no configuration is given, so none is checked",
            hint="Add --set plugin=NAME --set host_memory='10 GiB', or --set "
            "config=JSON.",
        )
        return
    try:
        given = _given(settings)
        yield from _examined(given)
        yield Finding(ok=True, what=f"start vLLM with this:\n{argument(given)}")
    except KvdockError as error:
        yield Finding(ok=False, what=error.what, hint=error.fix)


def _given(settings: Mapping[str, object]) -> dict[str, object]:
    if "config" not in settings:
        return _from_words(settings)
    if len(settings) > 1:
        raise SettingsError(
            "--set config is a whole configuration, so no other --set counts",
            fix="Put everything into it, or give all of it as single settings.",
        )
    try:
        found = json.loads(str(settings["config"]))
    except ValueError as error:
        raise SettingsError(f"config is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError("config is not a JSON object")
    # The whole of --kv-transfer-config is taken as well.
    inner = found.get("kv_connector_extra_config", found)
    if not isinstance(inner, dict):
        raise SettingsError("kv_connector_extra_config is not a JSON object")
    return inner


def _from_words(settings: Mapping[str, object]) -> dict[str, object]:
    """Build a configuration from pairs: `core.deadlines.get` is in two groups."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        head, *rest = name.split(".")
        if head not in GROUPS or not rest:
            found[name] = value
            continue
        below = found.setdefault(head, {})
        for group in rest[:-1]:
            below = below.setdefault(group, {}) if isinstance(below, dict) else None
        if not isinstance(below, dict):
            raise SettingsError(f"a group in {name!r} is given as one value")
        below[rest[-1]] = value
    return found


def _examined(extra: Mapping[str, object]) -> Iterator[Finding]:
    """Look at a configuration, and at the backends that it chooses."""
    given = collect(extra)
    yield _host_memory(given.own.host_memory)
    used = dict.fromkeys([*given.own.plugin, *given.own.routes.values()])
    dock = Dock.load(require=list(used))
    dock.observe(given.core.observers, given.observers)
    for name in used:
        backend = dock.backends[name]
        config = AttachConfig(settings=backend.settings(given.backends.get(name)))
        yield Finding(ok=True, what=f"plugin {name}: {backend.manifest.summary}")
        for one in backend.probe(config):
            yield attrs.evolve(one, what=f"{name}: {one.what}")


def _host_memory(wanted: int) -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    return Finding(
        ok=wanted <= free,
        what=f"host_memory is {format_bytes(wanted)}, and {SHARED_MEMORY} has "
        f"{format_bytes(free)} free",
        hint=""
        if wanted <= free
        else "Give less, or a larger shared memory (docker run --shm-size).",
    )


def argument(given: Mapping[str, object]) -> str:
    """Return the argument of vLLM's command line for a configuration."""
    whole = {
        "kv_connector": "KvdockConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(given),
    }
    return f"--kv-transfer-config '{json.dumps(whole)}'"
