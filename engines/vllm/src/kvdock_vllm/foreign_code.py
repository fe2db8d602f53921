"""Code that computes pages in an engine and is not vLLM's own.

Plugins, workers, operators and models of one's own are named, if at all, by names
that stay the same while the code behind them changes. So that code counts by content:
whole packages, with those that they import, as far as no installed distribution has
them. Of a distribution that is imported, name and version count.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvdock.errors import NamespaceError
from kvdock.identity import code_elsewhere, folder_digest

PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Entry points that vLLM loads where pages are computed.

Source: vLLM 0.32.0, `plugins/__init__.py`; those of other groups are loaded in the
process of its API alone.
"""

_KNOWN = frozenset({"vllm", "torch", "kvdock_vllm", *sys.stdlib_module_names})
"""vLLM's release counts, and names torch's; the others compute no page."""

_EXECUTORS = frozenset({"ray", "mp", "uni", "external_launcher"})


def foreign_code(config: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's VllmConfig
    """Return what stands for the code of an engine that is not vLLM's.

    Raises:
        NamespaceError: If nothing says what some of it is.
    """
    named = {
        f"{field} {name}": code
        for field, name in _named(config)
        if (code := code_of(name))
    }
    models = _models(config.model_config)
    return {**named, **loaded_plugins(), **_operators(config), **models}


def _named(config: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - same
    """Yield the classes and functions that a configuration names, with their field."""
    parallel, compiled = config.parallel_config, config.compilation_config
    executor = parallel.distributed_executor_backend
    named = {
        "worker_cls": parallel.worker_cls,
        "worker_extension_cls": parallel.worker_extension_cls,
        "distributed_executor_backend": "" if executor in _EXECUTORS else executor,
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        # A name without a module is torch's.
        "backend": compiled.backend if "." in str(compiled.backend) else "",
    }
    for name, function in compiled.inductor_passes.items():
        named[f"inductor_passes {name}"] = function
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "custom_class":
        named["speculative_config.model"] = speculative.model
    for field, code in named.items():
        if callable(code):
            yield field, f"{code.__module__}.{code.__qualname__}"
        elif code:
            yield field, str(code)


def code_of(name: str) -> str:
    """Return what stands for the code behind a name; "" where it is vLLM's.

    Args:
        name: Of a module, or of something in one, with dots or a colon.

    Raises:
        NamespaceError: If nothing says what it is.
    """
    dotted = name.replace(":", ".")
    if dotted.partition(".")[0] in _KNOWN:
        return ""
    if package := _package(dotted):
        return _code(package)
    raise NamespaceError(
        f"nothing says what the code of {name} is, which is not vLLM's",
        fix="Put it into a module that is a file.",
    )


def _package(name: str) -> str:
    """Return the outermost regular package, or module, that a name lies in, or "".

    Of a namespace package, other distributions have other parts.
    """
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        place = _place(module)
        if place != "":
            return module if place is not None else ""
    return ""


def _place(module: str) -> Path | str | None:
    """Return a package's folder or a module's file.

    It is "" for a namespace package, and None where there is no such thing.
    """
    if module == "__main__":
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if file else None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.has_location and spec.origin is not None:
        origin = Path(spec.origin)
        return origin.parent if spec.submodule_search_locations else origin
    return "" if spec.submodule_search_locations else None


def _code(package: str) -> str:
    """Return a digest of a package and of what it imports."""
    seen: dict[str, str] = {}
    ahead = [package]
    while ahead:
        name = ahead.pop()
        place = _place(name)
        if name in seen or not isinstance(place, Path):
            continue
        seen[name] = folder_digest(place)
        for imported in _imports(place) - _KNOWN:
            if owners := _distributions().get(imported):
                seen[f"by {imported}"] = " ".join(owners)
            else:
                ahead.append(imported)
    text = "\0".join(f"{name}\0{seen[name]}" for name in sorted(seen))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _distributions() -> Mapping[str, tuple[str, ...]]:
    """Return name and version of the distributions that have a top-level module."""
    return {
        module: tuple(sorted({f"{name} {metadata.version(name)}" for name in names}))
        for module, names in metadata.packages_distributions().items()
    }


def _imports(place: Path) -> set[str]:
    """Return the top-level modules that the code of a package imports."""
    files = [place] if place.is_file() else place.rglob("*.py")
    imported: set[str] = set()
    for file in files:
        if file.suffix != ".py":
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a template, or of another Python; nothing has imported it
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    return imported


def loaded_plugins() -> dict[str, str]:
    """Return the plugins of vLLM's that this process has loaded, without its own.

    Each by its distribution, with its version, and the code behind it. Which ones may
    be loaded is VLLM_PLUGINS' to say, and one that fails is left out by vLLM.
    """
    plugins = {}
    for group in PLUGIN_GROUPS:
        for point in metadata.entry_points(group=group):
            if point.module.partition(".")[0] in _KNOWN or not _is_loaded(point):
                continue
            dist = point.dist
            version = f"{dist.name} {dist.version}" if dist is not None else "?"
            code = {code_of(point.module), *map(_code, _packages_of(dist))}
            plugins[f"plugin {point.name} = {point.value}"] = " ".join(
                [version, *sorted(code)]
            )
    return plugins


def _is_loaded(point: metadata.EntryPoint) -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    # An import that has failed leaves no module.
    return point.module in sys.modules and (
        allowed is None or point.name in allowed.split(",")
    )


def _packages_of(dist: metadata.Distribution | None) -> set[str]:
    """Return the packages that a distribution has installed."""
    packages = set()
    for file in (dist.files if dist is not None else None) or ():
        *folders, name = file.parts
        parts = [*folders, name.partition(".")[0]]
        # The finder of an editable installation names the place of its source.
        is_code = file.suffix in (".py", ".so") and not name.startswith("__editable__")
        if is_code and all(map(str.isidentifier, parts)):
            packages.add(_package(".".join(parts)))
    return packages - {""}


def _operators(config: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's VllmConfig
    """Return the operators that stand in the place of vLLM's, and what chooses them.

    Source: vLLM 0.32.0, `model_executor/custom_op.py`, `ir/op.py`.
    """
    operators: dict[str, object] = {}
    for registry in ("custom_op", "hw_agnostic.custom_op"):
        if module := sys.modules.get(f"vllm.model_executor.{registry}"):
            for name, kind in _registered(module, "op_registry_oot").items():
                operators[f"operator {name}"] = _code_of_class(kind)
    if ir := sys.modules.get("vllm.ir.op"):
        for name, operator in _registered(ir, "IrOp.registry").items():
            for provider, variant in operator.impls.items():
                module_name = getattr(variant.impl_fn, "__module__", "vllm")
                if code := code_of(module_name):
                    operators[f"operator {name} of {provider}"] = code
    if operators:
        # Which of their methods runs; of vLLM's own, all compute the same.
        compiled = config.compilation_config
        choice = [*compiled.custom_ops, compiled.mode, compiled.backend]
        choice.append(config.kernel_config.ir_op_priority)
        operators["operators are chosen by"] = [str(part) for part in choice]
    return operators


def _registered(module: Any, name: str) -> Mapping[str, Any]:  # noqa: ANN401 - vLLM's
    """Return a registry of vLLM's."""
    try:
        registry: Mapping[str, Any] = attrgetter(name)(module)
    except AttributeError as error:
        raise NamespaceError(
            f"this vLLM has no {module.__name__}.{name}, so engines with other "
            "operators could share pages",
            fix="Use a kvdock-vllm that was made for this vLLM.",
        ) from error
    return registry


def _code_of_class(kind: type[Any]) -> str:
    """Return what stands for the code of a class and of those that it inherits from."""
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    return " ".join([kind.__name__, *sorted(filter(None, map(code_of, names)))])


def _models(model: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's ModelConfig
    """Return the code of a model that is not vLLM's own.

    A plugin may put a class of its own in the place of a model's, transformers has the
    code of models that vLLM does not know, and a model may take its code from another.
    """
    models: dict[str, object] = {}
    if model.trust_remote_code:
        auto_map = getattr(model.hf_config, "auto_map", None)
        models |= code_elsewhere(auto_map, revision=model.code_revision or "")
    if model.using_transformers_backend():
        models["transformers"] = metadata.version("transformers")
    for name in model.architectures:
        entry = model.registry.models.get(name)
        kind = getattr(entry, "model_cls", None)
        module = getattr(entry, "module_name", getattr(kind, "__module__", "vllm"))
        if code := code_of(str(module)):
            models[f"code of {name}"] = f"{module} {code}"
    return models
