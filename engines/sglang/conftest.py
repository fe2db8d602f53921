"""Leave out what cannot be imported where SGLang is not installed."""

from __future__ import annotations

from importlib.util import find_spec

# The stand-in is a package of its own, not a part of the tests.
collect_ignore = ["tests/standin", "tests/environment.py"]
if find_spec("sglang") is None:
    collect_ignore += ["src/kvdock_sglang/storage.py", "tests/engine"]
