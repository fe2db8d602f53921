"""How names of an engine are looked up, on modules that stand for one."""

from __future__ import annotations

import functools
import pkgutil
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import attrs
import pytest

from kvdock.errors import KvdockError
from kvdock_sglang import engine_api
from kvdock_sglang.engine_api import Used


class Arguments:
    """Fields with and without a default, one of them inherited."""

    model_path: str
    dtype: str = "auto"


class MoreArguments(Arguments):
    """A class with a method of its own."""

    def resolve(self, view: object) -> object:
        return (view, self.dtype)


def attach(storage: str, config: object = None, **options: object) -> object:
    return (storage, config, options.get("width"))


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("sglang.srt"), ModuleType("sglang.srt.engine")
    found: Any = module
    found.MoreArguments, found.attach = MoreArguments, attach
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", package)
    monkeypatch.setitem(sys.modules, "sglang.srt.engine", module)
    monkeypatch.setattr(package, "engine", module, raising=False)
    monkeypatch.setattr(sys.modules["sglang"], "srt", package, raising=False)
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.0")


def test_what_is_there_is_not_missing() -> None:
    used = (
        Used("sglang.srt.engine.MoreArguments", members=("model_path", "dtype")),
        Used("sglang.srt.engine.MoreArguments.resolve", parameters=("view",)),
        Used(
            "sglang.srt.engine.attach",
            parameters=("storage", "config"),
            reads=("get",),
        ),
    )
    assert engine_api.missing(used) == ()
    engine_api.check(used)


@pytest.mark.parametrize(
    ("used", "named"),
    [
        (Used("sglang.srt.engine.detach"), "sglang.srt.engine.detach"),
        (Used("sglang.srt.gone.attach"), "sglang.srt.gone.attach"),
        (
            Used("sglang.srt.engine.MoreArguments", members=("quantization",)),
            "engine.MoreArguments.quantization",
        ),
        (
            Used("sglang.srt.engine.attach", parameters=("pool",)),
            "engine.attach(pool)",
        ),
        (
            Used("sglang.srt.engine.attach", reads=("get_parallel",)),
            "get_parallel in engine.attach",
        ),
    ],
)
def test_what_is_missing_is_named_and_stops_the_engine(used: Used, named: str) -> None:
    (found,) = engine_api.missing([used])
    assert found.startswith(named)
    with pytest.raises(KvdockError) as raised:
        engine_api.check([used])
    assert "SGLang 0.6.0 lacks" in raised.value.what
    assert named in raised.value.what
    assert engine_api.TESTED[0] in raised.value.fix


def test_an_engine_that_fails_while_it_is_imported_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(pkgutil, "resolve_name", fail)
    (found,) = engine_api.missing([Used("sglang.srt.engine.attach")])
    assert "RuntimeError: no CUDA driver" in found


def test_a_function_that_is_wrapped_is_looked_at_inside() -> None:
    @functools.wraps(attach)
    def wrapper(*args: object, **options: object) -> object:
        return attach(*args, **options)  # type: ignore[arg-type]

    sys.modules["sglang.srt.engine"].attach = wrapper  # type: ignore[attr-defined]
    used = Used("sglang.srt.engine.attach", parameters=("config",), reads=("get",))
    assert used.missing() == ()


def test_every_entry_of_the_table_asks_for_something_of_sglang() -> None:
    for used in engine_api.STORAGE:
        assert used.path.startswith("sglang.srt.")
        assert attrs.asdict(used)
