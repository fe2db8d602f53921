"""KV events of what storage has, for routers, where SGLang publishes KV events.

SGLang tells routers of blocks in device and host memory, each with the tokens and the
parent that its tree has. Storage knows hashes alone. So when a node is written, the
events that SGLang itself would send for it are noted by page hash; as soon as storage
has a page its event is sent, and when the page is gone its removal. All of this runs
on the scheduler's thread: what storage reports waits until SGLang takes its events.

Source: SGLang 0.5.23, `mem_cache/events.py:KVCacheEventRecorder`,
`disaggregation/kv_events.py:StorageMedium`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from kvdock import Scope
from kvdock.events import PageHomes
from kvdock_sglang.pool_names import EnginePool

if TYPE_CHECKING:
    from kvdock.events import PageEvent

EVENT_PAGES = 1 << 18
"""Pages that KV events keep track of, where the settings do not say."""


def published() -> bool:
    """Return whether this engine publishes KV events."""
    with suppress(Exception):  # a launch that cannot be read stops the engine later
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - the engine

        return bool(get_server_args().kv_events_config)
    return False


@attrs.define(eq=False)
class RouterEvents:
    """What routers are told of the pages of one engine's storage.

    Args:
        limit: Most pages that are noted, and most that were announced; the oldest
            are forgotten first.
    """

    limit: int
    medium: Any = None
    _noted: dict[str, Any] = attrs.field(factory=dict, init=False)
    _announced: dict[str, int] = attrs.field(factory=dict, init=False)
    _homes: PageHomes = attrs.field(
        init=False, default=attrs.Factory(lambda one: PageHomes(one.limit), True)
    )

    def place(self, reach: Scope) -> None:
        """Choose the medium by how far others find what is stored."""
        from sglang.srt.disaggregation.kv_events import (  # noqa: PLC0415 - the engine
            StorageMedium,
        )

        far = reach is Scope.CLUSTER
        self.medium = StorageMedium.EXTERNAL if far else StorageMedium.DISK

    def note(self, tree: Any, node_id: Any) -> None:  # noqa: ANN401 - SGLang's
        """Keep the events of a node that is about to be written, page by page."""
        recorder = tree.kv_events
        if not recorder.enabled:
            return
        try:
            node = tree.node_by_id(node_id)
        except NotImplementedError:  # its tree in Rust has no nodes to look at
            return
        # SGLang's own recorder makes them; a queue of its own keeps pages apart.
        scratch: Any = object.__new__(type(recorder))
        vars(scratch).update(vars(recorder), _queue=_Apart())
        scratch.record_store(node, medium=self.medium)
        _add(
            self._noted, zip(node.hash_value, scratch.take(), strict=False), self.limit
        )

    def take(self, taken: Iterable[Any], pages: Iterable[PageEvent]) -> Iterator[Any]:
        """Yield SGLang's events, then those of what storage reports."""
        from sglang.srt.disaggregation.kv_events import (  # noqa: PLC0415 - the engine
            AllBlocksCleared,
            BlockRemoved,
        )

        for event in taken:
            if isinstance(event, AllBlocksCleared):
                self._announced.clear()  # routers forget storage's blocks as well
            yield event
        for page in pages:
            if page.pool != EnginePool.KV:
                continue
            for stored, _, hashes in self._homes.moved(page, ()):
                if not stored:
                    gone = [self._announced.pop(one, None) for one in hashes]
                    known = [one for one in gone if one is not None]
                    if known:
                        yield BlockRemoved(block_hashes=known, medium=self.medium)
                    continue
                for one in hashes:
                    event = self._noted.get(one)
                    if event is not None:
                        self._announced[one] = event.block_hashes[0]
                        yield msgspec.structs.replace(event)


class _Apart(list[Any]):
    """A queue that looks empty, so that no event is joined with the one before."""

    def __bool__(self) -> bool:
        return False


def _add(known: dict[str, Any], more: Iterable[tuple[str, Any]], limit: int) -> None:
    for name, value in more:
        known.pop(name, None)
        known[name] = value
    while len(known) > limit:
        del known[next(iter(known))]
