"""Models of tests that no shipped description covers."""

from __future__ import annotations

from kvdock.models.description import (
    ModelDescription,
    parse_description,
)


def second_geometry() -> ModelDescription:
    window = {"family": "swa", "heads": 2, "window": 128}
    return parse_description(
        "two-windows",
        {
            "model": "m",
            "summary": "two window geometries and a keys-only indexer",
            "layers": 4,
            "page_tokens": 64,
            "pools": [
                {
                    "family": "mha",
                    "name": "kv",
                    "anchor": True,
                    "layers": "0",
                    "heads": 2,
                    "head_dim": 8,
                    "v_head_dim": 4,
                },
                window | {"name": "swa", "layers": [1, 2], "head_dim": 8},
                window | {"name": "auxiliary_swa", "layers": "3", "head_dim": 16},
                {
                    "family": "k_only",
                    "name": "indexer",
                    "indices_from": "kv",
                    "layers": "0",
                    "heads": 2,
                    "head_dim": 4,
                },
            ],
        },
    )
