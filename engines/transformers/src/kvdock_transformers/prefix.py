"""Page hashes: which pages of a prompt are the same pages."""

import hashlib
import struct
from collections.abc import Sequence

_ROOT = bytes(32)


def page_hashes(token_ids: Sequence[int], page_tokens: int) -> list[str]:
    """Return a SHA-256 digest in hex for each full page, chained to all before it.

    A page's digest covers its parent's digest and its own token ids, so two
    prompts share a digest only where they agree from the first token on. A
    last page that is not full has no hash: it will still change.
    """
    if page_tokens < 1:
        message = f"page_tokens must be at least 1, not {page_tokens}"
        raise ValueError(message)
    digests = []
    parent = _ROOT
    for first in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        page = token_ids[first : first + page_tokens]
        parent = hashlib.sha256(
            parent + struct.pack(f"<{page_tokens}q", *page)
        ).digest()
        digests.append(parent.hex())
    return digests
