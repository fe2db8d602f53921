"""LoRA adapters by the content of their files.

vLLM's block hashes have an adapter's name and path, and neither says which weights
lie there. A request whose adapter cannot be identified is served and not stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.errors import KvdockError
from kvdock_vllm.weights import files_digest, files_state

if TYPE_CHECKING:
    from kvdock import ThrottledLog

UNKNOWN = "?"
"""Identity of an adapter that cannot be identified."""

_State = tuple[tuple[str, int, int, int], ...]


class AdapterFiles:
    """The adapters of the requests under way; the scheduler's thread changes them.

    Args:
        log: Where adapters are named that cannot be identified.
    """

    def __init__(self, log: ThrottledLog) -> None:
        self._log = log
        self._by_request: dict[str, str] = {}
        self._digests: dict[str, tuple[_State, str]] = {}

    def begin(self, request_id: str, adapter: Any) -> None:  # noqa: ANN401 - vLLM's LoRARequest or None
        """Remember which adapter a request uses."""
        if adapter is not None:
            self._by_request[request_id] = self._identity(str(adapter.lora_path))

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._by_request.pop(request_id, None)

    def of(self, request_id: str) -> str:
        """Return the identity of a request's adapter; "" where it uses none."""
        return self._by_request.get(request_id, "")

    def _identity(self, path: str) -> str:
        """Return the digest of an adapter's files; read again when they change."""
        try:
            state = files_state(Path(path))
            known = self._digests.get(path)
            if known is None or known[0] != state:
                known = self._digests[path] = (state, files_digest(Path(path)))
            return known[1]
        except (OSError, KvdockError) as error:
            self._log.warning(
                path,
                f"pages of requests with the adapter {path!r} are not stored: {error}; "
                "pass the folder that holds its files as lora_path",
            )
            return UNKNOWN
