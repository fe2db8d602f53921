"""Weights that are replaced at run time: their pages are found by no request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import controllers
import generation_steps
import pytest
import test_families as families
import zoo
from exemption_lists import stale_exemptions
from sglang.srt import runtime_context
from sglang.srt.managers.scheduler import Scheduler

from kvdock.errors import KvdockError
from kvdock_sglang import engine_api, weight_updates

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvdock_sglang import KvdockStorage

ENDING = {
    "UpdateWeightFromDiskReqInput",
    "UpdateWeightsFromDistributedReqInput",
    "UpdateWeightsFromTensorReqInput",
    "UpdateWeightsFromIPCReqInput",
    "UpdateWeightVersionReqInput",
    "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
    "ScaleElasticEPReqInput",
    "DumperControlReqInput",
}
"""Kinds of requests of this release that end storage always."""


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    generation_steps.forget(monkeypatch)
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


def scheduler() -> Any:
    """Return a scheduler with nothing but its dispatcher, whose handlers do nothing."""
    found: Any = MagicMock()
    Scheduler.init_request_dispatcher(found)
    found._request_dispatcher.add_fallback_fn(lambda _: "handled")
    return found


def request(kind: str, **fields: object) -> object:
    """Return a request to the scheduler that has these fields alone."""
    return type(kind, (), fields)()


def moved(storage: KvdockStorage, pool: Any) -> tuple[bool, int, bool]:
    """Return what a write, a lookup and a read of one page say."""
    keys, slots = families.hashes(1), zoo.slots(pool, [0])
    found = storage.batch_exists(keys)
    (read,) = storage.batch_get_v1(keys, slots)
    (written,) = storage.batch_set_v1(keys, slots)
    return written, found, read


def test_every_request_but_for_a_list_with_reasons_ends_storage() -> None:
    """Those that another release adds end it until a reason is written down."""
    kinds = {one.__name__ for one in scheduler()._request_dispatcher._mapping}
    ending = {one for one in kinds if one not in weight_updates.HARMLESS}
    assert ending == ENDING
    assert stale_exemptions(tuple(weight_updates.HARMLESS.values()), kinds) == ()
    assert all(one.reason for one in weight_updates.HARMLESS.values())
    assert set(weight_updates.UPDATES) <= kinds
    assert not weight_updates.is_harmless(SimpleNamespace())


@pytest.mark.parametrize(
    ("kind", "fields", "harmless"),
    [
        ("CheckWeightsReqInput", {"action": "checksum"}, True),
        ("CheckWeightsReqInput", {"action": "snapshot"}, True),
        ("CheckWeightsReqInput", {"action": "reset_tensors"}, False),
        ("CheckWeightsReqInput", {"action": "new_in_a_release"}, False),
        ("RpcReqInput", {"method": "save_sharded_model"}, True),
        ("RpcReqInput", {"method": "load_something"}, False),
        ("SetInternalStateReq", {"server_args": {"pp_max_micro_batch_size": 1}}, True),
        ("SetInternalStateReq", {"server_args": {"new_in_a_release": 1}}, False),
        ("ReleaseMemoryOccupationReqInput", {"tags": ["kv_cache"]}, True),
        ("FlushCacheReqInput", {}, True),
        ("UpdateWeightsFromTensorReqInput", {}, False),
    ],
)
def test_a_request_that_may_replace_weights_is_noted_and_others_are_not(
    kind: str,
    fields: dict[str, object],
    harmless: bool,  # noqa: FBT001 - a case of a table
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvdock.sglang")
    count = weight_updates.begin("r1")
    dispatch = scheduler()._request_dispatcher
    assert dispatch(request(kind, **fields)) == "handled"
    if harmless:
        weight_updates.check(count)
    else:
        with pytest.raises(KvdockError, match="were replaced at run time"):
            weight_updates.check(count)
        assert f"{kind} may replace the weights" in caplog.text


@pytest.mark.parametrize(
    ("given", "stay"),
    [
        ({}, True),
        ({"enable_memory_saver": True}, False),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, True),
        (
            {
                "enable_memory_saver": True,
                "enable_weights_cpu_backup": True,
                "speculative_algorithm": "EAGLE",
            },
            False,
        ),
    ],
)
def test_weights_whose_memory_is_released_stay_where_there_is_a_copy(
    given: dict[str, object],
    stay: bool,  # noqa: FBT001 - a case of a table
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = SimpleNamespace(resolved_dict=lambda: given)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    for tags in (None, ["weights"]):
        released = request("ReleaseMemoryOccupationReqInput", tags=tags)
        assert weight_updates.is_harmless(released) is stay


def test_the_dispatcher_is_the_engines_in_everything_else() -> None:
    assert engine_api.in_place(weight_updates.DISPATCH)
    watched = scheduler()._request_dispatcher
    assert watched._fallback_fn is watched.dispatcher._fallback_fn


@pytest.mark.parametrize("revision", ["", "r1"])
def test_storage_misses_from_an_update_until_it_has_another_revision(
    revision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    update = request("CheckWeightsReqInput", action="reset_tensors")
    pool, dispatch = zoo.mha_host(), scheduler()._request_dispatcher
    mine = families.config(tmp_path, extra={"revision": revision})
    with families.attached(mine, {"kv": pool}) as storage:
        assert moved(storage, pool) == (True, 0, False)
        assert moved(storage, pool) == (True, 1, True)
        dispatch(update)
        assert moved(storage, pool) == (False, 0, False)
    assert "the weights were replaced at run time" in caplog.text
    for stale in ("", revision):
        again = families.config(tmp_path, extra={"revision": stale})
        with (
            pytest.raises(KvdockError, match="were replaced at run time"),
            families.attached(again, {"kv": pool}),
        ):
            pass
    other = families.config(tmp_path, extra={"revision": "r2"})
    with families.attached(other, {"kv": pool}) as storage:
        assert moved(storage, pool) == (True, 0, False)
        assert moved(storage, pool) == (True, 1, True)
        dispatch(update)
        assert moved(storage, pool) == (False, 0, False)
