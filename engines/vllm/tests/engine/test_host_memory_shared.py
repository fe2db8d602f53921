"""Prompts that do not fit host memory, alone or beside each other, in the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import vllm_models
from scenes import unlike_others
from test_families import on_files
from test_why import kvdock
from vllm_lives import Lives, tokens
from vllm_server import serving

from kvdock_vllm.host_memory import HostMemory

if TYPE_CHECKING:
    from kvdock.events import HostMemoryShared

LIMIT_S = 90.0
"""Until when all must have been answered, on a machine that others use."""

SHARED = Path("/dev/shm")  # noqa: S108 - where vLLM's ranks on a CPU share memory
ENGINE: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 16}

ALONE = {"max_num_seqs": 1}
"""For families whose numbers depend on what else is in their batch."""


@attrs.frozen
class Row:
    """Stored prompts that come back together.

    Args:
        pages: Whole pages of each.
        requests: How many there are at once.
        restored: Share of their pages that must come from storage at least.
        rounds: How often.
    """

    pages: int
    requests: int
    restored: float
    rounds: int = 1


@attrs.frozen(kw_only=True)
class Arm:
    """An engine with few rows, and what comes back to it.

    Args:
        asked: Each has `prompts`, and may have `disturb`.
        restored: For each of them, the share that must come from storage at least.
        block: Tokens of a page.
        host_rows: Rows of host memory.
        engine: Further arguments of the engine.
        settings: Further settings of storage.
    """

    asked: list[dict[str, Any]]
    restored: list[float] = attrs.field(factory=list)
    family: str = "llama"
    block: int = 32
    host_rows: int = 64
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    settings: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, *rows: Row, block: int = 32, **more: Any) -> Arm:
        """Return one whose rows share no prompt."""
        asked: list[dict[str, Any]] = []
        restored: list[float] = []
        for at, row in enumerate(rows):
            first, count = 1 + 20 * at, row.pages * block + 8
            prompts = [unlike_others(first + n, count) for n in range(row.requests)]
            asked += [{"prompts": prompts}] * row.rounds
            restored += [row.restored] * row.rounds
        return cls(asked=asked, restored=restored, block=block, **more)

    @property
    def prompts(self) -> dict[tuple[int, ...], list[int]]:
        """Return those that differ."""
        return {tuple(one): one for each in self.asked for one in each["prompts"]}


@attrs.frozen
class Back:
    """What became of one round.

    Args:
        found: What its scene has noted.
        counted: The engine's own metrics of host memory, in the end.
        journal: The folder of its journal.
    """

    prompts: list[list[int]]
    right: list[list[int]]
    found: dict[str, Any]
    counted: dict[str, float]
    journal: Path

    def check(self, restored: float, block: int = 32) -> None:
        """Assert right answers to all, that each page was loaded once, and no leak."""
        assert self.found["tokens"] == self.right, self.found
        assert self.found["loads"] <= 1.05 * self.found["different"], self.found
        whole = sum(len(one) // block * block for one in self.prompts)
        assert sum(self.found["cached"]) >= restored * whole, self.found
        assert self.found["held"] == 0, self.found


def come_back(
    lives: Lives,
    folder: Path,
    arms: Mapping[str, Arm],
    environ: dict[str, str] | None = None,
) -> dict[str, list[Back]]:
    """Store prompts with some engines; ask others that have few rows for them.

    Those of a family store once. One process has all engines that store, and one all
    that ask.
    """
    (folder / "store").mkdir()
    storage = on_files(folder / "store")
    given: dict[str, Any] = {"new_tokens": 8}
    plain: dict[str, dict[str, Any]] = {}
    for arm in arms.values():
        phase = plain.setdefault(
            arm.family,
            {**lives.phase(arm.family, arm.family, storage), **given, "prompts": []},
        )
        phase["engine"] = {**ENGINE, **phase["engine"], **arm.engine}
        known = set(map(tuple, phase["prompts"]))
        new = [one for name, one in arm.prompts.items() if name not in known]
        phase["prompts"] += new
    before = set(SHARED.glob("vllm_dist_*"))
    stored = lives.run(f"{folder.name}-store", [*plain.values()])
    asking = []
    for name, arm in arms.items():
        few = arm.host_rows * stored[arm.family]["row_bytes"]
        core = {**storage["core"], "observers": ["journal"]}
        noted = {"journal": {"dir": str(folder / name)}}
        own = {**storage, "core": core, "observers": noted, "host_memory": few}
        own.update(arm.settings)
        phase = {**plain[arm.family], "name": name, "storage": own, "prompts": []}
        alone = phase["engine"]["max_num_seqs"] == 1
        phase.update(returns=arm.asked, limit_s=LIMIT_S, beside=not alone, scene="back")
        asking.append(phase)
    found = lives.run(f"{folder.name}-back", asking, environ=environ)
    for path in set(SHARED.glob("vllm_dist_*")) - before:
        path.unlink()  # vLLM leaves it behind, see test_pressure
    backs: dict[str, list[Back]] = {}
    for name, arm in arms.items():
        answers = tokens(stored[arm.family]["rounds"][0])
        asked = map(tuple, plain[arm.family]["prompts"])
        right = dict(zip(asked, answers, strict=True))
        backs[name] = [
            Back(
                each["prompts"],
                [right[tuple(one)] for one in each["prompts"]],
                did,
                found[name]["counted"],
                folder / name,
            )
            for each, did in zip(arm.asked, found[name]["returns"], strict=True)
        ]
    return backs


TABLE = (
    Row(65, 1, 0.98, rounds=3),
    Row(72, 1, 0.88, rounds=2),
    Row(120, 1, 0.53, rounds=2),
    Row(40, 4, 1.0, rounds=2),
    Row(16, 8, 1.0, rounds=2),
)
"""One page more than rows, a few more, two times the rows, four users, eight."""

FEW = Row(72, 1, 0.88), Row(40, 4, 1.0)
FOUR: list[list[int]] = Arm.of(Row(40, 4, 1.0)).asked[0]["prompts"]

PRESSED = {
    "backpressure_cls": "EMABackpressureDetector",
    "warmup_completions": 1,
    "high_water_s": 1e-6,
    "low_water_s": 1e-7,
}
"""Each store is slow, so that vLLM leaves stores out."""

QUICK = {
    "lru": Arm.of(*TABLE),
    "arc": Arm.of(*FEW, settings={"eviction_policy": "arc"}),
    "backpressure": Arm.of(*FEW, settings={"backpressure": PRESSED}),
    # Each step of the longest prompt must fit, and on a CPU that is all of it.
    "mla": Arm.of(
        Row(40, 4, 1.0, rounds=2),
        family="mla",
        block=16,
        engine={"max_model_len": 1024, **ALONE},
    ),
    # vLLM keeps the state at the end of a prompt: no beginning of one is restored.
    "mamba2": Arm.of(
        Row(40, 1, 0, rounds=2),
        Row(16, 6, 0.9, rounds=2),
        family="mamba2",
        block=64,
        host_rows=32,
    ),
    "ended": Arm(
        asked=[
            {"prompts": FOUR, "disturb": "abort"},
            {"prompts": FOUR, "disturb": "reset"},
            {"prompts": [FOUR[0] + unlike_others(60 + n, 40) for n in range(6)]},
        ],
        settings={"wait_for_host_memory": "60 s"},
    ),
}
"""What continuous integration runs."""

SLOW = {
    "swa": Arm.of(Row(72, 1, 0.9), Row(16, 8, 0.9), family="swa"),
    # Its windows are stored where prompts end, so a beginning of one is not restored.
    "swa_full": Arm.of(Row(72, 1, 0), Row(30, 4, 0.9), family="swa_full"),
    "chunked": Arm.of(Row(72, 1, 0), Row(30, 4, 0.9), family="chunked"),
    "two ranks": Arm.of(
        *FEW,
        family="llama_2",
        engine={
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
        },
    ),
}


@pytest.fixture(scope="module")
def quick(
    lives: Lives, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Back]]:
    return come_back(lives, tmp_path_factory.mktemp("quick-rows"), QUICK)


@pytest.fixture(scope="module")
def slow(
    lives: Lives, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Back]]:
    return come_back(lives, tmp_path_factory.mktemp("slow-rows"), SLOW)


def check(arm: Arm, backs: list[Back]) -> None:
    for back, restored in zip(backs, arm.restored, strict=True):
        back.check(restored, arm.block)


@pytest.mark.parametrize("name", [one for one in QUICK if QUICK[one].restored])
def test_stored_prompts_that_do_not_fit_host_memory_are_loaded_once(
    name: str, quick: dict[str, list[Back]]
) -> None:
    check(QUICK[name], quick[name])


def test_log_metrics_and_why_say_what_had_no_room(
    lives: Lives, quick: dict[str, list[Back]]
) -> None:
    one = quick["lru"][0]
    log = (lives.folder / f"{one.journal.parent.name}-back.log").read_text()
    assert "has 64 rows: a request loads the first 2048 tokens of its prefix" in log
    # Of each prompt that is longer than the rows, the rest.
    pages = sum(row.rounds * max(0, row.pages - 64) for row in TABLE)
    assert one.counted["computed_tokens"] == 32 * pages
    # Those, and users who came back together.
    longer = sum(row.rounds for row in TABLE if row.pages > 64)
    assert one.counted["waits"] > longer
    assert "wait_seconds" in one.counted  # whole ones: vLLM cuts them here
    listed = json.loads(kvdock("why", "--journal", one.journal, "--json")[1])
    (longest,) = [
        found["request"]
        for found in listed["requests"]
        if found["request"].startswith(f"{longer - 1}-0")
    ]
    code, said = kvdock("why", "--journal", one.journal, "--request", longest)
    assert code == 1
    said = " ".join(said.split())
    assert "host memory has 64 rows, and the prefix needs 120, or others had" in said


def test_a_load_that_begins_anew_is_told_of_once() -> None:
    """Its pages were evicted before they were pinned, or a call has failed."""
    told: list[HostMemoryShared] = []
    state = SimpleNamespace(
        req=SimpleNamespace(request_id="r"),
        req_context=None,
        num_locally_computed_tokens=0,
        max_load_tokens=None,
    )

    def restorable(tried: Any, most: int | None) -> int:
        del most
        return (
            192 if tried.max_load_tokens is None else tried.max_load_tokens // 32 * 32
        )

    host = SimpleNamespace(
        _policy={},  # no page is there
        _get_num_free_chunks=lambda: 4,
        _num_evictable_cache_chunks=0,
        prepare_read=lambda *_: None,
        complete_read=lambda *_: None,
    )
    lookups: Any = SimpleNamespace(
        host=host,
        step_tokens=32,
        limit_of=int,
        restorable=restorable,
        pages=lambda *given: set(range(restorable(*given) // 32)),
    )
    memory = HostMemory(lookups, 4, lambda *_: 0.0, told.append)
    for _ in range(3):
        state.max_load_tokens = None
        assert memory.admit(state, None)
        assert state.max_load_tokens == 4 * 32
    assert [one.computed_tokens for one in told] == [2 * 32]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_all_kinds_of_groups_and_engines_share_rows(
    name: str, slow: dict[str, list[Back]]
) -> None:
    check(SLOW[name], slow[name])


@pytest.mark.slow
def test_who_decides_whether_loading_pays_is_answered_too(
    lives: Lives, tmp_path: Path
) -> None:
    """A wait ends when computing is faster, so how much is restored is not known."""
    arm = Arm.of(Row(72, 1, 0, rounds=3), Row(40, 4, 0, rounds=3))
    environ = {"KVDOCK_CORE__PAYS__MODE": "on"}
    check(arm, come_back(lives, tmp_path, {"pays": arm}, environ)["pays"])


@pytest.mark.slow
def test_each_of_two_replicas_shares_its_own_rows(lives: Lives, tmp_path: Path) -> None:
    """Prompts that one replica has stored come back to both at once."""
    model = vllm_models.make(vllm_models.FAMILIES["llama"], lives.models)
    (tmp_path / "store").mkdir()
    storage = {**on_files(tmp_path / "store"), "host_memory": 64 * 16384}
    more = ["--data-parallel-size", "2", "--max-model-len", "4096"]
    more += ["--max-num-batched-tokens", "1024"]
    (given,) = Arm.of(Row(40, 4, 1.0)).asked
    prompts = given["prompts"]
    with serving(model, storage, tmp_path / "two.log", *more) as server:
        right = [server.complete(prompt, 0) for prompt in prompts]
        assert server.keys_soon("put", 160) >= 160
        before = [server.keys("get", replica) for replica in (0, 1)]
        server.reset()
        asked = [(prompt, replica) for prompt in prompts for replica in (0, 1)]
        with ThreadPoolExecutor(len(asked)) as clients:
            found = list(clients.map(lambda one: server.ask(*one), asked))
        assert [tokens for tokens, _ in found] == [one for one in right for _ in (0, 1)]
        assert all(cached >= 40 * 32 for _, cached in found), found
        for replica in (0, 1):
            got = server.keys_soon("get", before[replica] + 160, replica)
            assert 160 <= got - before[replica] <= 1.05 * 160


def test_rows_are_given_back_by_requests_that_end_and_caches_that_are_emptied(
    quick: dict[str, list[Back]],
) -> None:
    aborted, emptied, together = quick["ended"]
    assert aborted.found["held"] == emptied.found["held"] == 0
    assert aborted.found["tokens"] == aborted.right[1:]
    assert all(one >= 40 * 32 for one in aborted.found["cached"])
    assert emptied.found["tokens"] == emptied.right
    # One load serves all who share a prefix.
    together.check(0.97)
    assert together.found["different"] <= 41 + 5
