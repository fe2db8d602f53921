"""Find the line of a plugin's own code that a failure leads to."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    import pluggy

    from kvdock.plugin.backend import Backend

_USUAL = "kvdock_batch_io"


@attrs.define(eq=False)
class Blame:
    """Knows a plugin's files and which of its hooks was called last.

    Args:
        root: The package of the plugin, or its one file.
        store: What the plugin returned for the last pool.
    """

    backend: Backend
    root: Path
    last: str = _USUAL
    store: object = None

    @classmethod
    def of(cls, backend: Backend) -> Blame:
        """Watch the hooks of a backend from now on."""
        file = Path(backend.plugin.path)
        whole = (file.parent / "__init__.py").exists()
        blame = cls(backend, file.parent if whole else file)
        backend.plugin.manager.add_hookcall_monitoring(blame.before, blame.after)
        return blame

    def before(self, hook_name: str, *_: object) -> None:
        """Note which hook is called."""
        # Batches may go to the plugin's function without the relay, and those
        # of a test come after its pool was registered.
        opens = hook_name == "kvdock_register_pool"
        self.last = _USUAL if opens else hook_name

    def after(self, outcome: pluggy.Result[object], hook_name: str, *_: object) -> None:
        """Note the store of a pool that was registered."""
        if hook_name == "kvdock_register_pool" and outcome.exception is None:
            self.store = outcome.get_result()

    def where(self, error: BaseException | None) -> str:
        """Return `file:line in function` of the plugin.

        That is the innermost of its frames in an error, or else the hook
        whose answer was wrong: the one that was called last.
        """
        for frame, line in _frames(error):
            code = frame.f_code
            file = Path(code.co_filename)
            if self.root in (file, *file.parents):
                return f"{code.co_filename}:{line} in {code.co_name}"
        return self.hook(self.last) or self.hook(_USUAL)

    def hook(self, name: str) -> str:
        """Return where the plugin answers a hook, or its store does, or ""."""
        if name not in self.backend.plugin.implemented:
            run = getattr(type(self.store), "run", None)
            return _place(run, "run") if run and name == _USUAL else ""
        caller: Any = getattr(self.backend.plugin.hooks, name, None)
        for implementation in caller.get_hookimpls() if caller else ():
            if implementation.wrapper or implementation.hookwrapper:
                continue
            place = _place(implementation.function, name)
            if place:
                return place
        return ""


def _place(function: Callable[..., object], name: str) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {name}" if code else ""


def _frames(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of an error and its causes, the innermost first."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from reversed(list(traceback.walk_tb(error.__traceback__)))
        error = error.__cause__ or error.__context__
