"""What a configuration and a model's files say, and that nothing is left out."""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import NamespaceError
from kvdock.identity import (
    Exemption,
    WeightsBy,
    canonical_value,
    code_elsewhere,
    files_digest,
    files_state,
    folder_digest,
    identity_fields,
    locate_model,
    model_identity,
    read_exemptions,
    texts_digest,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Kind(enum.Enum):
    ONE = "one"


@attrs.define
class _Cache:
    blocks: int = 1
    dtype: str = "auto"


@attrs.define
class _Config:
    cache: _Cache = attrs.field(factory=_Cache)
    other: object = None


def test_a_field_that_nobody_has_listed_counts() -> None:
    listed = [Exemption("cache.blocks", "a test")]
    assert identity_fields(_Config(_Cache(2)), listed) == {
        "cache": "_Cache",
        "cache.dtype": "auto",
        "other": None,
    }
    plain = SimpleNamespace(cache=SimpleNamespace(blocks=1, new=3))
    assert identity_fields(plain, listed)["cache.new"] == 3


def test_an_exemption_whose_condition_fails_counts() -> None:
    def when(config: object) -> bool:
        return isinstance(config, _Config) and config.other is None

    listed = [Exemption("cache.blocks", "a test", when)]
    assert "cache.blocks" not in identity_fields(_Config(), listed)
    assert "cache.blocks" in identity_fields(_Config(other=1), listed)


def test_listed_exemptions_have_their_group_reason_and_condition() -> None:
    def never(_: object) -> bool:
        return False

    tables = [
        {"fields": "a\nb.* ", "group": "g", "reason": "two\nlines\n"},
        {"fields": "c", "reason": "one", "when": "never"},
    ]
    assert read_exemptions(tables, "top", {"never": never}) == (
        Exemption("top.g.a", "two lines"),
        Exemption("top.g.b.*", "two lines"),
        Exemption("top.c", "one", never),
    )
    with pytest.raises(KeyError, match="never"):
        read_exemptions(tables)


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (_Kind.ONE, "one"),
        ({3, 1, 2}, [1, 2, 3]),
        ((1, None, True), [1, None, True]),
        (Path("/a"), "/a"),
        (float("inf"), "inf"),
        (b"\1", "01"),
        (hashlib.sha256, "_hashlib.openssl_sha256"),
        (_Cache, f"{__name__}._Cache"),
    ],
)
def test_values_are_described_alike_in_every_process(
    value: object, described: object
) -> None:
    assert canonical_value(value, where="it") == described


@pytest.mark.parametrize("value", [object(), lambda: 1, {"a": [object()]}])
def test_a_value_without_a_description_is_an_error(value: object) -> None:
    with pytest.raises(NamespaceError, match="nothing says"):
        canonical_value(value, where="it")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    max_leaves=8,
)


@given(_JSON)
def test_plain_data_stays_as_it_is(value: object) -> None:
    assert canonical_value(value, where="it") == value


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_a_mapping_does_not_count(value: dict[str, int]) -> None:
    other = dict(reversed(value.items()))
    assert list(canonical_value(other, where="it")) == sorted(value)  # type: ignore[call-overload]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope": 1}')
    (folder / "configuration_own.py").write_text("a = 1")
    (folder / "chat_template.jinja").write_text("hello")
    (folder / "model-1.safetensors").write_bytes(_safetensors(b"\0"))
    (folder / "model-2.safetensors").write_bytes(_safetensors(b"\0"))
    return folder


def _safetensors(value: bytes) -> bytes:
    header = b'{"a":{"dtype":"U8","shape":[65536],"data_offsets":[0,65536]}}'
    return len(header).to_bytes(8, "little") + header + value * (1 << 16)


def _keep_times(file: Path, change: Callable[[], object]) -> None:
    seen = file.stat()
    change()
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def test_one_byte_in_the_middle_of_the_weights_is_another_model(model: Path) -> None:
    before = model_identity(str(model))
    file = model / "model-2.safetensors"
    data = bytearray(file.read_bytes())
    data[1 << 15] ^= 1
    _keep_times(file, lambda: file.write_bytes(data))
    assert model_identity(str(model)) != before


@pytest.mark.parametrize(
    "name", ["config.json", "configuration_own.py", "chat_template.jinja", "new.json"]
)
def test_every_small_file_counts(model: Path, name: str) -> None:
    whole, texts = files_digest(model), texts_digest(model)
    (model / name).write_text("other")
    assert files_digest(model) != whole
    assert texts_digest(model) != texts


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('{"a": 1, "b": [2]}', '{\n  "a" : 1,\n "b": [ 2 ] }\n', True),
        ('{"a": "\u00e4"}', '{"a": "\\u00e4"}', True),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', False),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ('{"a": 1}', '[["a", 1]]', False),
        ('{"a": 1}', '{"a": true}', False),
        ("{", "{ ", False),
        ("[" * 100_000, "[" * 100_000 + " ", False),
    ],
)
def test_json_counts_as_it_is_read(
    model: Path,
    before: str,
    after: str,
    same: bool,  # noqa: FBT001 - a column
) -> None:
    digests = []
    for text in (before, after):
        (model / "config.json").write_text(text)
        digests.append(files_digest(model))
    assert (digests[0] == digests[1]) == same


def test_every_file_below_a_folder_counts_and_compiled_ones_do_not(
    tmp_path: Path,
) -> None:
    inside = tmp_path / "package" / "below"
    inside.mkdir(parents=True)
    (inside / "code.py").write_text("a = 1")
    before = folder_digest(tmp_path / "package")
    (inside / "__pycache__").mkdir()
    (inside / "__pycache__" / "code.pyc").write_bytes(b"compiled")
    assert folder_digest(tmp_path / "package") == before
    moved = (tmp_path / "package").rename(tmp_path / "elsewhere")
    assert folder_digest(moved) == before
    (moved / "below" / "data.bin").write_bytes(b"1")
    with_data = folder_digest(moved)
    assert with_data != before
    (moved / "below" / "data.bin").rename(moved / "data.bin")
    assert folder_digest(moved) != with_data
    assert folder_digest(moved / "data.bin") != before


def test_neither_the_place_nor_the_way_to_the_files_counts(
    model: Path, tmp_path: Path
) -> None:
    before = model_identity(str(model))
    (tmp_path / "link").symlink_to(model)
    (model / "README.md").write_text("not read by an engine")
    (model / "checkpoint.json").mkdir()
    assert model_identity(str(tmp_path / "link")) == before
    assert model_identity(str(model.rename(tmp_path / "elsewhere"))) == before


def test_two_files_that_change_places_are_another_model(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(_safetensors(b"\1"))
    before = files_digest(model)
    (model / "model-1.safetensors").rename(model / "spare")
    (model / "model-2.safetensors").rename(model / "model-1.safetensors")
    (model / "spare").rename(model / "model-2.safetensors")
    assert files_digest(model) != before


def _touch(model: Path, time_ns: int) -> None:
    for file in model.glob("*.safetensors"):
        os.utime(file, ns=(time_ns, time_ns))


def test_headers_sizes_and_times_know_a_file_without_reading_it(model: Path) -> None:
    _touch(model, 1_000_000_001)
    before = files_digest(model, weights=WeightsBy.HEADERS)
    assert before != files_digest(model)
    _touch(model, 1_000_000_002)
    changed = files_digest(model, weights=WeightsBy.HEADERS)
    assert changed != before
    file = model / "model-1.safetensors"
    data = file.read_bytes().replace(b"U8", b"I8")
    _keep_times(file, lambda: file.write_bytes(data))
    assert files_digest(model, weights=WeightsBy.HEADERS) != changed


def test_a_time_that_an_archive_has_set_says_nothing(model: Path) -> None:
    _touch(model, 1_000_000_000)
    before = files_digest(model, weights=WeightsBy.HEADERS)
    file = model / "model-1.safetensors"
    _keep_times(file, lambda: file.write_bytes(_safetensors(b"\1")))
    assert files_digest(model, weights=WeightsBy.HEADERS) != before


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Return a snapshot as the hub's client leaves it: links to content."""
    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    config, weights = b'{"rope": 1}', _safetensors(b"\0")
    small = hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()  # noqa: S324 - git's
    for name, blob, data in (
        ("config.json", small, config),
        ("model.safetensors", hashlib.sha256(weights).hexdigest(), weights),
    ):
        (blobs / blob).write_bytes(data)
        (folder / name).symlink_to(f"../../blobs/{blob}")
    return folder


def test_files_are_found_by_their_path_or_in_the_hubs_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "models--one--model"
    inside = folder / "snapshots" / COMMIT
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    cache = str(tmp_path)
    assert locate_model(str(inside)) == inside
    assert locate_model("one/model", cache=cache) == inside
    assert locate_model("one/model", revision=COMMIT, cache=cache) == inside
    assert locate_model("one/model", revision="f" * 40, cache=cache) is None
    assert locate_model("one/model", cache=cache, file="other.json") is None
    assert locate_model("no/name/of/it", cache=cache) is None


def test_a_snapshot_of_the_hub_is_known_by_its_commit(snapshot: Path) -> None:
    assert model_identity(str(snapshot)) == f"commit:{COMMIT}"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "more.py"])
def test_a_file_that_the_hub_did_not_deliver_is_known_by_its_content(
    snapshot: Path, name: str
) -> None:
    found = set()
    for text in ("one", "two"):
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).write_text(text)
        found.add(model_identity(str(snapshot)))
    assert len(found) == 2
    assert all(one.startswith(f"commit:{COMMIT} with ") for one in found)


def test_a_small_file_that_was_edited_through_its_link_counts(snapshot: Path) -> None:
    (snapshot / "config.json").write_text('{"rope": 2}')
    assert model_identity(str(snapshot)) != f"commit:{COMMIT}"


def test_a_name_of_the_hub_needs_a_commit() -> None:
    assert model_identity("a/b", commit=COMMIT) == f"commit:{COMMIT}"
    assert model_identity("a/b", revision=COMMIT) == f"commit:{COMMIT}"
    for revision in ("", "main"):
        with pytest.raises(NamespaceError, match="nothing says which weights"):
            model_identity("a/b", revision=revision)


def test_a_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match="no files of weights"):
        model_identity(str(tmp_path))


def test_the_state_of_files_changes_with_them_whatever_time_they_are_given(
    model: Path,
) -> None:
    before = files_state(model)
    assert files_state(model) == before
    file = model / "model-1.safetensors"
    _keep_times(file, lambda: file.write_bytes(_safetensors(b"\1")))
    assert files_state(model) != before


def test_code_that_is_taken_from_another_model_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "org" / "code"
    place.mkdir(parents=True)
    (place / "modeling.py").write_text("a = 1")
    auto_map = {
        "AutoConfig": "configuration.Own",
        "AutoModel": "org/code--modeling.Model",
        "AutoTokenizer": ["org/elsewhere--tokens.Slow", None],
    }
    before = code_elsewhere(auto_map)
    assert list(before) == ["code of org/code"]
    (place / "modeling.py").write_text("a = 2")
    assert code_elsewhere(auto_map) != before
    assert code_elsewhere(None) == {}


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match="cannot be read"):
        texts_digest(tmp_path / "nowhere")


def test_a_whole_group_may_be_exempt_and_its_namesakes_are_not() -> None:
    config = SimpleNamespace(cache=_Cache(), cache_2=_Cache())
    found = identity_fields(config, [Exemption("cache.*", "a test")])
    assert set(found) == {"cache_2", "cache_2.blocks", "cache_2.dtype"}
