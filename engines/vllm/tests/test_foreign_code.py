"""Code that is not vLLM's own, where vLLM need not be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvdock.errors import NamespaceError
from kvdock_vllm.foreign_code import code_of, foreign_code, loaded_plugins

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return what writes a file that this process can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}

    def write(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in {*sys.modules} - before:
        del sys.modules[name]


def config(**parallel: Any) -> Any:
    """Return as much of a configuration as names code."""
    known = {
        "worker_cls": "vllm.v1.worker.gpu_worker.Worker",
        "worker_extension_cls": "",
        "distributed_executor_backend": "uni",
    }
    model = SimpleNamespace(
        trust_remote_code=False,
        using_transformers_backend=lambda: False,
        architectures=["Own"],
        registry=SimpleNamespace(models={}),
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**known, **parallel}),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        compilation_config=SimpleNamespace(
            backend="inductor", inductor_passes={}, custom_ops=["all"], mode=0
        ),
        kernel_config=SimpleNamespace(ir_op_priority=()),
        speculative_config=None,
        model_config=model,
    )


def test_nothing_stands_for_code_that_is_vllms_own() -> None:
    for name in ("vllm.v1.worker.Worker", "torch.nn:Module", "abc.ABC", "builtins.int"):
        assert code_of(name) == ""
    assert not {one for one in foreign_code(config()) if "plugin" not in one}


def test_every_file_of_a_package_counts_by_whatever_name_it_is_reached(
    write: Write,
) -> None:
    write("own_one/__init__.py", "")
    write("own_one/below/worker.py", "class Worker: ...")
    write("own_one/amount.txt", "1")
    before = code_of("own_one.below.worker.Worker")
    assert before == code_of("own_one:anything") != ""
    write("own_one/amount.txt", "2")
    assert code_of("own_one.below.worker.Worker") != before


def test_a_part_of_a_namespace_package_counts_alone(write: Write) -> None:
    write("own_company/first/__init__.py", "a = 1")
    before = code_of("own_company.first.Worker")
    write("own_company/second/__init__.py", "a = 1")
    assert code_of("own_company.first.Worker") == before
    write("own_company/first/__init__.py", "a = 2")
    assert code_of("own_company.first.Worker") != before


def test_loose_modules_that_it_imports_count_and_a_circle_ends(write: Write) -> None:
    write("own_two.py", "import own_three, json")
    write("own_three.py", "from own_four import a")
    write("own_four.py", "import own_two; a = 1")
    before = code_of("own_two")
    write("own_four.py", "import own_two; a = 2")
    assert code_of("own_two") != before


def test_distributions_that_it_imports_count_by_their_version(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("own_five.py", "import attrs")
    before = code_of("own_five")
    module = importlib.import_module("kvdock_vllm.foreign_code")
    monkeypatch.setattr(module, "_distributions", lambda: {"attrs": ("attrs 0.1",)})
    assert code_of("own_five") != before


def test_code_that_is_no_file_is_rejected_by_name() -> None:
    with pytest.raises(NamespaceError, match=r"own_nowhere\.Worker"):
        code_of("own_nowhere.Worker")


NAMED: dict[str, Callable[[Any, str], None]] = {
    "worker": lambda one, name: vars(one.parallel_config).update(worker_cls=name),
    "extension": lambda one, name: vars(one.parallel_config).update(
        worker_extension_cls=name
    ),
    "executor": lambda one, name: vars(one.parallel_config).update(
        distributed_executor_backend=name
    ),
    "scheduler": lambda one, name: vars(one.scheduler_config).update(
        scheduler_cls=name
    ),
    "backend": lambda one, name: vars(one.compilation_config).update(backend=name),
    "pass": lambda one, name: one.compilation_config.inductor_passes.update(a=name),
    "proposer": lambda one, name: vars(one).update(
        speculative_config=SimpleNamespace(method="custom_class", model=name)
    ),
    "model": lambda one, name: one.model_config.registry.models.update(
        Own=SimpleNamespace(module_name=name)
    ),
}


@pytest.mark.parametrize("place", NAMED)
def test_code_counts_wherever_a_configuration_names_it(
    place: str, write: Write
) -> None:
    found = []
    for code in ("a = 1", "a = 2"):
        write("own_named/part.py", code)
        write("own_named/__init__.py", "")
        given = config()
        NAMED[place](given, "own_named.part")
        found.append(foreign_code(given))
    assert found[0] != found[1]
    assert any("own_named" in f"{one}{value}" for one, value in found[0].items())


def test_a_class_is_named_as_its_text_would_be(write: Write) -> None:
    write("own_class.py", "class Executor: ...")
    kind = importlib.import_module("own_class").Executor
    found = foreign_code(config(distributed_executor_backend=kind))
    by_name = foreign_code(config(distributed_executor_backend="own_class.Executor"))
    assert found == by_name


def test_operators_count_with_what_they_inherit_and_what_chooses_them(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("own_base.py", "class Base: ...")
    write("own_norm.py", "from own_base import Base\nclass Norm(Base): ...")
    module = ModuleType("vllm.model_executor.custom_op")
    kind = importlib.import_module("own_norm").Norm
    module.op_registry_oot = {"RMSNorm": kind}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.model_executor.custom_op", module)
    given = config()
    before = foreign_code(given)
    assert "operator RMSNorm" in before
    given.compilation_config.custom_ops.append("-rms_norm")
    chosen = foreign_code(given)
    assert chosen != before
    write("own_base.py", "class Base: a = 1")
    assert foreign_code(given) != chosen


def test_a_registry_that_a_vllm_does_not_have_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("vllm.ir.op")
    monkeypatch.setitem(sys.modules, "vllm.ir.op", module)
    with pytest.raises(NamespaceError, match=r"no vllm\.ir\.op\.IrOp\.registry"):
        foreign_code(config())


OWN_PLUGIN = "plugin own = own_plugin:register"
ABOUT = "Metadata-Version: 2.1\nName: own-plugin\nVersion: {}\n"


@pytest.fixture
def plugin(write: Write) -> Write:
    """Return what writes files, once there is a plugin of vLLM's."""
    point = "[vllm.general_plugins]\nown = own_plugin:register\n"
    write("own_plugin/__init__.py", "def register(): ...")
    write("own_rest/__init__.py", "")
    write("own_plugin-1.dist-info/entry_points.txt", point)
    write("own_plugin-1.dist-info/METADATA", ABOUT.format("1"))
    files = ("own_plugin/__init__.py", "own_rest/__init__.py", "../../bin/own")
    record = "".join(f"{one},,\n" for one in files)
    write("own_plugin-1.dist-info/RECORD", record)
    return write


def test_a_plugin_counts_once_it_was_loaded(
    plugin: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    del plugin
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert OWN_PLUGIN not in loaded_plugins()
    importlib.import_module("own_plugin")
    assert loaded_plugins()[OWN_PLUGIN].startswith("own-plugin 1 ")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert OWN_PLUGIN not in loaded_plugins()
    monkeypatch.setenv("VLLM_PLUGINS", "another,own")
    assert OWN_PLUGIN in loaded_plugins()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own_plugin/__init__.py", "def register(): 1"),
        ("own_plugin/more.py", ""),
        ("own_plugin/kernel.so", "compiled"),
        ("own_rest/__init__.py", "a = 1"),
        ("own_plugin-1.dist-info/METADATA", ABOUT.format("1.post1")),
    ],
)
def test_a_plugin_counts_by_version_and_by_every_file_of_its_distribution(
    plugin: Write, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    importlib.import_module("own_plugin")
    before = loaded_plugins()
    plugin("own_plugin/__pycache__/more.cpython-311.pyc", "compiled")
    assert loaded_plugins() == before
    plugin(name, text)
    assert loaded_plugins()[OWN_PLUGIN] != before[OWN_PLUGIN]


def test_two_plugins_of_one_name_both_count(
    plugin: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plugin("own_other.py", "def register(): ...")
    point = "[vllm.platform_plugins]\nown = own_other:register\n"
    plugin("own_other-1.dist-info/entry_points.txt", point)
    plugin("own_other-1.dist-info/METADATA", ABOUT.replace("own-plugin", "own-other"))
    for name in ("own_plugin", "own_other"):
        importlib.import_module(name)
    assert {OWN_PLUGIN, "plugin own = own_other:register"} <= {*loaded_plugins()}
