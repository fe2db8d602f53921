"""Names that requests give to images are the hash of nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvdock_vllm.named_media import keep_names_apart


def inputs() -> type[Any]:
    """Return a class of the shape of vLLM's `ProcessorInputs`."""

    @dataclass
    class Inputs:
        items: dict[str, list[str]]
        mm_uuid_items: dict[str, list[str | None]] | None = None
        asked: list[object] = field(default_factory=list)

        def get_mm_hashes(self, model: str, algorithm: str) -> dict[str, list[str]]:
            self.asked.append((model, algorithm))
            names = self.mm_uuid_items or {}
            return {
                kind: [
                    name or f"hash of {item}"
                    for item, name in zip(
                        items, names.get(kind, [None] * len(items)), strict=True
                    )
                ]
                for kind, items in self.items.items()
            }

    return Inputs


def test_a_name_is_no_hash_of_another_image_and_stays_the_same() -> None:
    kind = inputs()
    for _ in range(2):
        keep_names_apart(kind)
    one = kind({"image": ["cat", "dog"], "audio": ["bell"]})
    plain = {"image": ["hash of cat", "hash of dog"], "audio": ["hash of bell"]}
    assert one.get_mm_hashes("model", algorithm="blake3") == plain
    assert one.asked == [("model", "blake3")]
    named = kind(one.items, {"image": ["hash of dog", None]})
    found = named.get_mm_hashes("model", algorithm="blake3")
    assert found["image"][1] == "hash of dog"
    assert found["image"][0].endswith(":hash of dog")
    assert found == named.get_mm_hashes("model", algorithm="blake3")
    assert named.mm_uuid_items == {"image": ["hash of dog", None]}
