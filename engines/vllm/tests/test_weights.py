"""Calls that may replace the weights of a running engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.throttled_log import ThrottledLog
from kvdock_vllm.adapters import UNKNOWN, AdapterFiles
from kvdock_vllm.generations import Generations
from kvdock_vllm.settings import collect
from kvdock_vllm.weights import HARMLESS_CALLS, watch_weights

SETTINGS = {"plugin": "file", "host_memory": "1 MiB"}
RUN: dict[str, Any] = {"generations": "run:policy"}


class Pool:
    """Blocks of a device: one is always used."""

    num_gpu_blocks = 4

    def __init__(self) -> None:
        self.free = 3
        self.cached_block_hash_to_block: dict[str, int] = {}

    def get_num_free_blocks(self) -> int:
        return self.free


class Engine:
    """An engine of vLLM's shape with kvdock's connector; it notes what happens.

    Args:
        broken: Calls that fail in some worker.
    """

    def __init__(self, root: object, backend: str = "nccl", **extra: object) -> None:
        self.told: list[str] = []
        self.broken: set[object] = set()
        self.paused = False
        self.pool = Pool()
        self.scheduler = SimpleNamespace(
            encoder_cache_manager=SimpleNamespace(cached={}),
            kv_cache_manager=SimpleNamespace(
                coordinator=SimpleNamespace(
                    single_type_managers=[SimpleNamespace(block_pool=self.pool)] * 2
                )
            ),
            schedule=lambda: self.told.append("step"),
        )
        storage = SimpleNamespace(namespace="ab", namespace_record={})
        self.tier = SimpleNamespace(
            next_generation=self.next_generation, attached=storage
        )
        config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend=backend),
            model_config=SimpleNamespace(model="/model"),
        )
        given = collect({**SETTINGS, "root": str(root), **extra})
        self.generations = Generations(self, given, config)

    def next_generation(self, generation: str) -> tuple[Any, Any]:
        if "open" in self.broken:
            raise OSError("no space")
        self.name = json.loads(generation)
        return SimpleNamespace(close=None), {}

    def turn_off(self) -> None:
        self.told.append("off")

    def turn_on(self, _: object, kind: str) -> None:
        self.told.append(kind)

    def reset_cache(self) -> None:
        self.told.append("empty")

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        del timeout, args
        self.told.append(f"call {getattr(method, '__name__', method)}")
        if method in self.broken:
            raise RuntimeError(method)
        return kwargs

    def sleep(self, level: int = 1, mode: str = "abort") -> str:
        self.told.append(f"sleep {level}")
        return mode

    def set_weight_version(self, weight_version: str) -> None:
        self.told.append(f"version {weight_version}")

    def step(self) -> list[str]:
        """Take a step; return what was told since the last."""
        self.scheduler.schedule()
        told, self.told = self.told, []
        return told

    def update(self, version: str = "") -> None:
        """Update as a trainer does."""
        self.collective_rpc("start_weight_update")
        self.collective_rpc("update_weights")
        self.collective_rpc("finish_weight_update")
        if version:
            self.set_weight_version(version)


for _ in range(2):
    watch_weights(Engine, lambda engine: [engine.generations])


@pytest.fixture
def engine(tmp_path: object) -> Engine:
    return Engine(tmp_path, **RUN)


def load_other_weights(worker: Any) -> None:
    del worker


@pytest.mark.parametrize("method", ["update_weights_of_ours", load_other_weights])
def test_a_call_that_is_not_known_ends_storage_before_it(
    engine: Engine, method: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.collective_rpc(method, 1, kwargs={"a": 2}) == {"a": 2}
    name = getattr(method, "__name__", method)
    assert engine.told == ["off", f"call {name}"]
    assert f"{name} may have replaced the weights" in caplog.text
    engine.update("7")
    assert "run" not in engine.step()


def test_what_is_known_to_change_no_weight_is_passed_on(engine: Engine) -> None:
    for method in HARMLESS_CALLS:
        engine.collective_rpc(method)
    engine.sleep()
    engine.set_weight_version("7")
    assert "off" not in engine.step()


def test_storage_goes_on_once_an_update_has_ended_and_nothing_is_left(
    engine: Engine,
) -> None:
    engine.collective_rpc("start_weight_update")
    assert engine.step() == ["off", "call start_weight_update", "step"]
    engine.collective_rpc("update_weights")
    engine.collective_rpc("finish_weight_update")
    engine.set_weight_version("7")
    engine.told.clear()
    engine.paused = True
    assert engine.step() == ["step"]
    engine.paused, engine.pool.free = False, 2
    assert engine.step() == ["step"]
    engine.pool.free, engine.pool.cached_block_hash_to_block = 3, {"hash": 1}
    assert engine.step() == ["step"]
    engine.pool.cached_block_hash_to_block = {}
    engine.scheduler.encoder_cache_manager.cached = {"image": {"request"}}
    assert engine.step() == ["step"]
    engine.scheduler.encoder_cache_manager.cached = {}
    assert engine.step() == ["empty", "run", "step"]
    assert engine.name == {"run": "policy", "version": "7", "weights": ""}
    assert engine.step() == ["step"]


def test_weights_without_a_name_are_private(engine: Engine, tmp_path: object) -> None:
    engine.set_weight_version("6")
    engine.update()
    assert "private" in engine.step()
    assert engine.name["run"] == ""
    engine.set_weight_version("7")
    assert engine.step() == ["version 7", "step"], "it came too late"
    engine.update("8")
    assert "run" in engine.step()
    alone = Engine(tmp_path)
    alone.update("8")
    assert "private" in alone.step()


def test_what_fails_keeps_storage_off_until_an_update_has_ended_well(
    engine: Engine, tmp_path: object
) -> None:
    engine.broken = {"update_weights"}
    with pytest.raises(RuntimeError):
        engine.update("7")
    assert engine.step() == [
        "off",
        "call start_weight_update",
        "off",
        "call update_weights",
        "step",
    ]
    # Of two workers one had ended its update, and one had not.
    engine.broken = {"start_weight_update"}
    with pytest.raises(RuntimeError):
        engine.update()
    engine.collective_rpc("finish_weight_update")
    engine.set_weight_version("7")
    assert "private" in engine.step()
    engine.broken = set()
    engine.update("7")
    assert "run" in engine.step()
    sparse = Engine(tmp_path, "sparse_nccl", **RUN)
    sparse.update("7")
    assert "run" in sparse.step()
    sparse.broken = {"finish_weight_update"}
    with pytest.raises(RuntimeError):
        sparse.update("8")
    sparse.broken = set()
    sparse.update("9")
    assert "private" in sparse.step(), "it changes weights that are wrong"
    sparse.collective_rpc("reload_weights")
    sparse.set_weight_version("1")
    assert "run" in sparse.step()


def test_a_connection_to_a_trainer_may_leave_other_weights(engine: Engine) -> None:
    engine.collective_rpc("init_weight_transfer_engine")
    assert "private" in engine.step()
    engine.broken = {"init_weight_transfer_engine"}
    with pytest.raises(RuntimeError):
        engine.collective_rpc("init_weight_transfer_engine")
    assert "private" not in engine.step()


def test_weights_that_were_discarded_have_to_be_loaded(engine: Engine) -> None:
    assert engine.sleep(2, mode="wait") == "wait"
    assert engine.step() == ["off", "sleep 2", "step"]
    engine.update("7")
    assert "run" in engine.step()


def test_files_that_a_version_was_loaded_from_count(
    engine: Engine, tmp_path: Any
) -> None:
    found = []
    for weights in (b"1", b"2"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        for given in (
            {"kwargs": {"weights_path": str(tmp_path)}},
            {"args": (None, str(tmp_path))},
            {},
        ):
            engine.collective_rpc("reload_weights", **given)
            engine.set_weight_version("7")
            assert "run" in engine.step()
            found.append(engine.name["weights"])
    assert len(set(found)) == 2
    assert len(set(found[:3])) == 1
    # Tensors of a caller may be some of them.
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": [1]})
    engine.set_weight_version("8")
    assert "run" in engine.step()
    assert engine.name["weights"] == ""


def test_what_cannot_be_opened_is_tried_again_with_the_next_update(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.broken = {"open"}
    engine.update("7")
    assert "run" not in engine.step()
    assert "storage stays off" in caplog.text
    engine.broken = set()
    assert engine.step() == ["step"]
    engine.update("8")
    assert "run" in engine.step()


def test_without_storage_no_request_is_identified() -> None:
    files = AdapterFiles(ThrottledLog())
    files.begin("r", None)
    assert files.of("r") == ""
    files.stop()
    assert files.of("r") == files.of("another") == UNKNOWN
    files.go_on()
    assert files.of("r") == ""
