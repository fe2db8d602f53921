"""Hold a plugin against the contract: its manifest, its hooks, their arguments.

Knows nothing of where the plugin comes from; `kvdock.plugin.loading` does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import attrs
import pluggy

from kvdock.errors import ManifestError, did_you_mean
from kvdock.plugin import hookspecs
from kvdock.plugin.discovery import LoadStage
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import (
    API_VERSION,
    OLDEST_API_VERSION,
    KindSupport,
    Manifest,
)
from kvdock.plugin.store import PeerMemory, WholeStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.batch import Batch, BatchResult
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

_LISTENS = "kvdock_observe"
"""The hook of observers that wraps nothing."""

OBSERVER_PREFIX = "observer:"
"""How a plugin manager's names of observers begin."""

DEFAULTS = "defaults:kvdock"
"""How a plugin manager calls the hooks that the core answers."""


class ContractViolation(Exception):  # noqa: N818 - becomes a PluginProblem, never reaches a user
    """A plugin breaks the contract; discovery adds whose plugin it is."""

    def __init__(
        self, cause: str, fix: str, stage: LoadStage = LoadStage.VALIDATE
    ) -> None:
        super().__init__(stage, cause, fix)
        self.stage, self.cause, self.fix = stage, cause, fix


@attrs.frozen(kw_only=True, eq=False)
class ValidatedPlugin:
    """What a plugin that keeps the contract consists of.

    Args:
        manager: Its hooks, and those that the core answers in its place.
        implemented: Its own hooks.
    """

    manifest: Manifest
    manager: pluggy.PluginManager = attrs.field(repr=False)
    implemented: frozenset[str]


def validate_plugin(plugin: object, name: str, distribution: str) -> ValidatedPlugin:
    """Check a plugin and give it a plugin manager of its own."""
    if inspect.isclass(plugin):
        raise ContractViolation(
            f"{plugin.__qualname__} is a class",
            "Point the entry point at a module or at an instance.",
            LoadStage.IMPORT,
        )
    manager = hook_manager()
    try:
        own = _marked(manager, plugin)
        manifest = _manifest(plugin, name, distribution, own)
        _check_promises(manifest, own)
        _check_hooks(manager, plugin, own)
        manager.register(plugin, name=name)
        add_defaults(manager, own)
        manager.check_pending()
    except ContractViolation:
        raise
    except Exception as error:
        raise _strange(error) from error
    return ValidatedPlugin(
        manifest=manifest, manager=manager, implemented=frozenset(own)
    )


def check_observer(observer: object) -> None:
    """Check that an object only wraps hooks of backends, and listens."""
    manager = hook_manager()
    try:
        own = _wrapping(manager, observer)
        _check_names(manager, own)
        _check_arguments(observer, own)
        manager.register(observer)
    except ContractViolation:
        raise
    except Exception as error:
        raise _strange(error) from error


def _strange(error: Exception) -> ContractViolation:
    # A property that raises, a signature that cannot be read, a rule of pluggy's
    # that is not checked here: one plugin's defect stays its own.
    return ContractViolation(
        f"{type(error).__name__}: {' '.join(str(error).split())}",
        "Compare its hooks with kvdock.plugin.hookspecs.",
    )


def _wrapping(manager: pluggy.PluginManager, observer: object) -> dict[str, str]:
    """Return the hooks that an observer marks: specification to attribute."""
    own = {}
    for attribute in dir(observer):
        options = manager.parse_hookimpl_opts(observer, attribute)
        if options is None:
            continue
        hook = options["specname"] or attribute
        wraps = options["wrapper"] or options["hookwrapper"]
        if wraps and hook == _LISTENS:
            raise ContractViolation(
                f"hook {hook!r} is marked as a wrapper, and there is nothing to wrap",
                "Mark it with a plain @hookimpl.",
            )
        if not wraps and hook != _LISTENS:
            raise ContractViolation(
                f"hook {hook!r} would answer in the place of a backend",
                "Mark it with @hookimpl(wrapper=True).",
            )
        own[hook] = attribute
    return own


def _marked(manager: pluggy.PluginManager, plugin: object) -> dict[str, str]:
    """Return the hooks that a plugin marks: specification to attribute."""
    own = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        if options["wrapper"] or options["hookwrapper"]:
            raise ContractViolation(
                f"hook {attribute!r} is marked as a wrapper",
                "A backend answers its hooks itself; use a plain @hookimpl.",
            )
        own[options["specname"] or attribute] = attribute
    return own


def _manifest(
    plugin: object, name: str, distribution: str, own: Mapping[str, str]
) -> Manifest:
    hook: Any = getattr(plugin, own.get("kvdock_manifest", "kvdock_manifest"), None)
    if "kvdock_manifest" not in own:
        fix = "Add a function kvdock_manifest() marked with @hookimpl."
        cause = "it has no manifest"
        if callable(hook):
            cause = "its kvdock_manifest() is not marked"
            fix = "Mark it with @hookimpl."
        raise ContractViolation(cause, fix, LoadStage.MANIFEST)
    try:
        found = hook()
    except ManifestError as error:
        raise ContractViolation(
            f"its manifest is refused: {error.what}",
            error.fix or "Correct what kvdock_manifest() returns.",
            LoadStage.MANIFEST,
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ContractViolation(
            f"its manifest raised {type(error).__name__}: {error}",
            _nearest_field(error)
            or "It may be written for another kvdock; "
            f"upgrade {distribution} or kvdock.",
            LoadStage.MANIFEST,
        ) from error
    _check_manifest(found, name, distribution)
    return cast("Manifest", found)


def _nearest_field(error: BaseException) -> str:
    """Return which field is meant where a record got one that it does not have."""
    word = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    fields = [
        field.name for cls in (Manifest, KindSupport) for field in attrs.fields(cls)
    ]
    return did_you_mean(word[1], fields) if word else ""


def _check_manifest(found: object, name: str, distribution: str) -> None:
    # The number first: a manifest of another contract need not be our class.
    _check_number(getattr(found, "api", API_VERSION), distribution)
    if not isinstance(found, Manifest):
        raise ContractViolation(
            f"its manifest is a {type(found).__name__}",
            "Return a kvdock.Manifest.",
            LoadStage.MANIFEST,
        )
    if found.name != name:
        raise ContractViolation(
            f"its manifest says {found.name!r}, its entry point {name!r}",
            "Give both the same name.",
            LoadStage.MANIFEST,
        )


def _check_number(number: object, distribution: str) -> None:
    """Reject a contract that this core does not keep, with whom to upgrade."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise ContractViolation(
            f"its manifest says api={number!r}, which is not a number",
            f"Name the contract that it was written for: api={API_VERSION}.",
            LoadStage.MANIFEST,
        )
    if OLDEST_API_VERSION <= number <= API_VERSION:
        return
    spoken = f"{API_VERSION}"
    if OLDEST_API_VERSION < API_VERSION:
        spoken = f"{OLDEST_API_VERSION} to {API_VERSION}"
    newer, older = "kvdock", distribution
    if number < OLDEST_API_VERSION:
        newer, older = distribution, "kvdock"
    raise ContractViolation(
        f"it is written for API {number}, this kvdock speaks {spoken}",
        f"Upgrade {newer}, or install an older {older}.",
        LoadStage.MANIFEST,
    )


def _check_promises(manifest: Manifest, own: Mapping[str, str]) -> None:
    """Reject declarations that no hook of the plugin could keep."""
    if manifest.host_allocator and "kvdock_allocate" not in own:
        raise ContractViolation(
            "its manifest declares host_allocator, and it has no kvdock_allocate",
            "Add the hook, or declare host_allocator=Support.NO.",
        )
    if manifest.sealed:
        raise ContractViolation(
            "its manifest declares sealed, which only wrappers do",
            "Leave it out: the wrapper 'seal' seals pages on any backend.",
        )


def _check_hooks(
    manager: pluggy.PluginManager, plugin: object, own: Mapping[str, str]
) -> None:
    known = _check_names(manager, own)
    for name in sorted(known - set(own)):
        # An optional hook without its mark would never be called, silently.
        if inspect.isroutine(getattr(plugin, name, None)):
            raise ContractViolation(
                f"the hook {name!r} is not marked",
                "Mark it with @hookimpl.",
            )
        if name in hookspecs.REQUIRED:
            raise ContractViolation(f"the required hook {name!r} is missing", "Add it.")
    _check_arguments(plugin, own)


def _check_names(manager: pluggy.PluginManager, own: Collection[str]) -> set[str]:
    """Refuse hooks that do not exist; return those that do."""
    known = {name for name in dir(manager.hook) if name.startswith("kvdock_")}
    for name in own:
        if name in known:
            continue
        member = name.removeprefix("kvdock_")
        fix = did_you_mean(name, known) or f"Hooks are {', '.join(sorted(known))}."
        if hasattr(WholeStore, member) or hasattr(PeerMemory, member):
            fix = f"Make it the method {member!r} of what kvdock_register_pool returns."
        raise ContractViolation(f"unknown hook {name!r}", fix)
    return known


def _check_arguments(plugin: object, own: Mapping[str, str]) -> None:
    for name, attribute in own.items():
        offered = tuple(inspect.signature(getattr(hookspecs, name)).parameters)
        _check_hook(name, getattr(plugin, attribute), offered)


def _check_hook(name: str, hook: Callable[..., Any], offered: Collection[str]) -> None:
    """Check that a hook answers when called, and is given what it takes."""
    if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
        raise ContractViolation(
            f"hook {name!r} is asynchronous, but hooks are not awaited",
            "Define it with `def`; every call runs on a thread of the core.",
        )
    for parameter in inspect.signature(hook).parameters.values():
        if parameter.default is not parameter.empty:
            # pluggy takes an argument with a default for one to leave out.
            raise ContractViolation(
                f"hook {name!r} gives {parameter.name!r} a default, "
                "so it would never be passed",
                "Remove the default.",
            )
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ContractViolation(
                f"hook {name!r} takes {str(parameter)!r}, which is never passed",
                "Use plain arguments of the hook's specification, or fewer.",
            )
        if parameter.name not in offered:
            raise ContractViolation(
                f"hook {name!r} takes {parameter.name!r}, which its specification "
                "does not have",
                did_you_mean(parameter.name, offered)
                or f"It may take {', '.join(offered) or 'nothing'}.",
            )


# --- Default hooks: what the core answers in the place of a plugin -----------


@hookimpl
def kvdock_key_suffix(pool: PoolSpec, shard: Shard) -> Sequence[str]:
    """Return the suffixes of the core, one for each object of a page."""
    from kvdock.keys import key_suffixes  # noqa: PLC0415 - numpy, 65 ms

    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(store: WholeStore, batch: Batch) -> BatchResult:
    """Run the batch in the store, or send its rows."""
    # Only a SEND has addresses of another process.
    return store.run(batch) if batch.remote is None else store.peers.send(batch)


def hook_manager() -> pluggy.PluginManager:
    """Return a plugin manager that knows the hooks."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def add_defaults(manager: pluggy.PluginManager, own: Collection[str]) -> None:
    """Answer the hooks that a plugin leaves out, if the core can.

    Not beside a plugin's own: a None of that would be answered a second time.
    """
    hooks = {
        "kvdock_key_suffix": kvdock_key_suffix,
        "kvdock_batch_io": kvdock_batch_io,
    }
    left_out = {name: hook for name, hook in hooks.items() if name not in own}
    manager.register(SimpleNamespace(**left_out), name=DEFAULTS)
