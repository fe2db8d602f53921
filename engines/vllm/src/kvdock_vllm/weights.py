"""Which weights a model or an adapter is: its commit, or the content of its files.

A name says nothing: two servers may serve other weights under one path. Sizes and
times of files do not either, and samples of them miss a fine-tune that leaves the
sampled tensors as they were.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvdock.errors import NamespaceError

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_DESCRIPTIONS = frozenset({"config.json", "adapter_config.json", "params.json"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROVIDE = (
    'Provide "revision" in kv_connector_extra_config, and change it whenever the '
    "weights change."
)
_THREADS = 4


def weights_identity(model: str, *, revision: str = "", commit: str = "") -> str:
    """Return what stands for the weights of a model.

    Args:
        model: Path of a folder or a file, or a name of a hub.
        revision: The hub's revision that the operator asked for.
        commit: The hub's commit that was loaded, where the engine knows it.

    Raises:
        NamespaceError: If nothing says which weights these are.
    """
    path = Path(model)
    if path.exists():
        # A snapshot of the hub's cache is named by its commit.
        snapshot = path.resolve()
        if snapshot.parent.name == "snapshots" and _COMMIT.fullmatch(snapshot.name):
            return f"commit:{snapshot.name}"
        return f"files:{files_digest(path)}"
    if commit:
        return f"commit:{commit}"
    if _COMMIT.fullmatch(revision):
        return f"commit:{revision}"
    raise NamespaceError(f"nothing says which weights {model!r} are", fix=_PROVIDE)


def files_digest(path: Path) -> str:
    """Return a digest of the content of a model's files, in hex.

    It reads all of them, with some threads: the engine reads them too, so they are in
    the page cache for it.

    Raises:
        NamespaceError: If there is no file of weights, or one cannot be read.
    """
    files = [path] if path.is_file() else sorted(_files(path))
    if not any(file.suffix in _WEIGHTS for file in files):
        raise NamespaceError(f"{str(path)!r} has no files of weights", fix=_PROVIDE)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = list(threads.map(_file_digest, files))
    except OSError as error:
        raise NamespaceError(
            f"the weights in {str(path)!r} cannot be read: {error}", fix=_PROVIDE
        ) from error
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        # A file's own name, not where its folder lies.
        name = file.name if file == path else str(file.relative_to(path))
        whole.update(f"{name}\0{digest}\0".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def files_state(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, time and inode of a model's files, to see a change.

    Raises:
        OSError: If they cannot be looked at.
    """
    files = [path] if path.is_file() else sorted(_files(path))
    found = []
    for file in files:
        seen = os.stat(file)  # noqa: PTH116 - per request: half the time of Path.stat
        found.append((str(file), seen.st_size, seen.st_mtime_ns, seen.st_ino))
    return tuple(found)


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.suffix in _WEIGHTS or file.name in _DESCRIPTIONS:
            yield file


def _file_digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
