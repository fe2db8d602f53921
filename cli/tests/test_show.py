from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiny import Shelf


def test_a_backend_is_shown_with_all_it_declares(shelf: Shelf) -> None:
    shelf.add_backend("good")
    text = shelf.kvdock("list", "good").stdout
    assert text.startswith("good: a backend\n\n  distribution  kvdock-good 1.2.3\n")
    backend = json.loads(shelf.kvdock("list", "good", "--json").stdout)["backend"]
    assert backend["path"] == str(shelf.root / "kvdock_good.py")
    assert backend["kinds"]["mha"]["draft"] == "?"
    assert backend["settings"] == []


def test_a_broken_backend_is_a_problem(shelf: Shelf) -> None:
    shelf.add("bad", "import nowhere")
    done = shelf.kvdock("list", "bad", "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["schema"] == "kvdock.error/1"
    assert data["problems"][0]["stage"] == "import"


def test_an_unknown_backend_is_a_usage_error(shelf: Shelf) -> None:
    shelf.add_backend("good")
    done = shelf.kvdock("list", "god")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvdock: no backend 'god' is installed. Did you mean 'good'?\n"
    )
