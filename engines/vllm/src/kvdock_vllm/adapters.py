"""LoRA adapters by the content of the files that they were loaded from.

vLLM's block hashes have an adapter's name and path, and neither says which weights
lie there. So the files are read when vLLM loads an adapter, and what they held then
stands for it. When they change, or an adapter is loaded in place, nothing says which
of vLLM's own pages are of the old weights: the adapter is served and not stored, until
the engine starts again or the adapter is loaded under another name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import KvdockError
from kvdock.identity import files_digest, files_state

if TYPE_CHECKING:
    from kvdock.throttled_log import ThrottledLog

UNKNOWN = "?"
"""Identity of an adapter that cannot be identified."""


@attrs.frozen
class _Load:
    """An adapter as vLLM has loaded it."""

    name: str
    path: Path
    state: tuple[tuple[object, ...], ...] = ()
    identity: str = UNKNOWN


class AdapterFiles:
    """The adapters of the requests under way; the scheduler's thread changes them.

    Args:
        log: Where adapters are named that cannot be identified.
        settings: What else the engine makes of an adapter's files, as text.
        loads_are_seen: Whether `loading` is called before vLLM loads an adapter that
            no request has asked for.
    """

    def __init__(
        self, log: ThrottledLog, settings: str = "", *, loads_are_seen: bool = True
    ) -> None:
        self._log = log
        self._settings = settings
        self._loads_are_seen = loads_are_seen
        self._by_request: dict[str, _Load] = {}
        self._loads: dict[tuple[str, str], _Load] = {}
        self._numbers: dict[int, tuple[str, str]] = {}
        self._spoiled: set[str] = set()
        self._stopped = False

    def stop(self) -> None:
        """Identify no request: this engine may have other weights now."""
        self._stopped = True

    def go_on(self) -> None:
        """Identify requests again: storage is that of the weights."""
        self._stopped = False

    def begin(self, request_id: str, adapter: Any) -> None:  # noqa: ANN401 - vLLM's LoRARequest or None
        """Remember which adapter a request uses; vLLM loads it later, if ever."""
        if adapter is not None:
            self._by_request[request_id] = self.loading(adapter)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._by_request.pop(request_id, None)

    def of(self, request_id: str) -> str:
        """Return the identity of a request's adapter; "" where it uses none."""
        if self._stopped:
            return UNKNOWN
        load = self._by_request.get(request_id)
        if load is None:
            return ""
        return UNKNOWN if load.name in self._spoiled else load.identity

    def check(self, request_id: str) -> None:
        """Look whether an adapter's files are still what vLLM has loaded."""
        load = self._by_request.get(request_id)
        if load is not None:
            self._compare(load)

    def loading(self, adapter: Any) -> _Load:  # noqa: ANN401 - vLLM's LoRARequest
        """Read the files of an adapter that vLLM is about to load, or has loaded."""
        name, path = str(adapter.lora_name), str(adapter.lora_path)
        key = (name, path)
        if not self._loads_are_seen:
            self._spoil(
                name, "this vLLM may have loaded it before kvdock saw its files"
            )
        elif adapter.load_inplace:
            self._spoil(name, "it was loaded in place")
        elif self._numbers.setdefault(int(adapter.lora_int_id), key) != key:
            self._spoil(name, f"its number {adapter.lora_int_id} is another adapter's")
        load = self._loads.get(key)
        if name in self._spoiled:
            return load or _Load(name, Path(path))
        if load is None:
            load = self._loads[key] = self._read(adapter, name, Path(path))
        self._compare(load)
        return load

    def _read(self, adapter: Any, name: str, path: Path) -> _Load:  # noqa: ANN401 - same
        try:
            state = files_state(path)
            found = [files_digest(path), self._settings]
        except (OSError, KvdockError) as error:
            self._spoil(name, f"{error}; pass the folder of its files as lora_path")
            return _Load(name, path)
        found += [str(adapter.base_model_name), str(adapter.is_3d_lora_weight)]
        return _Load(name, path, state, " ".join(found))

    def _compare(self, load: _Load) -> None:
        if load.name in self._spoiled:
            return
        try:
            same = files_state(load.path) == load.state
        except (OSError, KvdockError):
            same = False
        if not same:
            self._spoil(load.name, "its files have changed since it was loaded")

    def _spoil(self, name: str, why: str) -> None:
        if name not in self._spoiled:
            self._spoiled.add(name)
            self._log.warning(
                name,
                f"pages of requests with the adapter {name!r} are not stored: {why}. "
                "Load it under another name, or restart the engine",
            )


def watch_loads(core: type[Any], connectors: Callable[[Any], list[Any]]) -> bool:
    """Have connectors told of each adapter that is loaded without a request.

    vLLM informs a connector of requests alone, and its API loads adapters before
    there are any.

    Args:
        core: vLLM's `EngineCore`, whose `add_lora` is wrapped, once.
        connectors: Returns those connectors of an engine that have `adapter_loading`.

    Returns:
        Whether this vLLM has the method as it is known.
    """
    load = getattr(core, "add_lora", None)
    if load is None or [*inspect.signature(load).parameters] != [
        "self",
        "lora_request",
    ]:
        return False
    if hasattr(load, "of_kvdock"):
        return True

    @wraps(load)
    def add_lora(self: Any, lora_request: Any) -> Any:  # noqa: ANN401 - vLLM's
        for one in connectors(self):
            one.adapter_loading(lora_request)
        return load(self, lora_request)

    add_lora.of_kvdock = True  # type: ignore[attr-defined]
    core.add_lora = add_lora
    return True
