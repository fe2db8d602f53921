"""Fill the schemas of hints' payloads from `kvdock.hints`.

Usage: python docs/fill_hints.py [--check]
"""

from __future__ import annotations

import json
import sys

from generated import DOCS, between, write_or_compare

from kvdock.hints import payload_schemas
from kvdock.hints.envelope import MOST_ACTIONS, MOST_BYTES
from kvdock.units import format_bytes

PAGE = DOCS / "reference" / "hints.md"


def page() -> str:
    """Return the page with fresh schemas and bounds."""
    parts = []
    for (kind, version), schema in payload_schemas().items():
        about = schema["description"]
        shown = {key: value for key, value in schema.items() if key != "description"}
        text = json.dumps(shown, indent=2)
        parts.append(f"## {kind}, version {version}\n\n{about}\n\n")
        parts.append(f"```json\n{text}\n```\n\n")
    text = between(PAGE.read_text(), "schemas", "".join(parts))
    bounds = (
        f"An envelope has {format_bytes(MOST_BYTES)} of JSON and {MOST_ACTIONS} "
        "actions at most.\n"
    )
    return between(text, "bounds", bounds)


if __name__ == "__main__":
    write_or_compare({PAGE: page()}, sys.argv[1:])
