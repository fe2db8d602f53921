"""The places of the bytes of pages, and what two sides of a transfer share.

`region` turns page indices into addresses, `grid` names the parts of a page,
`matching` finds what a sender and a receiver have in common, `address_ranges` and
`peer_rows` join and check rows of memory.
"""
