"""A storage class of SGLang's HiCache: found by name, built, and called.

Source: SGLang 0.5.23, `mem_cache.hicache_storage.HiCacheStorage`.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from typing import TYPE_CHECKING, Any

from kvdock.errors import AttachError
from kvdock_hicache.host_pages import HostPages, blank_heads
from kvdock_hicache.settings import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock_hicache.host_pages import Tensor
    from kvdock_hicache.settings import HiCacheSettings

READS, WRITES = 0, 1
"""Halves of the memory."""

_METHODS = {
    Form.GENERIC: ("batch_get", "batch_set"),
    Form.V1: ("batch_get_v1", "batch_set_v1"),
    Form.V2: ("batch_get_v2", "batch_set_v2"),
}


def find_class(path: str) -> tuple[type, Any]:
    """Return a class, and the module of the contract that it stands on.

    Args:
        path: MODULE:CLASS.

    Raises:
        AttachError: If there is none, or it is no storage class.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a stranger's module may raise anything
        raise AttachError(
            f"the storage class {path} cannot be imported: {error}",
            fix="Install what it needs into this environment, SGLang included.",
        ) from error
    ancestors = inspect.getmro(found) if inspect.isclass(found) else ()
    for one in ancestors[1:]:
        if one.__name__ == "HiCacheStorage":
            return found, importlib.import_module(one.__module__)
    raise AttachError(
        f"{path} does not stand on SGLang's HiCacheStorage",
        fix="Name a class that SGLang takes as a storage backend.",
    )


def choose_form(cls: type, asked: Form) -> Form:
    """Return the form in which a class is called.

    Raises:
        AttachError: If it does not define the methods.
    """
    if asked is Form.AUTO:
        return Form.V1 if _defines(cls, Form.V1) else Form.GENERIC
    if not _defines(cls, asked):
        missing = " and ".join(_METHODS[asked])
        raise AttachError(
            f"{cls.__qualname__} does not define {missing}",
            fix="Choose another form; auto takes what is there.",
        )
    return asked


def _defines(cls: type, form: Form) -> bool:
    """Return whether methods are a class's own and not its base's, which do nothing."""
    for name in _METHODS[form]:
        owner = next((one for one in cls.__mro__ if name in vars(one)), object)
        if owner.__name__ in ("HiCacheStorage", "object"):
            return False
    return True


class ClassStorage:
    """One object of a storage class, for all pools of an attachment.

    Calls of one kind exclude each other, as SGLang's one thread for each kind does.

    Args:
        settings: Which class, and how it is built and called.

    Raises:
        AttachError: If it cannot be built.
    """

    def __init__(self, settings: HiCacheSettings) -> None:
        cls, self._contract = find_class(settings.storage_class)
        self.form = choose_form(cls, settings.form)
        self.name = cls.__qualname__
        self.batch_keys = settings.batch_keys
        self.users = 0
        self.reading, self.writing, self.asking = (threading.Lock() for _ in range(3))
        try:
            self.pages = HostPages(settings.memory, settings.batch_keys)
            self._object = self._build(cls, settings)
            self._object.register_mem_pool_host(self.pages)
            if self.form is Form.V2:
                pool = self._contract.PoolName.KV
                self._object.register_mem_host_pool_v2(self.pages, pool)
            self._object.on_host_pools_registered()
        except Exception as error:
            raise AttachError(
                f"{self.name} cannot be built: {type(error).__name__}: {error}",
                fix="See the class's own documentation for extra_config and arguments.",
            ) from error

    def _build(self, cls: type, settings: HiCacheSettings) -> Any:  # noqa: ANN401 - any class
        config = self._contract.HiCacheStorageConfig(
            # One rank, and an MLA model: a page is one object under one key.
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
            extra_config=dict(settings.extra_config),
        )
        given = dict(settings.arguments)
        second = list(inspect.signature(cls).parameters.values())[1:2]
        positional: list[object] = [config]
        for one in second:
            is_pool = "pool" in one.name
            if one.name not in given and (is_pool or one.default is one.empty):
                positional.append(self.pages if is_pool else {})
        return cls(*positional, **given)

    def fits(self, rows: int, row_bytes: int) -> bool:
        """Return whether the class can be told of so many rows by index."""
        by_address = self.form is Form.GENERIC
        return by_address or rows * row_bytes <= self.pages.half_bytes

    def present(self, names: Sequence[str]) -> list[bool]:
        """Return which names the class finds, each for itself.

        The class counts from the front, so it is asked again behind each gap.
        """
        found: list[bool] = []
        while len(found) < len(names):
            rest = list(names[len(found) :])
            count = int(self._object.batch_exists(rest))
            if not 0 <= count <= len(rest):
                raise ValueError(f"batch_exists of {len(rest)} keys answered {count}")
            found += [True] * count
            found += [False] * (count < len(rest))
        return found

    def write(self, names: Sequence[str], rows: Tensor) -> list[bool]:
        """Store rows of the second half; return which are stored.

        Where the class has one answer for all of them, and it is no, those count
        that it finds now.
        """
        keys = list(names)
        if self.form is Form.GENERIC:
            said = self._object.batch_set(keys, list(rows))
            if isinstance(said, bool):
                return [True] * len(keys) if said else self.present(keys)
        else:
            said = self._indexed("set", keys, WRITES)
        return self._each(said, len(keys))

    def read(self, names: Sequence[str], rows: Tensor) -> list[Tensor | None]:
        """Load into rows of the first half; return a frame for each that came."""
        keys = list(names)
        blank_heads(rows)
        if self.form is not Form.GENERIC:
            said = self._each(self._indexed("get", keys, READS), len(keys))
            return [row if ok else None for row, ok in zip(rows, said, strict=True)]
        said = self._object.batch_get(keys, list(rows))
        if isinstance(said, int):  # how many from the front, in the rows themselves
            return [row if at < said else None for at, row in enumerate(rows)]
        if len(said) != len(keys):
            raise ValueError(f"batch_get of {len(keys)} keys answered {len(said)}")
        return list(said)

    def _indexed(self, verb: str, keys: list[str], half: int) -> Any:  # noqa: ANN401 - the class's answer
        indices = self.pages.indices(half, len(keys))
        if self.form is Form.V1:
            return getattr(self._object, f"batch_{verb}_v1")(keys, indices)
        pool = self._contract.PoolName.KV
        transfer = self._contract.PoolTransfer(
            name=pool, host_indices=indices, keys=keys
        )
        return getattr(self._object, f"batch_{verb}_v2")([transfer])[pool]

    def _each(self, said: Any, count: int) -> list[bool]:  # noqa: ANN401 - the class's answer
        found = [one is True or one == 1 for one in said]
        if len(found) != count:
            raise ValueError(f"{count} keys were answered with {len(found)}")
        return found

    def close(self) -> None:
        """Close the class's object, if it can be closed."""
        close = getattr(self._object, "close", None)
        if close is not None:
            close()
