"""`kvdock store rm` deletes a tenant, pages and what is old, from every tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.config import CoreSettings, structure
from kvdock.pools import Part
from kvdock.wrappers.key_ring import add_key, list_keys
from kvdock_cli.commands import store
from kvdock_cli.output import UsageProblem

PAGES, PAGE_BYTES = 8, 4096
TENANTS = {"acme": {"salt": "of acme"}, "guest": {"salt": "of guest"}}
NAMES = [f"{page:064x}" for page in range(PAGES)]
TIERS = ("near", "far")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tiers with pages of a tenant's namespace, and of another one's request."""
    config = tmp_path / "kvdock.toml"
    config.write_text(
        "".join(
            f"[tenants.{name}]\nsalt = '{table['salt']}'\n"
            for name, table in TENANTS.items()
        )
    )
    monkeypatch.setenv("KVDOCK_CONFIG", str(config))
    for salt in ("of acme", ""):
        with attached(tmp_path, salt) as cache:
            assert cache.put(NAMES, {"kv": np.arange(PAGES)}).pages == PAGES
            if not salt:
                guest = cache.for_tenant("guest")
                assert guest.put(NAMES[:2], {"kv": np.arange(2)}).pages == 2
            assert cache.wait_idle(60)
    return tmp_path


def attached(root: Path, salt: str) -> Attachment:
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    settings: dict[str, Any] = {
        name: {
            "plugin": "file",
            "root": root / name,
            "free_space": 0,
            "segment_bytes": "1 MiB",
        }
        for name in TIERS
    }
    dock = Dock.load(require=[*settings], only=[*settings], settings=settings)
    plan = dock.plan([pool], Shard(), tiers=[{"backend": name} for name in settings])
    memory = np.full((PAGES, PAGE_BYTES), 7, np.uint8)
    core = structure(CoreSettings, {"tenants": TENANTS}, where="test")
    regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
    namespace = Namespace(model="m", salt=salt)
    return Attachment.open(dock, plan, namespace, regions, settings, core=core)


def pages(root: Path, salt: str, tenant: str = "default") -> int:
    with attached(root, salt) as cache:
        calls = cache.for_tenant(tenant)
        return int(calls.get(NAMES, {"kv": np.arange(PAGES)}).pages)


def removed(
    capsys: pytest.CaptureFixture[str], root: Path, *, code: int = 0, **more: Any
) -> Any:
    near, far = (str(root / name) for name in TIERS)
    capsys.readouterr()
    assert store.rm(near, also=(far,), yes=True, json=True, **more) == code
    return json.loads(capsys.readouterr().out)


def test_a_tenant_goes_from_all_tiers_with_its_keys_and_no_one_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = root / "keys.json"
    for name in TENANTS:
        add_key(keys, bytes(32), name)
    dry = removed(capsys, root, tenant="acme", keys=keys, dry_run=True)
    assert pages(root, "of acme") == PAGES
    assert dry["keys_destroyed"] == 0
    found = removed(capsys, root, tenant="acme", keys=keys)
    assert [Path(one["target"]).name for one in found["removals"]] == [*TIERS]
    assert [one["pages"] for one in found["removals"]] == [None, None]
    assert found["keys_destroyed"] == 1
    assert list_keys(keys) == [("acme", 1, True), ("guest", 2, False)]
    assert pages(root, "of acme") == 0
    assert pages(root, "") == PAGES


def test_pages_of_a_tenants_requests_go_and_others_of_their_namespace_stay(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = removed(capsys, root, tenant="guest")
    assert [one["pages"] for one in found["removals"]] == [2, 2]
    assert pages(root, "", tenant="guest") == 0
    assert pages(root, "") == pages(root, "of acme") == PAGES


def test_pages_go_by_their_hashes_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = root / "hashes"
    hashes.write_text("\n".join(f"{name}.kv.L0-1" for name in NAMES[5:]))
    found = removed(capsys, root, hashes=hashes)
    assert [one["pages"] for one in found["removals"]] == [3] * 4
    assert pages(root, "") == pages(root, "of acme") == 5
    hashes.write_text("\n")
    with pytest.raises(UsageProblem, match="has no page hashes"):
        removed(capsys, root, hashes=hashes)


def test_what_is_old_goes_from_all_tiers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert removed(capsys, root, older="1 h")["removals"] == []
    assert len(removed(capsys, root, older="0 s")["removals"]) == 4
    assert pages(root, "") == 0


def test_a_tenant_that_is_not_listed_deletes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ({"tenant": "stranger"}, {"keys": root / "k", "older": "0 s"}):
        with pytest.raises(UsageProblem):
            removed(capsys, root, **given)
    assert pages(root, "") == PAGES


def bytes_left(root: Path) -> int:
    """Return how many pages' bytes lie anywhere in the files of the stores."""
    page = np.full(PAGE_BYTES, 7, np.uint8).tobytes()
    files = (one for tier in TIERS for one in (root / tier).rglob("*"))
    return sum(one.read_bytes().count(page) for one in files if one.is_file())


def fill_a_segment(cache: Attachment) -> None:
    """Store pages until the segment of the first ones is full, and left alone."""
    for first in range(PAGES, 300, PAGES):
        names = [f"{page:064x}" for page in range(first, first + PAGES)]
        assert cache.put(names, {"kv": np.arange(PAGES)}).pages == PAGES
    assert cache.wait_idle(60)


@pytest.mark.parametrize("chosen", ["hashes", "tenant"])
def test_pages_go_for_an_engine_that_has_them_open_and_their_bytes_too(
    root: Path, capsys: pytest.CaptureFixture[str], chosen: str
) -> None:
    hashes = root / "hashes"
    where = {"kv": np.arange(PAGES)}
    with attached(root, "") as cache:
        tenant = "default" if chosen == "hashes" else "guest"
        calls = cache.for_tenant(tenant)
        names = NAMES if chosen == "hashes" else NAMES[:2]
        where = {"kv": np.arange(len(names))}
        fill_a_segment(cache)
        assert calls.get(names, where).pages == len(names)
        hashes.write_text("\n".join(f"{name}.kv.L0-1" for name in NAMES))
        given = {"hashes": hashes} if chosen == "hashes" else {"tenant": "guest"}
        left = bytes_left(root)
        found = removed(capsys, root, **given)
        assert all(not one["kept"] for one in found["removals"])
        assert bytes_left(root) == left - sum(one["pages"] for one in found["removals"])
        assert calls.exists(names).best == 0
        assert calls.get(names, where).pages == 0
    assert pages(root, "", tenant) == 0


def test_pages_beside_which_an_engine_writes_stay_and_it_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = root / "hashes"
    hashes.write_text("\n".join(f"{name}.kv.L0-1" for name in NAMES))
    with attached(root, "") as cache:
        # It goes on filling the segment that has them.
        cache.put(["f" * 64], {"kv": np.zeros(1, np.int64)})
        assert cache.wait_idle(60)
        found = removed(capsys, root, code=1, hashes=hashes)
        counts = sorted((one["pages"], one["kept"]) for one in found["removals"])
        assert counts == [(0, PAGES)] * 2 + [(PAGES, 0)] * 2
        assert cache.get(NAMES, {"kv": np.arange(PAGES)}).pages == PAGES
        capsys.readouterr()
        assert store.rm(str(root / "near"), hashes=hashes, yes=True) == 1
        assert "8 kept: a process is writing beside them" in capsys.readouterr().out
    assert len(removed(capsys, root, hashes=hashes)["removals"]) == 2
    assert pages(root, "") == 0
