"""The how-to on pages that SGLang stored itself, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvdock import Attachment, Dock, Namespace, Region, Shard
from kvdock.pools import mha

PAGE = Path(__file__).parents[1] / "docs/how-to/migrate-from-sglang-keys.md"
POOL = mha("kv", anchor=True, layers=range(2), page_tokens=4, heads=2, head_dim=8)


def test_the_example_takes_over_what_is_of_this_model_and_whole(
    tmp_path: Path,
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    nbytes = POOL.page_bytes(Shard())
    content = np.arange(nbytes).astype(np.uint8)
    (old / "aa_org-Model_0_1.bin").write_bytes(content.tobytes())
    (old / "bb_org-Model_0_1.bin").write_bytes(b"short")
    (old / "cc_org-Other_0_1.bin").write_bytes(content.tobytes())
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    code = found[1]
    for words, here in (
        ("/tmp/hicache", str(old)),  # noqa: S108 - the words of the page
        ("/var/lib/kvdock", str(new)),
        ("range(32)", "range(2)"),
        ("page_tokens=64", "page_tokens=4"),
        ("heads=8", "heads=2"),
        ("head_dim=128", "head_dim=8"),
        # The disk that tests run on may have less than a store leaves free.
        ('"root": NEW', '"root": NEW, "free_space": 0'),
    ):
        assert words in code
        code = code.replace(words, here)
    exec(compile(code, str(PAGE), "exec"), {})  # noqa: S102 - our own page
    memory = np.zeros(nbytes, np.uint8)
    dock = Dock.load(require=["file"])
    with Attachment.open(
        dock,
        dock.plan([POOL], Shard(), prefer=["file"]),
        Namespace(model="org/Model"),
        {"kv": Region.of(POOL, Shard(), [memory], pages=1)},
        {"file": {"root": str(new), "free_space": 0}},
    ) as cache:
        assert cache.get(["aa"], {"kv": [0]}).pages == 1
        assert cache.exists(["bb"]).best == cache.exists(["cc"]).best == 0
    assert np.array_equal(memory, content)
