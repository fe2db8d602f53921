"""Options of stored objects: replicas, pins, segments, and the group of a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from kvdock_mooncake.settings import OWN_SEGMENT, Pin

if TYPE_CHECKING:
    from kvdock_mooncake.library import Library
    from kvdock_mooncake.settings import MooncakeSettings

_NAMESPACE_END = 3
_PAGE_START = 8

MOST_PIN_S = 24 * 3600
"""The longest soft pin that a master takes, unless it was started with another."""


@attrs.frozen(eq=False)
class PutOptions:
    """Makes the library's record of how to store, one for each call.

    `prefer_alloc_in_same_node` is never set: reads that use it do not check
    their lease and return wrong bytes (Mooncake#4239).
    """

    library: Library
    fields: Mapping[str, object]

    @classmethod
    def of(cls, library: Library, settings: MooncakeSettings, store: Any) -> PutOptions:  # noqa: ANN401 - the library's own class
        """Return what a store with these settings needs."""
        fields: dict[str, object] = {"replica_num": settings.replicas}
        if settings.pin is Pin.HARD:
            fields["with_hard_pin"] = True
        elif settings.pin is Pin.SOFT and library.soft_pin is not None:
            fields["soft_pin_action"] = library.soft_pin
            if settings.soft_pin_ttl_s:
                fields["soft_pin_ttl_ms"] = int(settings.soft_pin_ttl_s * 1000)
        elif settings.pin is Pin.SOFT:
            fields["with_soft_pin"] = True
        segments = [
            store.get_hostname() if name == OWN_SEGMENT else name
            for name in settings.segments
        ]
        if len(segments) == 1:
            fields["preferred_segment"] = segments[0]
        elif segments:
            fields["preferred_segments"] = segments
        return cls(library, MappingProxyType(fields))

    def config(self, keys: Sequence[str] = (), keep_until: int = 0) -> Any:  # noqa: ANN401 - the library's own class
        """Return the record for a put.

        The objects of a page are one group, over all pools: the master evicts them
        together. Without it, 35 of 195 pages of two pools were left with one of them
        when only that had been read (measured with 0.3.13). `keep_until` says until
        when it outlasts what is not pinned, seconds since 1970; 0 for the pin of the
        settings.
        """
        config = self.library.put_config_class()
        for name, value in self.fields.items():
            setattr(config, name, value)
        hard = "with_hard_pin" in self.fields
        if keep_until and self.library.soft_pin_ttl and not hard:
            left_s = min(keep_until - time.time(), MOST_PIN_S)
            config.soft_pin_action = self.library.soft_pin
            config.soft_pin_ttl_ms = max(1, int(left_s * 1000))
        if keys and self.library.groups:
            config.group_ids = groups_of(keys)
        return config


def groups_of(keys: Sequence[str]) -> list[str]:
    """Return the group of each key: its namespace and its page.

    Of long ones 3 and 8 characters do, which C++ keeps without an allocation: of ten
    million pages one in four hundred shares a group by chance, and is evicted with
    the other one.
    """
    slash, dot = keys[0].find("/"), keys[0].find(".")
    if slash < _NAMESPACE_END or dot - slash <= _PAGE_START:
        return [key.partition(".")[0] for key in keys]
    start, stop = slash - _NAMESPACE_END, slash + 1 + _PAGE_START
    return [key[start:stop] for key in keys]
