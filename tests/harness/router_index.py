"""What routers make of KV events: the rules of Dynamo's and llm-d's indexers.

Both are fed with the bytes that an engine publishes. Each class does what the
consumer's own code does with them, and no more.

Source: Dynamo (November 2026) `lib/kv-router/src/zmq_wire/`: `deserialize.rs`,
`mod.rs:ZmqEventNormalizer.preprocess_with_reason`, `types.rs:KvEventOwnership`,
`convert.rs:convert_event`, and `protocols.rs:StorageTier.from_kv_medium`;
llm-d-kv-cache 7be76e1 (June 2026) `pkg/kvevents/engineadapter/`: `vllm_adapter.go`,
`sglang_adapter.go`, `common.go:getHashAsUint64`, and `pool.go:processEventBatch`.
"""

from __future__ import annotations

import base64
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import attrs
import msgspec

WORD = 1 << 64
_TIERS = {
    **dict.fromkeys(("GPU", "DEVICE"), "device"),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "host"),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), "disk"),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), "external"),
}
_LLMD_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
        "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


def published(events: list[Any]) -> bytes:
    """Return the payload in which an engine publishes events."""
    return msgspec.msgpack.encode([0.0, events, 0])


@attrs.define(eq=False)
class DynamoIndex:
    """What Dynamo knows of one worker: by tier, the hashes of its blocks."""

    block_size: int
    tiers: dict[str, set[int]] = attrs.field(factory=lambda: defaultdict(set))
    dropped: Counter[str] = attrs.field(factory=Counter)

    def feed(self, payload: bytes) -> None:
        """Take one message."""
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            reason = self._take(event)
            if reason:
                self.dropped[reason] += 1

    def _take(self, event: dict[str, Any]) -> str:  # noqa: PLR0911 - one for each rule
        """Return why an event is dropped; "" if it is not."""
        if event.get("ownership") is not None:
            return "ownership"  # it knows "kvcr", in another stream
        if event.get("locality") not in (None, "LOCAL"):
            return "locality"
        if event["type"] == "AllBlocksCleared":
            self.tiers.clear()
            return ""
        medium = event.get("medium")
        if medium is not None and medium not in _TIERS:
            return "medium"
        tier = self.tiers[_TIERS[medium or "GPU"]]
        # Hashes are integers of 64 bits, with or without a sign; bytes are an error.
        names = [int(one) % WORD for one in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            tier.difference_update(names)
            return ""
        parent = event.get("parent_block_hash")
        family = names + ([] if parent is None else [int(parent) % WORD])
        if len(set(family)) < len(family):
            return "duplicate"
        if event["block_size"] != self.block_size:
            return "block size"
        if len(event["token_ids"]) != len(names) * self.block_size:
            return "tokens"
        tier.update(names)
        return ""


@attrs.define(eq=False)
class LlmdIndex:
    """What llm-d knows of one pod: request keys, and in which tiers each is.

    Its adapters decode positional events. Both engines publish maps by now, so the
    fields are put in the order that its adapters document.
    """

    tiers: dict[tuple[Any, ...], set[str]] = attrs.field(
        factory=lambda: defaultdict(set)
    )
    keys: dict[int, tuple[Any, ...]] = attrs.field(factory=dict)
    """Engine's hash to request key: what a request's tokens lead to."""
    dropped: Counter[str] = attrs.field(factory=Counter)

    def feed(self, payload: bytes) -> None:
        """Take one message."""
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            names = _LLMD_FIELDS[event["type"]]
            self._take(event["type"], *(event.get(name) for name in names))

    def _take(self, tag: str, *fields: Any) -> None:
        if tag == "AllBlocksCleared":
            self.tiers.clear()
            return
        names = [_word(one) for one in fields[0]]
        if tag == "BlockRemoved":
            for name in names:
                key = self.keys.get(name)
                if key is None:
                    self.dropped["unknown"] += 1
                else:
                    self.tiers[key].discard((fields[1] or "gpu").lower())
            return
        _, parent, tokens, size, _, medium, *_ = fields
        above: tuple[Any, ...] = ()
        if parent is not None:
            found = self.keys.get(_word(parent))
            if found is None:
                self.dropped["parent"] += 1
                return
            above = found
        for at, name in enumerate(names):
            above = (hash(above), *tokens[at * size : (at + 1) * size])
            self.keys[name] = above
            self.tiers[above].add((medium or "gpu").lower())

    def holds(self, tier: str) -> set[int]:
        """Return the engine's hashes of what is in a tier."""
        return {name for name, key in self.keys.items() if tier in self.tiers[key]}


def _word(given: int | bytes) -> int:
    """Return a hash as llm-d keeps it: the last eight bytes."""
    if isinstance(given, bytes):
        return int.from_bytes(given[-8:], "big")
    return given % WORD


def finish(process: subprocess.Popen[bytes], folder: Path, timeout_s: float) -> None:
    """Wait for a load that writes down its events; it has to end well."""
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    assert code == 0, (folder / "log").read_text()[-4000:]


def replay(folder: Path, page_tokens: int) -> tuple[DynamoIndex, LlmdIndex]:
    """Give each message that was recorded to both routers' indexes."""
    dynamo, llmd = DynamoIndex(page_tokens), LlmdIndex()
    for line in (folder / "events").read_text().split():
        for index in (dynamo, llmd):
            index.feed(base64.b64decode(line))
    assert not dynamo.dropped, dynamo.dropped
    return dynamo, llmd
