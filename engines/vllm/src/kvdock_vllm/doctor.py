"""The section `kvdock doctor vllm`: would this engine start, and would it ever hit?

    kvdock doctor vllm --set plugin=file --set root=/data/kv --set host_memory='10 GiB'
    kvdock doctor vllm --set config='{"plugin": "file", ...}'

Both end with the argument to start vLLM with. Groups of settings are spelled with
dots: `--set core.deadlines.get=2s`. What depends on the model is looked at with
`--set description=llama-3.1-8b`, by the functions that the connector calls.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import attrs

from kvdock import Dock, Finding, PoolKind, Shard
from kvdock.config import count, nest_settings, option, structure, with_configured
from kvdock.errors import KvdockError, SettingsError
from kvdock.models import Deployment, assemble, load_model
from kvdock.self_test import try_engine
from kvdock.units import format_bytes
from kvdock_vllm.engine_api import (
    SUPPORTED,
    TESTED,
    check_version,
    installed_version,
)
from kvdock_vllm.pools import routes
from kvdock_vllm.restorable import (
    check_rows,
    check_states,
    host_memory_words,
    window_reason,
)
from kvdock_vllm.rows import KINDS, Group
from kvdock_vllm.rows import pools as rows_of_groups
from kvdock_vllm.settings import Configuration, check_host_memory, collect

SPEC_CLASSES: Mapping[PoolKind, str] = MappingProxyType(
    {kind: name for name, (_, kind) in reversed(list(KINDS.items()))}
)
"""Kind of a pool to the first of vLLM's classes for it."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM puts its host memory
_MOST_HOST_MEMORY = 16 << 30
LEFTOVERS = "vllm_offload_*.mmap"
_PLUGINS = "VLLM_PLUGINS"


@attrs.frozen(kw_only=True)
class _Model:
    """The model, and the flags of vLLM, that a configuration is looked at with."""

    description: str = option("", help="A model, as `kvdock route --model` takes it.")
    block_size: int = count(16, least=1, help="vLLM's --block-size.")
    max_num_batched_tokens: int = count(8192, least=1, help="vLLM's flag.")


def examine(
    settings: Mapping[str, object], *, ending: bool = True
) -> tuple[Finding, ...]:
    """Look at vLLM, at its plugin mechanism and at a configuration.

    Args:
        settings: `config`, or the settings that a configuration would have;
            nothing to look at the installation alone.
        ending: Whether to end with how to start vLLM.
    """
    findings = tuple(_installation(asked=bool(settings)))
    if findings[0].skipped:
        return findings[:1]
    configured = {} if settings else with_configured({})
    if configured:
        settings = {"host_memory": default_host_memory(), **configured}
    return (
        *findings,
        *_leftovers(),
        *_configuration(settings, ending=ending),
    )


def _installation(*, asked: bool) -> Iterator[Finding]:
    version = installed_version()
    try:
        check_version()
        tested = version in TESTED
        what = f"vLLM {version}" + ("" if tested else ", which the tests do not run")
        yield Finding(ok=True, what=what)
    except KvdockError as error:
        what = error.what if version else "vLLM is not installed in this environment"
        hint = error.fix if version else f"Install kvdock-vllm beside {SUPPORTED}."
        skipped = not (version or asked)
        yield Finding(ok=skipped, skipped=skipped, what=what, hint=hint)
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
    """Name host memory that no visible process has mapped.

    Whether an engine is gone cannot be said from here: one of another user, or of
    another container that shares the folder, is not visible.
    """
    mapped = mapped_files()
    for path in sorted(SHARED_MEMORY.glob(LEFTOVERS)):
        if str(path) in mapped:
            continue
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # its engine has ended meanwhile
            continue
        yield Finding(
            ok=True,
            warning=True,
            what=f"{path} holds {format_bytes(size)}, and no process that this user "
            "can see has it mapped; it may be in use",
            hint="An engine that was killed leaves such a file. It may go once no vLLM "
            "of any user or container of this host is running.",
        )


def mapped_files() -> set[str]:
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


def _configuration(
    settings: Mapping[str, object], *, ending: bool
) -> Iterator[Finding]:
    if not settings:
        yield Finding(
            ok=True,
            skipped=True,
            what="no configuration is given, so none is checked",
            hint="Add --set plugin=NAME --set host_memory='10 GiB', or --set "
            "config=JSON.",
        )
        return
    fields = attrs.fields_dict(_Model)
    model = {name: settings[name] for name in fields if name in settings}
    try:
        given = extra_configuration(settings)
        about = structure(_Model, model, where="kvdock doctor vllm")
        found = tuple(_examined(given, about))
        yield from found
        if ending and all(one.ok for one in found):
            yield Finding(ok=True, what=f"start vLLM with this:\n{argument(given)}")
    except KvdockError as error:
        yield Finding(ok=False, what=error.what, hint=error.fix)


def extra_configuration(settings: Mapping[str, object]) -> dict[str, object]:
    """Return what vLLM hands to the connector; raise SettingsError if it is wrong."""
    fields = attrs.fields_dict(_Model)
    settings = {name: value for name, value in settings.items() if name not in fields}
    if "config" not in settings:
        return nest_settings(settings)
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


def _examined(extra: Mapping[str, object], about: _Model) -> Iterator[Finding]:
    """Look at a configuration, and at the backends that it chooses."""
    given = collect(extra)
    yield _host_memory(given.own.host_memory)
    dock = Dock.for_engine(given.used, given)
    yield from try_engine(dock, given)
    if about.description:
        yield from _of_model(dock, given, about)
    else:
        yield Finding(
            ok=True,
            what="routes, rows of host memory and windows depend on the model: vLLM "
            "is refused or warned when it starts, or here with --set description=MODEL",
        )


def _of_model(dock: Dock, given: Configuration, about: _Model) -> Iterator[Finding]:
    """Look at what depends on the model.

    Raises:
        KvdockError: As the connector does, where the engine does not start.
    """
    model, blocks = load_model(about.description), given.own.blocks_per_chunk
    tokens = about.block_size * blocks
    pools = assemble(model, Deployment(page_tokens=tokens)).pools
    groups = [
        Group(
            number=number,
            spec_class=SPEC_CLASSES[pool.kind],
            spec="",
            layers=(pool.name,),
            tokens=tokens,
            pieces=((0, pool.page_bytes(Shard())),),
        )
        for number, pool in enumerate(pools)
        if pool.kind in SPEC_CLASSES
    ]
    check_states(groups, blocks)
    row_bytes = max(size for one in groups for _, size in one.pieces)
    if len(pools) == 1:
        # With several groups vLLM divides layers among them in its own way.
        check_host_memory(given.own.host_memory, row_bytes)
        group = SimpleNamespace(
            tokens_per_chunk=tokens, sliding_window_size_in_chunks=None
        )
        rows = given.own.host_memory // row_bytes
        check_rows([group], rows, row_bytes, about.max_num_batched_tokens)
        yield Finding(ok=True, what=host_memory_words([group], rows))
    made = rows_of_groups(
        groups, row_bytes=row_bytes, slot_bytes=row_bytes, ranks=1, whole=False
    )
    plan = routes(dock, given, [pool for pool, _ in made.values()])
    where = ", ".join(one.words for one in plan.accepted)
    yield Finding(ok=True, what=f"pages of {model.name}: {where}")
    for table in model.pools:
        said = f"pages of pool {table.get('name')}"
        window = int(str(table.get("window", 0)))
        why = window and window_reason(said, window, about.block_size, blocks)
        if why:
            yield Finding(ok=True, warning=True, what=why)


def default_host_memory() -> str:
    """Return half of what shared memory has free, and at most 16 GiB."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    return format_bytes(min(_MOST_HOST_MEMORY, max(1 << 20, free // 2 >> 20 << 20)))


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


def connector(given: Mapping[str, object]) -> dict[str, object]:
    """Return vLLM's configuration of transfers for that of the connector."""
    return {
        "kv_connector": "KvdockConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(given),
    }


def argument(given: Mapping[str, object]) -> str:
    """Return the argument of vLLM's command line for a configuration."""
    return f"--kv-transfer-config '{json.dumps(connector(given))}'"
