"""A storage class of SGLang's HiCache: found by name, built, and called.

Source: SGLang 0.5.23, `mem_cache.hicache_storage.HiCacheStorage`.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import AttachError
from kvdock_hicache.host_pages import HostPages
from kvdock_hicache.settings import Form

if TYPE_CHECKING:
    from kvdock_hicache.host_pages import Tensor
    from kvdock_hicache.settings import HiCacheSettings

_BASE = "HiCacheStorage"
_ENDS = {Form.GENERIC: "", Form.V1: "_v1", Form.V2: "_v2"}


@attrs.frozen
class FoundClass:
    """A storage class, the module of its contract, and the form of its calls."""

    cls: type
    contract: Any
    form: Form

    @classmethod
    def of(cls, settings: HiCacheSettings) -> FoundClass:
        """Import the class that is named, and look at its methods."""
        path = settings.storage_class
        module, _, name = path.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # a stranger's module may raise anything
            raise AttachError(
                f"the storage class {path!r} cannot be imported: {error}",
                fix="Name it as MODULE:CLASS, and install what it needs, SGLang too.",
            ) from error
        mro = inspect.getmro(found) if inspect.isclass(found) else ()
        base = next((one for one in mro[1:] if one.__name__ == _BASE), None)
        if base is None:
            raise AttachError(
                f"{path} does not stand on SGLang's {_BASE}",
                fix="Name a class that SGLang takes as a storage backend.",
            )
        form, v1 = settings.form, _defines(found, base, Form.V1)
        if form is Form.AUTO:
            form = Form.V1 if v1 else Form.GENERIC
        if not _defines(found, base, form):
            raise AttachError(
                f"{path} does not define batch_get{_ENDS[form]} and its batch_set",
                fix="Choose another form; auto takes what is there.",
            )
        return cls(found, importlib.import_module(base.__module__), form)


def _defines(found: type, base: type, form: Form) -> bool:
    """Return whether it has methods of its own: those of the base do nothing."""
    names = (f"batch_get{_ENDS[form]}", f"batch_set{_ENDS[form]}")
    return all(getattr(found, one) is not getattr(base, one) for one in names)


class ClassStorage:
    """One object of a storage class, for all pools of an attachment.

    Calls of one kind exclude each other: SGLang has one thread for each kind.

    Raises:
        AttachError: If it cannot be built.
    """

    def __init__(self, settings: HiCacheSettings) -> None:
        self._found = FoundClass.of(settings)
        self.name = self._found.cls.__qualname__
        self.by_index = self._found.form is not Form.GENERIC
        self.users = 0
        self.reading, self.writing, self.asking = (threading.Lock() for _ in range(3))
        try:
            self.pages = HostPages(settings.memory, settings.batch_keys)
            self._object = self._build(settings)
            self._object.register_mem_pool_host(self.pages)
            if self._found.form is Form.V2:
                kv = self._found.contract.PoolName.KV
                self._object.register_mem_host_pool_v2(self.pages, kv)
            self._object.on_host_pools_registered()
        except Exception as error:
            raise AttachError(
                f"{self.name} cannot be built: {type(error).__name__}: {error}",
                fix="Look for what the class needs in extra_config.",
            ) from error

    def _build(self, settings: HiCacheSettings) -> Any:  # noqa: ANN401 - any class
        """Build it as one rank, with an MLA model: a page is one object, one key."""
        config = self._found.contract.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="kvdock",
            extra_config=settings.extra_config,
        )
        second = list(inspect.signature(self._found.cls).parameters.values())[1:2]
        # SGLang's own classes take a pool, those of others a dict of options.
        if second and "pool" in second[0].name:
            return self._found.cls(config, self.pages)
        if second and second[0].default is second[0].empty:
            return self._found.cls(config, {})
        return self._found.cls(config)

    def present(self, names: list[str]) -> list[bool]:
        """Return which names the class finds, each for itself.

        The class counts from the front, so it is asked again behind each gap.
        """
        found: list[bool] = []
        while len(found) < len(names):
            count = int(self._object.batch_exists(names[len(found) :]))
            found += [True] * count + [False]
        return found[: len(names)]

    def write(self, names: list[str], rows: Tensor, indices: Tensor) -> list[bool]:
        """Store rows; return which are stored.

        Where the class says no to all of them at once, those count that it finds.
        """
        said: object
        if self.by_index:
            said = self._by_index("set", names, indices)
        else:
            said = self._object.batch_set(names, list(rows))
        if isinstance(said, list):
            return [one is True for one in said]
        return [True] * len(names) if said is True else self.present(names)

    def read(self, names: list[str], rows: Tensor, indices: Tensor) -> list[Tensor]:
        """Load into rows; return for each what came, a row or the class's own."""
        if not self.by_index:
            return list(self._object.batch_get(names, list(rows)))
        said = self._by_index("get", names, indices)
        return [row if ok else None for row, ok in zip(rows, said, strict=True)]

    def _by_index(self, verb: str, names: list[str], indices: Tensor) -> Any:  # noqa: ANN401 - the class's answer
        move = getattr(self._object, f"batch_{verb}{_ENDS[self._found.form]}")
        if self._found.form is Form.V1:
            return move(names, indices)
        kv = self._found.contract.PoolName.KV
        transfer = self._found.contract.PoolTransfer(kv, indices, keys=names)
        return move([transfer])[kv]

    def close(self) -> None:
        """Close the class's object, if it can be closed."""
        if hasattr(self._object, "close"):
            self._object.close()
