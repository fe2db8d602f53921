"""The compiled hash and its twin in Python, and when there is none."""

import ctypes
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvdock import compiled, native

MEMORY = np.random.default_rng(1).integers(0, 256, 1 << 18, np.uint8)
PIECES = st.lists(
    st.one_of(st.integers(0, 130), st.integers(0, 5000), st.just(1024), st.just(64)),
    min_size=1,
    max_size=5,
)


@pytest.fixture
def loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Load the library anew, from a folder of its own."""
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    built().parent.mkdir()
    native.library.cache_clear()
    yield monkeypatch
    native.library.cache_clear()


def built() -> Path:
    return Path(compiled.library_path())


@pytest.mark.skipif(
    not shutil.which("cc") or "KVDOCK_PURE" in os.environ,
    reason="no C compiler is here, or it is not asked for",
)
def test_an_installation_with_a_compiler_has_the_library() -> None:
    assert native.library() is not None


def register_bytes() -> ctypes.c_int64:
    """Return the width of the registers that hash, as the library has it."""
    if native.library() is None:
        pytest.skip("no C compiler was there when kvdock was installed")
    library = ctypes.CDLL(compiled.library_path())
    return ctypes.c_int64.in_dll(library, "kvdock_register_bytes")


@contextmanager
def hashing(by: int) -> Iterator[None]:
    """Hash in registers of so many bytes; 0 for Python."""
    with pytest.MonkeyPatch.context() as patch:
        if not by:
            patch.setattr(native, "library", lambda: None)
            yield
            return
        width = register_bytes()
        widest = width.value
        if by > widest:
            pytest.skip(f"this processor has registers of {widest} bytes")
        width.value = by
        try:
            yield
        finally:
            width.value = widest


def test_the_widest_registers_of_the_processor_hash() -> None:
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].split("\n")[0]
    names = flags.split() if platform.machine() == "x86_64" else []
    widest = 64 if "avx512f" in names else 32 if "avx2" in names else 16
    assert register_bytes().value == widest


@pytest.mark.parametrize("registers", [0, 16, 32, 64])
@given(
    rows=st.lists(PIECES, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    same=st.booleans(),
)
@example(rows=[[240]], seed=0, same=True)
@example(rows=[[241], [256]], seed=0, same=False)
@example(rows=[[1025, 0, 63], [1, 1024]], seed=0, same=False)
@example(rows=[[300], [1 << 17], [400]], seed=3, same=False)
def test_objects_are_hashed_piece_by_piece(
    registers: int,
    rows: list[list[int]],
    seed: int,
    same: bool,  # noqa: FBT001 - drawn
) -> None:
    width = max(map(len, rows))
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    sizes = np.array(padded, np.int64)
    if same:
        sizes = np.broadcast_to(sizes[0], sizes.shape)
    starts = np.random.default_rng(seed).integers(
        0, len(MEMORY) - (1 << 17), sizes.shape
    )
    wanted = [
        xxhash.xxh3_64_intdigest(
            b"".join(
                MEMORY[at : at + size].tobytes() for at, size in zip(*row, strict=True)
            )
        )
        for row in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]
    # In columns of another order, as a view of a table may be.
    places = np.asfortranarray(starts + MEMORY.ctypes.data)
    with hashing(registers):
        assert native.checksums(places, sizes).tolist() == wanted


@pytest.mark.slow
def test_a_hundred_thousand_cuts_have_the_hashes_that_python_finds() -> None:
    random = np.random.default_rng(3)
    sizes = random.integers(0, 130, (100_000, 5))
    sizes[::2] *= random.integers(1, 40, 5)  # whole stripes and blocks among them
    sizes[random.random(sizes.shape) < 0.3] = 0
    sizes[:, 2] += 241
    starts = MEMORY.ctypes.data + random.integers(0, len(MEMORY) // 2, sizes.shape)
    with hashing(by=0):
        expected = native.checksums(starts, sizes)
    widest = register_bytes().value
    for registers in (16, 32, 64):
        if registers <= widest:
            with hashing(registers):
                different = native.checksums(starts, sizes) != expected
            assert not different.any(), (registers, sizes[different][0])


@pytest.mark.usefixtures("loading")
def test_without_a_library_python_does_it() -> None:
    assert native.library() is None
    at = np.array([[MEMORY.ctypes.data]])
    found = native.checksums(at, np.array([[len(MEMORY)]]))
    assert found.tolist() == [xxhash.xxh3_64_intdigest(MEMORY.tobytes())]


@pytest.mark.usefixtures("loading")
@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", None])
def test_a_library_that_cannot_be_loaded_is_none(content: bytes | None) -> None:
    if content is None:
        built().mkdir()
    else:
        built().write_bytes(content)
    assert native.library() is None


def with_a_library(loading: pytest.MonkeyPatch) -> None:
    loading.undo()
    if native.library() is None:
        pytest.skip("no C compiler was there when kvdock was installed")
    native.library.cache_clear()


def test_a_library_of_another_version_is_none(loading: pytest.MonkeyPatch) -> None:
    with_a_library(loading)
    loading.setattr(compiled, "_VERSION", compiled._VERSION + 1)
    assert native.library() is None


@pytest.mark.parametrize(
    ("value", "used"), [("1", False), ("yes", False), ("0", True), ("", True)]
)
def test_a_variable_turns_the_library_off_as_when_it_is_built(
    loading: pytest.MonkeyPatch, value: str, *, used: bool
) -> None:
    with_a_library(loading)
    loading.setenv("KVDOCK_PURE", value)
    assert (native.library() is not None) == used


SLOT = 4096
WRONG = np.uint64(1)
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


class Moved:
    """Objects of one slot each, some in a second file, and a movement of them."""

    def __init__(self, folder: Path, offsets: list[int], **more: Any) -> None:
        compiled = native.library()
        if compiled is None:
            pytest.skip("no C compiler was there when kvdock was installed")
        count = len(offsets)
        self.content = np.random.default_rng(2).integers(0, 256, (8, SLOT), np.uint8)
        for name in ("a", "b"):
            (folder / name).write_bytes(self.content.tobytes())
        self.files = [os.open(folder / name, os.O_RDONLY) for name in ("a", "b")]
        self.memory = np.full((count, SLOT), 7, np.uint8)
        self.sums = np.zeros(count, np.uint64)
        self.nbytes = np.zeros(count, np.int64)
        self.errors = np.full(count, 99, np.int32)
        self.right = np.array(
            [
                xxhash.xxh3_64_intdigest(self.content[at // SLOT % 8].tobytes())
                for at in offsets
            ],
            np.uint64,
        )
        sizes = more.pop("sizes", np.broadcast_to(np.int64(SLOT), (count, 1)))
        self.movement = native.Movement(
            compiled=compiled,
            order=np.arange(count),
            files=np.full(count, self.files[0]),
            offsets=np.array(offsets),
            sums=self.sums,
            nbytes=self.nbytes,
            errors=self.errors,
        )
        addresses = self.memory.ctypes.data + SLOT * np.arange(count)[:, None]
        fields: dict[str, Any] = {"write": False, "granule": 8 * SLOT}
        self.movement.begin(addresses, sizes, **(fields | more))

    def move(self) -> list[int]:
        self.movement.move(0, len(self.errors))
        for file in self.files:
            os.close(file)
        return self.errors.tolist()

    def there(self) -> list[str]:
        """Return what is in the memory of each object."""
        kinds = {7: "before", 0: "zeros"}
        return [
            kinds[int(row[0])] if len(set(row.tolist())) == 1 else "bytes"
            for row in self.memory
        ]


@pytest.mark.parametrize("flags", sorted({0, NOWAIT}))
def test_what_differs_or_ends_early_leaves_no_byte(tmp_path: Path, flags: int) -> None:
    # The third one is an adjacent object, the last one lies half behind the end.
    offsets = [0, 2 * SLOT, 3 * SLOT, 7 * SLOT + SLOT // 2]
    expected = np.full(4, WRONG)
    moved = Moved(tmp_path, offsets, flags=flags, expected=expected)
    expected[[0, 2]] = moved.right[[0, 2]]
    assert moved.move() == [0, 0, 0, native.LEFT]
    assert moved.there() == ["bytes", "zeros", "bytes", "zeros"]
    assert moved.nbytes.tolist() == [SLOT, SLOT, SLOT, 0]
    assert moved.sums[:3].tolist() == moved.right[:3].tolist()


def test_what_is_left_already_is_not_touched_and_parts_its_neighbours(
    tmp_path: Path,
) -> None:
    moved = Moved(tmp_path, [0, SLOT, 2 * SLOT], expected=np.full(3, WRONG))
    moved.errors[1] = native.LEFT
    assert moved.move() == [0, native.LEFT, 0]
    assert moved.there() == ["zeros", "before", "zeros"]
    assert moved.sums.tolist() == [moved.right[0], 0, moved.right[2]]


@pytest.mark.skipif(not NOWAIT, reason="this Python does not name RWF_NOWAIT")
def test_what_the_page_cache_has_not_is_left(tmp_path: Path) -> None:
    moved = Moved(tmp_path, [0, 8 * SLOT, 7 * SLOT], flags=NOWAIT)
    moved.movement.leave_uncached(0, 3)
    assert moved.errors.tolist() == [99, native.LEFT, 99]
    assert moved.move() == [0, native.LEFT, 0]


def test_objects_of_two_files_share_no_call(tmp_path: Path) -> None:
    moved = Moved(tmp_path, [0, SLOT])
    moved.movement.files[1] = moved.files[1]
    os.truncate(tmp_path / "b", 0)
    assert moved.move() == [0, native.LEFT]


def test_a_write_that_fails_is_left(tmp_path: Path) -> None:
    moved = Moved(tmp_path, [0, SLOT], write=True)
    assert moved.move() == [native.LEFT] * 2
    assert (tmp_path / "a").read_bytes() == moved.content.tobytes()


def test_rows_are_written_as_they_were_hashed_before(tmp_path: Path) -> None:
    moved = Moved(tmp_path, [0, SLOT], write=2)
    os.close(moved.files[0])
    moved.files[0] = os.open(tmp_path / "a", os.O_RDWR)
    assert moved.movement.files.tolist() == [moved.files[0]] * 2
    before = xxhash.xxh3_64_intdigest(moved.memory[0].tobytes())
    moved.movement.hash_rows(0, 2)
    assert moved.sums.tolist() == [before] * 2
    moved.memory[1] = 9
    assert moved.move() == [0, 0]
    # The sum is that of the hashed bytes: what was written since then is damage.
    assert moved.sums.tolist() == [before] * 2
    stored = (tmp_path / "a").read_bytes()
    assert stored[: 2 * SLOT] == bytes([7]) * SLOT + bytes([9]) * SLOT
    assert stored[2 * SLOT :] == moved.content[2:].tobytes()


def test_very_short_rows_are_left_when_they_are_hashed(tmp_path: Path) -> None:
    moved = Moved(tmp_path, [0, SLOT], write=2, sizes=np.full((2, 1), 240))
    moved.movement.hash_rows(0, 2)
    assert moved.errors.tolist() == [native.LEFT] * 2
    assert moved.move() == [native.LEFT] * 2


@pytest.mark.skipif(not NOWAIT, reason="this Python does not name RWF_NOWAIT")
def test_what_takes_several_calls_is_left_where_nothing_may_wait(
    tmp_path: Path,
) -> None:
    moved = Moved(tmp_path, [0, SLOT], flags=NOWAIT, granule=SLOT - 1)
    moved.movement.leave_uncached(0, 2)
    assert moved.move() == [native.LEFT] * 2
    assert moved.there() == ["before", "before"]


@pytest.mark.skipif(not NOWAIT, reason="this Python does not name RWF_NOWAIT")
def test_a_file_system_that_cannot_be_asked_is_left_unless_it_is_memory(
    tmp_path: Path,
) -> None:
    moved = Moved(tmp_path, [0, SLOT], flags=NOWAIT, sizes=np.full((2, 1), 300))
    other = os.open("/proc/self/status", os.O_RDONLY)
    moved.movement.files[:] = other
    moved.movement.leave_uncached(0, 1)
    os.close(other)
    assert moved.errors.tolist() == [native.LEFT, 99]
