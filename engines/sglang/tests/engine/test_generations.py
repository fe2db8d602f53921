"""Storage after updates of the weights: what is found, by whom, and when again."""

from __future__ import annotations

import json
import threading
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import controllers
import generation_steps
import pytest
import test_families as families
import torch
import zoo
from safetensors.torch import save_file
from sglang.srt.layers import dp_attention
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from kvdock.errors import KvdockError
from kvdock_sglang import generations, weight_updates
from kvdock_sglang.weight_updates import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvdock_sglang import KvdockStorage

TENSOR = "UpdateWeightsFromTensorReqInput"
DISK = "UpdateWeightFromDiskReqInput"
RUN = {"generations": "run:policy"}


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


@pytest.fixture(autouse=True)
def _just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    generation_steps.forget(monkeypatch)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return controllers.become_rank(0, 1, tmp_path_factory.mktemp("gloo") / "store")


class Engine:
    """A storage, its pool, and steps of its scheduler."""

    def __init__(self, storage: KvdockStorage, pool: Any, group: Any) -> None:
        self.storage, self.pool = storage, pool
        self.step = generation_steps.Step(storage, group)
        self.slots = zoo.slots(pool, [0])

    def put(self, seed: str = "") -> bool:
        (good,) = self.storage.batch_set_v1(families.hashes(1, seed), self.slots)
        return good

    def finds(self, seed: str = "") -> bool:
        keys = families.hashes(1, seed)
        found = self.storage.batch_exists(keys)
        (read,) = self.storage.batch_get_v1(keys, self.slots)
        assert read == bool(found)
        return read

    def update(self, version: str | None = None, **more: Any) -> None:
        self.step.run(TENSOR, weight_version=version, **more)


@pytest.fixture
def engine(tmp_path: Path, group: Any) -> Any:
    """Make engines over one store; each is another life, or another engine of a run."""
    opened = []

    def start(**extra: object) -> Engine:
        pool = zoo.mha_host()
        context = families.attached(
            families.config(tmp_path, extra=extra), {"kv": pool}
        )
        storage = context.__enter__()
        opened.append(context)
        return Engine(storage, pool, group)

    yield start
    for context in opened:
        context.__exit__(None, None, None)


def generation(engine: Engine) -> dict[str, str]:
    anchor = engine.storage._attachments.attached_pool("kv")
    assert anchor is not None
    assert anchor.attachment is not None
    text = anchor.attachment.namespace_record.get("generation", "{}")
    found: dict[str, str] = json.loads(str(text))
    return found


def test_a_page_is_found_with_the_weights_that_it_was_computed_with_alone(
    engine: Any,
) -> None:
    one = engine()
    assert generation(one) == {}
    assert one.put()
    assert one.finds()
    one.update("7")
    assert not one.finds()
    assert one.put()
    assert one.finds()
    first = generation(one)
    one.update("7")
    assert not one.finds(), "without a run the same version is not the same weights"
    assert generation(one)["version"] != first["version"]
    assert generation(one)["run"] == first["run"] == ""


def test_a_version_of_a_run_is_found_again_and_by_other_engines_of_it(
    engine: Any,
) -> None:
    one, other, stranger = engine(**RUN), engine(**RUN), engine()
    one.update("7")
    assert one.put()
    # The process of these tests has one set of weights, and each engine its own view.
    other.step.run(TENSOR, weight_version="7")
    assert generation(other) == {"run": "policy", "version": "7", "weights": ""}
    assert other.finds()
    stranger.update("7")
    assert not stranger.finds()
    one.update("8")
    assert not one.finds()
    one.update("7")
    assert one.finds(), "an earlier version comes back"


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([(TENSOR, {"weight_version": "7"})], True),
        ([(TENSOR, {"weight_version": "7", "done": False})], False),
        ([(TENSOR, {}), (TENSOR, {"weight_version": "7"})], True),
        ([(TENSOR, {"done": False}), (TENSOR, {"weight_version": "7"})], None),
        ([(TENSOR, {}), ("UpdateWeightVersionReqInput", {"new_version": "7"})], True),
        (
            [
                (TENSOR, {"done": False}),
                ("UpdateWeightVersionReqInput", {"new_version": "7"}),
            ],
            False,
        ),
        (
            [
                (TENSOR, {"weight_version": "7"}),
                ("CheckWeightsReqInput", {"action": "reset_tensors"}),
            ],
            False,
        ),
        (
            [
                ("ReleaseMemoryOccupationReqInput", {}),
                ("ResumeMemoryOccupationReqInput", {}),
                (TENSOR, {"weight_version": "7"}),
            ],
            True,
        ),
        ([("ReleaseMemoryOccupationReqInput", {})], False),
    ],
)
@pytest.mark.parametrize("between", [True, False])
def test_only_loads_that_all_succeeded_have_their_callers_name(
    requests: list[tuple[str, dict[str, Any]]],
    named: bool | None,  # noqa: FBT001 - a case of a table
    between: bool,  # noqa: FBT001 - same
) -> None:
    """Also where a generation is opened between the requests of one update.

    None where that counts: what failed before is over then.
    """
    weights = weight_updates.Weights()
    names = []
    for kind, fields in requests:
        updates = weight_updates.UPDATES[kind]
        weights.begin(updates, generation_steps.request(kind, **fields))
        if updates is weight_updates.UpdateKind.LOADS and fields.get("done", True):
            weights.succeeded(fields.get("weight_version"))
        names.append(weights.named)
        if between:
            weights.settle()
    assert names[-1] is (between if named is None else named)


def test_after_a_failed_load_the_next_one_has_its_name_again(engine: Any) -> None:
    one = engine(**RUN)
    one.update("7", done=False)
    assert generation(one)["run"] == ""
    one.step.run("UpdateWeightVersionReqInput", new_version="7")
    assert generation(one)["run"] == "", "a name makes no weights whole"
    one.update("8")
    assert generation(one)["version"] == "8"


@pytest.mark.parametrize(
    "why", ["children", "host", "slots", "idle", "session", "released"]
)
def test_nothing_is_stored_while_what_older_weights_computed_is_there(
    why: str, engine: Any
) -> None:
    one = engine()
    step = one.step
    if why in ("children", "slots"):
        getattr(step, why)["left"] = object()
    step.idle, step.host_pages = why != "idle", int(why == "host")
    step.updater._session = object() if why == "session" else None
    step.updater.offload_tags = {"weights"} if why == "released" else set()
    one.update()
    for _ in range(2):
        assert not one.put()
        assert not one.finds()
        step.run()
    step.children.clear()
    step.slots.clear()
    step.host_pages = 0
    step.idle, step.updater._session, step.updater.offload_tags = True, None, set()
    step.run()
    assert one.put()
    assert one.finds()


def test_a_request_of_an_unknown_kind_ends_storage_until_it_is_attached_anew(
    engine: Any,
) -> None:
    one = engine()
    one.step.run("NewInAReleaseReqInput")
    one.update("7")
    assert not one.put()
    again = engine(revision="another")
    assert again.put()
    again.update("8")
    assert again.put()
    assert again.finds()


@pytest.mark.parametrize("direction", ["put", "get"])
def test_what_began_with_older_weights_does_nothing_in_the_next_generation(
    direction: str, group: Any, tmp_path: Path
) -> None:
    """Operations that SGLang's queues still hold, by its real controller."""
    pool = zoo.mha_host()
    extra = families.config(tmp_path).extra_config
    with controllers.controller({"kv": pool}, extra, group=group) as made:
        step = generation_steps.Step(made.storage_backend, group)
        slots = zoo.slots(pool, [0, 1])
        ids = controllers.tokens(2 * zoo.PAGE)
        if direction == "get":
            step.run(TENSOR)  # so that it opens again, and has these pages
            controllers.back_up(made, slots, ids, [])
        # SGLang's threads are behind: they take nothing until the update is over.
        held = threading.Event()
        storage = made.storage_backend
        real = storage._attached_pool

        def late(name: str) -> Any:
            held.wait(20)
            return real(name)

        storage._attached_pool = late
        if direction == "put":
            made.write_storage(
                slots, ids, hash_value=controllers.page_hashes(made, ids)
            )
        else:
            handle = CacheRequestHandle("late", 0)
            operation = made.prefetch(handle, array("q", ids), extra_pools=[])
        step.run(TENSOR)
        held.set()
        if direction == "put":
            late_ack = controllers.until(
                "the ack", lambda: controllers.taken(made.ack_backup_queue)
            )
            assert late_ack
        else:
            controllers.until("the hits", lambda: not made.prefetch_hit_queue.empty())
            assert not operation.hash_value
        assert storage.batch_exists(controllers.page_hashes(made, ids)) == 0
        controllers.back_up(made, slots, ids, [])
        assert storage.batch_exists(controllers.page_hashes(made, ids)) == 2


def test_an_opening_that_hangs_ends_by_its_deadline_and_the_next_update_tries_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    hangs = threading.Event()
    real = type(one.storage._attachments).next_generation

    def late(attachments: Any, text: str) -> Any:
        hangs.wait(20)
        return real(attachments, text)

    monkeypatch.setattr(generations, "OPEN_S", 0.2)
    monkeypatch.setattr(type(one.storage._attachments), "next_generation", late)
    assert one.step.run(TENSOR) < 10
    assert "opening a generation" in caplog.text
    assert not one.put()
    hangs.set()
    monkeypatch.setattr(generations, "OPEN_S", 10.0)
    one.step.run()
    assert not one.put(), "it is tried once for each update"
    one.update()
    assert one.put()
    assert one.finds()


def test_files_of_other_content_are_another_generation_of_the_same_version(
    engine: Any, tmp_path: Path
) -> None:
    one = engine(**RUN)
    places = [tmp_path / name for name in ("a", "b")]
    for number, place in enumerate(places):
        place.mkdir()
        (place / "config.json").write_text("{}")
        save_file({"w": torch.zeros(1 + number)}, place / "model.safetensors")
    one.step.run(DISK, weight_version="7", model_path=str(places[0]))
    assert generation(one)["weights"]
    assert one.put()
    one.step.run(DISK, weight_version="7", model_path=str(places[1]))
    assert not one.finds()
    one.step.run(DISK, weight_version="7", model_path=str(places[0]))
    assert one.finds()


@pytest.mark.parametrize("apart", ["pipeline stages", "ranks of DP attention"])
def test_stages_and_replicas_that_step_apart_stay_without_storage(
    apart: str,
    engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said when storage is attached; to name a run is an error there."""
    if apart == "pipeline stages":
        monkeypatch.setattr(families, "config", stages_of(families.config))
    else:
        monkeypatch.setattr(dp_attention, "is_dp_attention_enabled", lambda: True)
    with (
        pytest.raises(KvdockError, match=f"'policy' cannot be opened: {apart}"),
        families.attached(families.config(tmp_path, extra=RUN), {"kv": zoo.mha_host()}),
    ):
        pass
    caplog.set_level("INFO", logger="kvdock.sglang")
    one = engine()
    said = f"storage ends when weights are replaced: {apart}"
    assert said in caplog.text
    assert one.put()
    one.update()
    assert not one.put()
    assert f"{apart} are not at the same step" in caplog.text.partition(said)[2]


def stages_of(config: Any) -> Any:
    def made(*given: Any, **more: Any) -> Any:
        found = config(*given, **more)
        found.pp_size = 2
        return found

    return made


def test_private_generations_are_deleted_and_of_a_run_the_last_stays(
    engine: Any, tmp_path: Path
) -> None:
    one = engine(**RUN)
    for version in ("1", "2", "3"):
        one.update(version)
        assert one.put()
    one.update("4", done=False)  # private
    assert one.put()
    one.update("5")

    def versions() -> set[str]:
        texts = []
        for folder in tmp_path.iterdir():
            with suppress(OSError):  # one is deleted meanwhile, or is none
                record = json.loads((folder / "namespace.json").read_text())
                texts.append(record.get("generation"))
        return {json.loads(text)["version"] for text in texts if text}

    controllers.until("their deletion", lambda: versions() == {"3", "5"})
    one.update("3")
    assert one.finds()


def test_settings_that_name_no_run_are_rejected(tmp_path: Path) -> None:
    for wrong in ("run:", "runs", ""):
        mine = families.config(tmp_path, extra={"generations": wrong})
        with (
            pytest.raises(KvdockError, match="generations is"),
            families.attached(mine, {"kv": zoo.mha_host()}),
        ):
            pass


def test_weights_count_changes_at_once(engine: Any) -> None:
    """Before the update runs: a call of another thread can not be in between."""
    one = engine()
    before = WEIGHTS.count
    one.step.children["left"] = object()
    one.update()
    assert WEIGHTS.count > before
    assert not one.put()
