"""The places of the bytes of pages, and what two sides of a transfer share.

`region` turns page indices into addresses, `grid` names the parts of a page,
`matching` finds what a sender and a receiver have in common, `address_ranges` and
`peer_rows` join and check rows of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.geometry.address_ranges import AddressRanges as AddressRanges
    from kvdock.geometry.peer_rows import send_rows as send_rows
    from kvdock.geometry.region import Block as Block
    from kvdock.geometry.region import Region as Region
    from kvdock.geometry.region import block_of as block_of

__getattr__, __dir__, __all__ = lazy_names(__name__)
