# ruff: noqa: ANN401 - SGLang's own objects, and arguments that are passed on
"""Patches of SGLang where it decides by a storage backend's name.

SGLang grants some things to backends that it knows by name, which a `dynamic`
one cannot pass. Its own plugin mechanism lets a distribution wrap functions;
each wrapper here reads the installed plugin's manifest or the pools' descriptions
in place of the name. Two groups of patches note what SGLang does not tell storage:
which adapter a request has, and which operation a call belongs to. A function is
left alone where it, or something that its wrapper relies on, is not there or has
other parameters: the version of SGLang does not decide.

Source: SGLang 0.5.23, `sglang/srt/plugins/`: entry-point group
`sglang.srt.plugins`.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Capability, PoolKind, Support
from kvdock.pays import limited_by
from kvdock_sglang import (
    generations,
    hints,
    lora_identity,
    operation,
    pays,
    weight_updates,
)
from kvdock_sglang.engine_api import USED, Used, installed_version, missing
from kvdock_sglang.launch_flags import LOADER_KEYS
from kvdock_sglang.settings import collect, differing

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock_sglang.storage import KvdockStorage

log = logging.getLogger("kvdock.sglang")

DYNAMIC = "dynamic"
"""SGLang's word for a backend that it does not know by name."""


@attrs.frozen
class Patch:
    """One patch, and what does not work without it.

    Args:
        target: Dotted path of the function that asks.
        uses: What the hook relies on. Hooks that only work together have the
            same entries, so that either all or none of them are in place.
    """

    target: str
    hook: Callable[..., Any]
    lost: str
    uses: tuple[Used, ...]


def kvdock_storage(backend: object) -> KvdockStorage | None:
    """Return kvdock's storage object, also from inside SGLang's injector.

    Nothing is imported for an engine that stores through another backend.
    """
    module = sys.modules.get("kvdock_sglang.storage")
    inner = getattr(backend, "_backend", backend)
    if module is None or not isinstance(inner, module.KvdockStorage):
        return None
    found: KvdockStorage = inner
    return found


def chosen(extra_config: object) -> dict[str, Any] | None:
    """Return a configuration that names kvdock's class, else None."""
    try:
        given = parsed(extra_config)
    except Exception:  # noqa: BLE001 - SGLang reads it again, and says what is wrong
        return None
    ours = isinstance(given, dict) and given.get("module_path") == "kvdock_sglang"
    return given if ours else None


def parsed(extra_config: object) -> Any:
    """Read a configuration as SGLang does: JSON, or @file in its formats.

    Raises:
        Exception: Of many kinds, where SGLang cannot read it.
    """
    if not isinstance(extra_config, str):
        return extra_config
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (  # noqa: PLC0415 - the engine
        HybridCacheController,
    )

    read = HybridCacheController.parse_storage_backend_extra_config
    return read(extra_config)[0]


def should_backup(original: Callable[..., Any], controller: Any, transfer: Any) -> Any:
    """Let every rank write the objects that only it holds.

    With a replicated target, SGLang lets ranks above 0 write a draft model's
    heads for one backend only. Without them no rank finds a whole prefix.
    """
    storage = kvdock_storage(controller.storage_backend)
    if storage is None or not controller.backup_skip:
        return original(controller, transfer)
    return storage.writes(transfer.name)


def note_write(original: Callable[..., Any], cache: Any, node_id: Any) -> Any:
    """Note whose write it is, and what routers are told once the node is stored."""
    storage = kvdock_storage(_backend_of(cache))
    if storage is not None:
        storage.note_events(cache.tree_core, node_id)
    return operation.note_write(original, cache, node_id)


def take_events(original: Callable[..., Any], cache: Any) -> Any:
    """Add what storage has, and has no longer, to the events for routers."""
    taken = original(cache)
    storage = kvdock_storage(_backend_of(cache))
    return taken if storage is None else storage.take_events(cache.tree_core, taken)


_SKIPPED = {"declined_too_short": "too_short", "declined_rate_limited": "rate_limit"}
"""SGLang's counters of requests for which it asks storage nothing, and our words."""


def note_skipped(
    original: Callable[..., Any],
    cache: Any,
    request: Any,
    last_host_node_id: Any,
    new_input_tokens: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Tell observers why SGLang asked storage nothing for a request."""
    counters = cache._prefetch_outcome_stats  # noqa: SLF001 - SGLang's
    before = {name: counters[name] for name in _SKIPPED}
    tokens = len(new_input_tokens)
    answer = original(
        cache, request, last_host_node_id, new_input_tokens, *args, **options
    )
    reasons = [word for name, word in _SKIPPED.items() if counters[name] > before[name]]
    # SGLang does not count what is shorter than a page.
    if tokens < cache.page_size and options.get("matched_prefix_tokens"):
        reasons = ["own_memory"]
    elif 0 < tokens < cache.page_size:
        reasons = ["too_short"]
    storage = kvdock_storage(_backend_of(cache))
    if reasons and storage is not None:
        storage.note_skipped(str(request.rid), reasons[0])
    return answer


def note_cut(
    original: Callable[..., Any],
    controller: Any,
    found: Any,
    hit_tokens: int,
    *args: Any,
    **options: Any,
) -> Any:
    """Tell observers of a prefix that SGLang has no host memory for.

    It frees what it may, and loads the beginning that fits, or nothing.
    """
    slots, tokens = original(controller, found, hit_tokens, *args, **options)
    loaded = 0 if slots is None else tokens
    storage = kvdock_storage(controller.storage_backend)
    # Without parts SGLang tries again until there is room for all.
    if storage is not None and loaded < hit_tokens and options["allow_partial"]:
        page = controller.page_size
        rows, pages = controller.mem_pool_host.size // page, hit_tokens // page
        storage.note_cut(found, rows, pages, hit_tokens - loaded)
    return slots, tokens


def note_arrival(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **options: Any
) -> Any:
    """Follow the hints of a request, once SGLang has looked for its prefix."""
    answer = original(scheduler, req, *args, **options)
    cache = scheduler.tree_cache
    storage = kvdock_storage(_backend_of(cache)) if req.kv_hints is not None else None
    if storage is not None:
        storage.take_hints(cache, req)
    return answer


def note_insert(
    original: Callable[..., Any], cache: Any, req: Any, *, up_to: int, **options: Any
) -> Any:
    """Work out the pages of a request with hints before SGLang stores them."""
    storage = kvdock_storage(_backend_of(cache)) if req.kv_hints is not None else None
    if storage is not None:
        storage.note_insert(cache, req, up_to)
    return original(cache, req, up_to=up_to, **options)


def _backend_of(cache: Any) -> object:
    controller = getattr(cache, "cache_controller", None)
    return getattr(controller, "storage_backend", None)


def query_hits(original: Callable[..., Any], controller: Any, found: Any) -> Any:
    """Look a prefix up, and leave out what does not pay."""
    hashes, tokens = operation.run_operation(original, controller, found)
    storage = kvdock_storage(controller.storage_backend)
    if storage is not None and hashes:
        pages = storage.decide(found, hashes, controller.page_size)
        hashes, tokens = hashes[:pages], pages * controller.page_size
    return hashes, tokens


def transfer_pages(original: Callable[..., Any], controller: Any, found: Any) -> Any:
    """Load a prefix until computing would have been faster."""
    storage = kvdock_storage(controller.storage_backend)
    try:
        with limited_by(pays.limit_of(found)):
            return operation.run_operation(original, controller, found)
    finally:
        if storage is not None:
            storage.end_load(found)


def learn_step(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **options: Any
) -> Any:
    """Learn what computing takes from each step."""
    answer = original(scheduler, batch, *args, **options)
    storage = kvdock_storage(_backend_of(scheduler.tree_cache))
    if storage is not None:
        storage.learn_step(batch)
    return answer


def open_generation(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """Go on with storage after an update of the weights, once nothing is mixed."""
    answer = original(scheduler, *args)
    if weight_updates.WEIGHTS.changed:
        storage = kvdock_storage(_backend_of(scheduler.tree_cache))
        if storage is not None:
            generations.open_if_ready(storage, scheduler)
    return answer


def attach_with_dcp(
    original: Callable[..., Any], controller: Any, *args: Any, **options: Any
) -> Any:
    """Attach under decode context parallelism, which names two backends.

    What SGLang checks besides the name is checked by the table of pools. The
    width is hidden from the gate alone: `storage_config_with_dcp` brings it
    back for the ranks' identity.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine

    width = get_parallel().attn_dcp_size
    ours = chosen(options.get("storage_backend_extra_config"))
    entries = getattr(controller.mem_pool_host, "entries", ())
    names = {str(getattr(entry.name, "value", entry.name)) for entry in entries}
    divided = names <= {PoolKind.MAMBA.value, "kv"}
    staging = controller.host_memory_mode == "buffer_only"
    if width <= 1 or ours is None or staging or not divided:
        return original(controller, *args, **options)
    controller._kvdock_dcp_size = width  # noqa: SLF001 - a mark of ours on SGLang's object
    with get_parallel().override(attn_dcp_size=1):
        return original(controller, *args, **options)


def storage_config_with_dcp(
    original: Callable[..., Any], controller: Any, *args: Any, **options: Any
) -> Any:
    """Pass the backend the width that `attach_with_dcp` hid from the gate."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine

    width = getattr(controller, "_kvdock_dcp_size", 0)
    if not width:
        return original(controller, *args, **options)
    with get_parallel().override(attn_dcp_size=width):
        return original(controller, *args, **options)


def attach_another(
    original: Callable[..., Any],
    attachment: Any,
    storage_backend: str,
    storage_backend_extra_config_json: str | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Reject another plugin while one is attached, and clean up after a rejected one.

    All dynamic backends have one name, so SGLang takes another plugin, another
    root or another revision for what is attached already, answers that all is
    well and changes nothing. And where a backend rejects the pools, SGLang
    keeps it half attached, so that every later one is rejected.
    """
    cache = attachment._cache  # noqa: SLF001 - SGLang has no other door
    controller = cache.cache_controller
    current = kvdock_storage(getattr(controller, "storage_backend", None))
    asked = storage_backend_extra_config_json
    # Without a configuration it is about policies, which SGLang changes.
    if storage_backend == DYNAMIC and cache.enable_storage and current and asked:
        why = _other_than(current, attachment, asked)
        if why:
            return False, f"{why} Detach first, then attach."
    ok, why = original(
        attachment,
        storage_backend,
        storage_backend_extra_config_json,
        *args,
        **options,
    )
    if not ok and not cache.enable_storage:
        left = getattr(controller, "storage_backend", None)
        if kvdock_storage(left) is not None:
            controller.detach_storage_backend()
    return ok, why


def _other_than(current: KvdockStorage, attachment: Any, asked: str) -> str:
    """Return how a configuration differs from the one that is attached, or ""."""
    attached = f"kvdock stores through {', '.join(current.given.used)} already"
    try:
        wanted = parsed(asked)
        if any(
            wanted.get(key) != LOADER_KEYS[key] for key in ("module_path", "class_name")
        ):
            return f"{attached}, and the configuration names another class."
        other = collect(wanted, lenient=True)
        found = [*differing(current.given, other), *_other_prefetch(attachment, asked)]
    except Exception as error:  # noqa: BLE001 - SGLang's reader raises what it likes
        return f"{attached}, and the configuration cannot be used: {error}"
    if wanted.get("tp_lcm_size") != current.config.tp_lcm_size:
        found.append("tp_lcm_size")
    return f"{attached}, with another {', '.join(found)}." if found else ""


def _other_prefetch(attachment: Any, asked: str) -> tuple[str, ...]:
    """Name the settings that SGLang takes for itself and would not change."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (  # noqa: PLC0415 - the engine
        HybridCacheController,
    )

    read = HybridCacheController.parse_storage_backend_extra_config
    _, threshold, base, growth, prefix_keys = read(asked)
    cache = attachment._cache  # noqa: SLF001 - SGLang has no other door
    in_force = {
        "prefetch_threshold": (
            cache.prefetch_threshold,
            attachment.resolve_prefetch_threshold(threshold),
        ),
        "prefetch_timeout_base": (cache.prefetch_timeout_base, base),
        "prefetch_timeout_per_ki_token": (
            cache.prefetch_timeout_per_page,
            cache.page_size / 1024 * growth,
        ),
        "hicache_storage_pass_prefix_keys": (
            cache.hicache_storage_pass_prefix_keys,
            prefix_keys,
        ),
    }
    return tuple(name for name, (now, then) in in_force.items() if now != then)


def stop_at_once(original: Callable[..., Any], controller: Any) -> Any:
    """End queued operations with misses while the storage threads stop.

    SGLang works off all queued lookups before its threads stop, waits 10 s for
    them, and then raises: 60 lookups of 0.6 s would hold up a detach for that
    long, and a reset would end the engine.
    """
    storage = kvdock_storage(getattr(controller, "storage_backend", None))
    if storage is None:
        return original(controller)
    with storage.stopping():
        return original(controller)


def page_layout(original: Callable[..., Any], server_args: Any) -> Any:
    """Keep a page together where a plugin takes one piece of memory a key.

    SGLang rewrites its layer-first layout for two backends by name. Here the
    manifest of the chosen plugin says whether it takes scattered pages.
    """
    result = original(server_args)
    from sglang.srt.arg_groups.overrides import (  # noqa: PLC0415 - the engine
        declare_resolution,
        resolving_view,
    )

    view = resolving_view(server_args)
    if view.hicache_storage_backend != DYNAMIC:
        return result
    ours = chosen(view.hicache_storage_backend_extra_config)
    if not ours:
        return result
    # Before weights load and memory is mapped: a misspelt word stops the start here.
    from kvdock import Dock  # noqa: PLC0415 - only where it is asked

    given = collect(ours, lenient=True)
    dock = Dock.for_engine(given.used, given)
    layouts = {"direct": "page_first_direct", "kernel": "page_first"}
    layout = layouts.get(view.hicache_io_backend)
    if view.hicache_mem_layout != "layer_first" or layout is None:
        return result
    chosen_backend = dock.backends.get(given.own.plugin)
    if chosen_backend is None:
        return result
    pieces = chosen_backend.manifest.support(Capability.MULTI_BUFFER, PoolKind.MHA)
    if pieces is Support.NATIVE:
        return result
    declare_resolution(
        server_args, "_resolve_storage_layout_kvdock", hicache_mem_layout=layout
    )
    log.warning("plugin %s takes whole pages: layout %s", given.own.plugin, layout)
    return result


_CALL_HOOKS: tuple[Callable[..., Any], ...] = (
    query_hits,
    transfer_pages,
    operation.run_operation,
)
"""In the order of `operation.CALLS`."""

_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
)
_ATTACH = "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_LAYOUT = "sglang.srt.arg_groups.hicache_hook.resolve_storage_layout_compatibility"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_LOST_DCP = "decode context parallelism: the engine does not start"
_LOST_EVENTS = "KV events of what storage has: routers see memory alone"
_LOST_OPERATION = (
    "what a storage call belongs to: hints, tenants and decisions see neither a "
    "request nor its salt"
)
_LOST_HINTS = "hints that requests carry (kv_hints): they are not followed"
_LOST_LORA = (
    "adapters by their content: storage is rejected with --enable-lora, and pages are "
    "not shared with engines that have the patch"
)
_LOST_GENERATIONS = (
    "storage after weights were replaced at run time: attach it with another revision"
)
PATCHES = (
    Patch(
        f"{_HYBRID}.should_backup",
        should_backup,
        "draft models whose heads are divided beside a replicated target: "
        "no prefix is ever found again",
        USED["backup"],
    ),
    Patch(
        f"{_CONTROLLER}.attach_storage_backend",
        attach_with_dcp,
        _LOST_DCP,
        USED["dcp"],
    ),
    Patch(
        f"{_CONTROLLER}._generate_storage_config",
        storage_config_with_dcp,
        _LOST_DCP,
        USED["dcp"],
    ),
    Patch(
        f"{_ATTACH}.attach",
        attach_another,
        "attaching another plugin, root or revision at runtime: the engine says "
        "yes and keeps the first one; and after an attachment that was rejected, "
        "detach first",
        USED["attach"],
    ),
    Patch(
        f"{_HYBRID}._stop_storage_threads",
        stop_at_once,
        "ending queued operations at once: a detach waits for all of them",
        USED["stop"],
    ),
    Patch(f"{_CACHE}.take_events", take_events, _LOST_EVENTS, USED["events"]),
    Patch(
        f"{_CACHE}.prefetch_from_storage",
        note_skipped,
        "requests for which SGLang asks storage nothing, in the journal",
        USED["skipped"],
    ),
    Patch(
        f"{_HYBRID}.allocate_storage_hit",
        note_cut,
        "prefixes that host memory has no room for, in metrics and the journal",
        USED["cut"],
    ),
    Patch(operation.WRITE, note_write, _LOST_OPERATION, USED["operation"]),
    Patch(
        operation.CREATE, operation.note_operation, _LOST_OPERATION, USED["operation"]
    ),
    *(
        Patch(path, hook, _LOST_OPERATION, USED["operation"])
        for path, hook in zip(operation.CALLS, _CALL_HOOKS, strict=True)
    ),
    Patch(
        pays.STEP,
        learn_step,
        "what computing takes: core.pays.recompute has to say it",
        USED["pays"],
    ),
    Patch(hints.ARRIVAL, note_arrival, _LOST_HINTS, USED["hints"]),
    Patch(hints.INSERT, note_insert, _LOST_HINTS, USED["hints"]),
    Patch(lora_identity.LOAD, lora_identity.identify_at_load, _LOST_LORA, USED["lora"]),
    Patch(
        lora_identity.REQUEST, lora_identity.identify_request, _LOST_LORA, USED["lora"]
    ),
    Patch(
        weight_updates.DISPATCH,
        weight_updates.watch_requests,
        "weights that are replaced at run time: detach storage before, and attach "
        "it with another revision afterwards",
        USED["weights"],
    ),
    Patch(
        weight_updates.RECORD,
        weight_updates.note_success,
        _LOST_GENERATIONS,
        USED["generations"],
    ),
    Patch(generations.STEP, open_generation, _LOST_GENERATIONS, USED["generations"]),
    Patch(
        _LAYOUT,
        page_layout,
        "whole pages for plugins that take one piece of memory a key: set "
        "--hicache-mem-layout page_first_direct or page_first by hand",
        USED["layout"],
    ),
)
"""All patches, in the order of SGLang's own layers."""


@attrs.frozen
class SkippedPatch:
    """A patch that is left out of this SGLang.

    Args:
        missing: What it relies on and this SGLang lacks.
    """

    closed: Patch
    missing: tuple[str, ...]

    def __str__(self) -> str:
        """Say what is lost and why."""
        return f"{self.closed.lost} (missing: {', '.join(self.missing)})"


def skipped_patches() -> tuple[SkippedPatch, ...]:
    """Return the patches that this SGLang has no place for; imports SGLang."""
    found = [(closed, missing(closed.uses)) for closed in PATCHES]
    return tuple(SkippedPatch(closed, names) for closed, names in found if names)


def install() -> None:
    """Register the patches; SGLang calls this early in each of its processes."""
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415 - the engine
        HookRegistry,
        HookType,
    )

    left = skipped_patches()
    if left:
        log.warning(
            "SGLang %s lacks what some of kvdock's patches rely on. Lost: %s",
            installed_version(),
            "; ".join(dict.fromkeys(map(str, left))),
        )
    without = {id(one.closed) for one in left}
    for closed in PATCHES:
        if id(closed) not in without:
            HookRegistry.register(closed.target, closed.hook, HookType.AROUND)
