"""What a release of vLLM that is not installed has changed."""

from __future__ import annotations

from signatures import differences, interface

BEFORE = """
class SecondaryTierManager:
    medium: str
    def __init__(self, spec, view=None, *, more, other=1):
        self.rows: int = 0
    def lookup(self, key): ...
def free(one): ...
"""


def test_arguments_are_read_with_those_that_may_be_left_out() -> None:
    assert interface(BEFORE) == {
        "SecondaryTierManager": "a class",
        "SecondaryTierManager.medium": "a field",
        "SecondaryTierManager.__init__": "(self, spec, view=, *more, *other=)",
        "SecondaryTierManager.rows": "a field",
        "SecondaryTierManager.lookup": "(self, key)",
        "free": "(one)",
    }


def test_a_changed_and_a_lost_name_are_reported() -> None:
    path = "vllm/v1/kv_offload/tiering/base.py"
    after = BEFORE.replace("self, key", "self, key, fast=False").replace(
        "def __init__", "def made"
    )
    found = differences({path: BEFORE}.get, {path: after}.get)
    mine = [line.split(": ", 1)[1] for line in found if line.startswith(path)]
    assert "SecondaryTierManager.__init__ is gone" in mine
    assert "SecondaryTierManager.lookup is (self, key, fast=), was (self, key)" in mine
