"""NIXL is found, refused or loaded, and the process stays as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from kvdock import Capability
from kvdock.errors import PluginError
from kvdock_nixl import library, plugin

QUIET = """
import json, logging, os, sys
stream = open(os.devnull, "w")
handler = logging.StreamHandler(stream)
handler.close = lambda: print("closed", file=sys.stderr)
logging.getLogger().addHandler(handler)
level = os.environ.get("NIXL_LOG_LEVEL")
from kvdock_nixl.library import load
library = load()
print(json.dumps({
    "torch": "torch" in sys.modules,
    "raise": logging.raiseExceptions,
    "handlers": len(logging.getLogger("nixl").handlers),
    "level": level == os.environ.get("NIXL_LOG_LEVEL"),
    "version": library.version,
}), flush=True)
os._exit(0)  # handlers are closed when Python ends
"""


def test_loading_it_imports_no_torch_and_leaves_the_logging_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "torch": False,
        "raise": True,
        "handlers": 0,
        "level": True,
        "version": metadata.version("nixl-cu12"),
    }
    assert done.stderr == ""


def test_discovering_the_backend_loads_nothing_of_nixl() -> None:
    code = (
        "import sys; from kvdock import Dock; Dock.load(require=['nixl']); "
        "print([name for name in sys.modules if name.startswith('nixl')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("version", ["1.4.1", "1.4.0.post1", "0.9.0"])
def test_a_release_that_loses_data_is_rejected(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(PluginError, match="loses data") as raised:
        library.load()
    assert "nixl-cu12>=1.5" in raised.value.fix


def test_without_a_wheel_the_error_says_which_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(PluginError, match="NIXL is not installed") as raised:
        library.load()
    assert "kvdock-nixl[cu12]" in raised.value.fix
    # Routing says so before any pool is attached.
    ask: Any = plugin.kvdock_check_capability
    for capability in (Capability.PEERS, Capability.STORE):
        verdict = ask(capability=capability, pool=None, shard=None, settings=None)
        direct = capability is Capability.PEERS
        assert ("NIXL is not installed" in str(verdict)) is direct


@pytest.mark.parametrize(
    ("cuda", "loaded", "chosen"),
    [
        (None, "", "nixl_cu12"),
        ("13.0", "", "nixl_cu13"),
        ("12.8", "", "nixl_cu12"),
        ("13.0", "nixl_cu12._bindings", "nixl_cu12"),
    ],
)
def test_the_wheel_is_the_one_that_is_loaded_or_that_torch_is_built_for(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, loaded: str, chosen: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.5.1")

    class Torch:
        class version:  # noqa: N801 - torch's own name
            pass

    Torch.version.cuda = cuda  # type: ignore[attr-defined]
    for name in ("nixl_cu12._bindings", "nixl_cu13._bindings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", Torch)
    if loaded:
        monkeypatch.setitem(sys.modules, loaded, Torch)
    assert library._choose() == chosen
