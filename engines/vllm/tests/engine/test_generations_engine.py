"""Weights that are replaced under a real engine: no wrong token, and hits again."""

from __future__ import annotations

import inspect
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import vllm_environment
import vllm_lives
import vllm_models
import vllm_run
import warm_python
from test_why import why

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

LIFE = Path(__file__).with_name("generation_life.py")
LONGEST_S = 540.0
UPDATES = 20
CLIENTS = 8
PROMPTS = [
    [
        *[(7 * n + 3) % 500 + 4 for n in range(64)],
        *[(n * k) % 490 + 5 for n in range(60)],
    ]
    for k in range(1, CLIENTS + 1)
]
"""Of one beginning, so that what one client stores another one finds."""
ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    "enforce_eager": True,
    "seed": 0,
    "max_num_seqs": CLIENTS,
    "max_num_batched_tokens": 512,
    "weight_transfer_config": {"backend": "folder"},
}
RUN: dict[str, Any] = {"generations": "run:policy"}


@attrs.frozen
class World:
    """Two checkpoints of one model, what each of them says, and a place for lives.

    Args:
        said: Folder of a checkpoint to the tokens of each prompt, as an engine
            without any cache says them.
    """

    folder: Path
    models: tuple[str, str]
    said: dict[str, list[list[int]]]

    def live(
        self,
        life: str,
        steps: list[Any],
        *,
        inside: bool = True,
        kill_when: Callable[[], bool] | None = None,
        cached: bool = True,
        engine: dict[str, Any] | None = None,
        **storage: object,
    ) -> list[Any]:
        """Start an engine, take steps, end it; return what was said in each.

        It is `inside` the process that asks it, or in processes of its own, as servers
        have them. With `kill_when`, all of its processes are killed once that is true.
        """
        out, log = self.folder / f"{life}.json", self.folder / f"{life}.log"
        root = self.folder / "store"
        transfer = {
            "kv_connector": "KvdockConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_memory": "64 MiB",
                "plugin": "file",
                "root": str(root),
                **storage,
            },
        }
        arguments: dict[str, Any] = {"enable_prefix_caching": False}
        if cached:
            arguments = {"kv_transfer_config": transfer, "enable_prefix_caching": True}
        task = {
            "model": self.models[0],
            "engine": {**ENGINE, **arguments, **(engine or {})},
            "prompts": PROMPTS,
            "new_tokens": 16,
            "steps": steps,
            "inside": inside,
            "root": str(root),
            "out": str(out),
        }
        path = self.folder / f"{life}.task.json"
        path.write_text(json.dumps(task))
        variables = {
            **os.environ,
            **vllm_environment.CPU,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not inside)),
        }
        started = warm_python.warm(vllm_lives.IMPORTED)(
            [str(LIFE), str(path)], variables, log
        )
        end_s = time.monotonic() + LONGEST_S
        try:
            while started.poll() is None and not (kill_when and kill_when()):
                assert time.monotonic() < end_s, log.read_text()[-4000:]
                time.sleep(0.02)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        if kill_when is not None:
            return []
        assert out.exists(), log.read_text()[-4000:]
        found: list[Any] = json.loads(out.read_text())
        assert len(found) == len(steps), log.read_text()[-4000:]
        return found

    def right(self, answers: list[dict[str, Any]], model: int) -> bool:
        said = self.said[self.models[model]]
        return all(one["tokens"] == said[one["prompt"]] for one in answers)


def hits(answers: list[dict[str, Any]]) -> int:
    return sum(one["cached"] for one in answers)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("generations")
    models = [
        str(vllm_models.make(vllm_models.FAMILIES[name], folder))
        for name in ("llama", "llama_other")
    ]
    blank = World(folder, (models[0], models[1]), {})
    (one, _, other) = blank.live(
        "plain", [["ask"], ["unpaused", models[1]], ["ask"]], cached=False
    )
    assert hits(one) == hits(other) == 0
    said = {
        name: [each["tokens"] for each in answers]
        for name, answers in zip(models, (one, other), strict=True)
    }
    a, b = said.values()
    assert all(one != other for one, other in zip(a, b, strict=True))
    return attrs.evolve(blank, said=said)


@pytest.fixture
def world(first: World, tmp_path: Path) -> World:
    return attrs.evolve(first, folder=tmp_path)


@pytest.mark.long
def test_no_token_is_wrong_in_many_updates_under_load_and_pages_are_found(
    world: World,
) -> None:
    updates = [
        (
            world.models[number % 2],
            str(number % 2),
            ("wait", "keep", "abort")[number % 3],
        )
        for number in range(1, UPDATES + 1)
    ]
    (answers,) = world.live("load", [["load", updates, CLIENTS]], inside=False, **RUN)
    whole = [one for one in answers if len(one["versions"]) == 1 and not one["aborted"]]
    assert len(whole) >= UPDATES * CLIENTS
    names = {"default": 0, "0": 0, "1": 1}
    wrong = [one for one in whole if not world.right([one], names[one["versions"][0]])]
    assert wrong == []
    found = {one["versions"][0] for one in whole if one["cached"] > 64}
    assert found >= {"0", "1"}


def test_engines_of_a_run_share_the_pages_of_a_version_and_no_others_do(
    world: World,
) -> None:
    a, b = world.models
    journal = world.folder / "journal"
    before, _, cold, flushed, warm, _, back = world.live(
        "one",
        [
            ["ask"],
            ["transfer", b, "7", "abort"],
            ["ask"],
            ["flush"],
            ["ask"],
            ["transfer", a, "8", "keep"],
            ["ask"],
        ],
        core={"observers": ["journal"]},
        observers={"journal": {"dir": str(journal)}},
        **RUN,
    )
    assert world.right(before, 0)
    assert world.right(cold, 1)
    assert world.right(warm, 1)
    assert world.right(back, 0)
    said = [why(journal, number)[1] for number in (CLIENTS, 3 * CLIENTS)]
    assert "computed with the weights of the start, asked in generation 7" in said[0]
    assert "computed with generation 7, asked in generation 8" in said[1]
    assert flushed
    assert cold[0]["cached"] == back[0]["cached"] == 0, "of the old weights nothing"
    assert warm[0]["cached"] > 64, "storage alone has them"
    # Another engine of the run; then it says nothing of the weights, then one fails.
    _, shared, _, private, broken, mixed, _, again = world.live(
        "two",
        [
            ["transfer", b, "7", "keep"],
            ["ask"],
            ["transfer", b, None, "abort"],
            ["ask"],
            ["broken", a],
            ["ask"],
            ["transfer", b, "7", "abort"],
            ["ask"],
        ],
        **RUN,
    )
    assert world.right(shared, 1)
    assert shared[0]["cached"] > 64
    assert world.right(private, 1)
    assert private[0]["cached"] == 0
    assert broken
    assert mixed[0]["cached"] == 0
    assert not world.right(mixed, 0)
    assert not world.right(mixed, 1)
    assert world.right(again, 1)
    assert again[0]["cached"] > 64


def test_weights_that_are_reloaded_begin_a_generation_once_caches_are_empty(
    world: World,
) -> None:
    a, b = world.models
    before, _, old, flushed, cold, _, warm, _, named, _, found, _, rushed = world.live(
        "reloaded",
        [
            ["ask"],
            ["unpaused", b],
            ["ask"],  # vLLM itself serves what the old weights computed
            ["flush"],
            ["ask"],
            ["flush"],
            ["ask"],
            ["reload", a, "1"],
            ["ask"],
            ["reload", a, "1"],
            ["ask"],
            ["rush", b, "2"],
            ["ask"],
        ],
        **RUN,
    )
    assert world.right(before, 0)
    assert flushed
    assert old[0]["cached"] > 64
    assert world.right(cold, 1)
    assert cold[0]["cached"] == 0
    assert world.right(warm, 1)
    assert warm[0]["cached"] > 64
    assert world.right(named, 0)
    assert named[0]["cached"] == 0
    assert world.right(found, 0)
    assert found[0]["cached"] > 64
    assert world.right(rushed, 1)
    assert rushed[0]["cached"] == 0


@pytest.mark.long
def test_an_engine_killed_in_an_update_leaves_nothing_wrong(world: World) -> None:
    a, b = world.models
    begun = world.folder / "begun"
    steps = [["transfer", b, "7", "abort"], ["ask"], ["write", str(begun)]]
    forever = [["load", [[b, "7", "abort"]] * 1000, CLIENTS]]

    def in_an_update() -> bool:
        return begun.exists() and time.time() > begun.stat().st_mtime + 1

    world.live("killed", [*steps, *forever], kill_when=in_an_update, **RUN)
    left = vllm_run.SHARED / f"vllm_offload_{begun.read_text()}.mmap"
    left.unlink()
    before, _, after, _, private = world.live(
        "again",
        [
            ["ask"],
            ["transfer", b, "7", "abort"],
            ["ask"],
            ["transfer", a, None, "abort"],
            ["ask"],
        ],
        **RUN,
    )
    assert world.right(before, 0)
    assert before[0]["cached"] == 0
    assert world.right(after, 1)
    assert after[0]["cached"] > 64
    assert world.right(private, 0)
    assert private[0]["cached"] == 0


@pytest.mark.long
def test_ranks_of_one_engine_go_on_together(world: World) -> None:
    _, b = world.models
    _, cold, flushed, warm = world.live(
        "ranks",
        [["transfer", b, "7", "abort"], ["ask"], ["flush"], ["ask"]],
        engine={"tensor_parallel_size": 2},
        **RUN,
    )
    assert flushed
    assert world.right(cold, 1)
    assert world.right(warm, 1)
    assert warm[0]["cached"] > 64


@pytest.mark.long
@pytest.mark.parametrize("storage", [RUN, {}])
def test_replicas_of_data_parallelism_go_on_each_in_its_generation(
    world: World, storage: dict[str, Any]
) -> None:
    """Each has a scheduler, and so storage, of its own; all of them are called."""
    _, b = world.models
    steps = [["transfer", b, "7", "abort"], ["ask"], ["flush"], ["ask"]]
    _, cold, flushed, warm = world.live(
        "replicas",
        steps,
        inside=False,
        engine={"data_parallel_size": 2},
        **storage,
    )
    assert flushed
    assert world.right(cold, 1)
    assert world.right(warm, 1)
    assert hits(warm) > 64
    records = (world.folder / "store").rglob("namespace.json")
    texts = [json.loads(one.read_text()).get("generation") for one in records]
    generations = {text for text in texts if text}
    assert len(generations) == (1 if storage else 2)


def test_what_old_weights_made_of_an_image_keeps_storage_off() -> None:
    """By vLLM's own caches; an embedding stays when no request has it any more."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    from kvdock_vllm.generations import is_empty

    pool, images = (
        BlockPool(4, enable_caching=True, hash_block_size=32),
        (EncoderCacheManager(64)),
    )
    managers = [SimpleNamespace(block_pool=pool)]
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(
            encoder_cache_manager=images,
            kv_cache_manager=SimpleNamespace(
                coordinator=SimpleNamespace(single_type_managers=managers)
            ),
        )
    )
    request: Any = SimpleNamespace(
        request_id="r",
        mm_features=[SimpleNamespace(identifier="image")],
        get_num_encoder_embeds=lambda _: 16,
    )
    assert is_empty(engine)
    images.allocate(request, 0)
    assert not is_empty(engine)
    images.free(request)
    assert not is_empty(engine), "another request with the image would find it"
    images.reset()
    assert is_empty(engine)
    blocks = pool.get_new_blocks(1)
    assert not is_empty(engine)
    pool.free_blocks(blocks)
    assert is_empty(engine)


def test_every_backend_that_transfers_weights_is_known() -> None:
    """A new one may replace a part of the weights, as sparse_nccl does.

    None but the tests' own runs on a CPU, so the others are held to vLLM's interface:
    each is reached by calls to the workers, which storage follows, and none of them
    brings a call of its own.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    from kvdock_vllm.generations import UPDATES

    backends = {*WeightTransferEngineFactory._registry} - {"folder"}
    assert backends == {
        "nccl", "ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress",
    }  # fmt: skip
    assert all(callable(getattr(Worker, call)) for call in UPDATES)
    called = inspect.signature(Worker.update_weights).parameters
    assert [*called] == ["self", "update_info"]
    steps = {"init_transfer_engine", "start_weight_update", "finish_weight_update"}
    assert {*steps, "receive_weights"} <= WeightTransferEngine.__abstractmethods__
    for backend in ("nccl", "ipc", "sparse_nccl"):
        kind = WeightTransferEngineFactory._registry[backend]()
        assert issubclass(kind, WeightTransferEngine)
        assert not inspect.isabstract(kind)
        assert kind.defers_processing is False
