"""Measure the s3 backend against obstore alone, boto3 and NIXL's OBJ backend.

Usage: python benchmarks/s3.py [--rounds N]

A server in memory runs on loopback in a process of its own. The clients take
turns within a round, each with the same number of threads, on the same pages
in the same memory: kvdock through a whole attachment, obstore's own calls, each
get copied into numpy memory, boto3 with its faster settings, and one transfer of
NIXL's OBJ backend. The others verify nothing, so the ratios are those of an
attachment without trailers; the figures that begin with `checked` are those of one
with them, as engines have it. A ratio is the median over the rounds; those of `cpu`
compare the seconds of processor time that the client took, which a busy machine
changes less. The last line is a JSON object, which with more figures is also written
to benchmarks/results/s3.json.

The server is a Python program on the same cores, so speeds are those of this
machine and not of the clients; ratios count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import numpy as np
from clients import PATIENT, Client, Kvdock, Memory, finish, nixl_agent, pool_of
from machine import describe

from kvdock import Attachment, Dock, Namespace, Region, RouteRequirements, Shard
from kvdock.config import CoreSettings, Integrity

SIZES = {"64k": (64 << 10, 256), "1m": (1 << 20, 64)}
"""Bytes and number of the pages of a batch: 16 and 64 MiB."""

THREADS = 8
BUCKET = "bench"
RESULT = Path(__file__).parent / "results" / "s3.json"
SERVER = Path(__file__).parents[1] / "plugins/s3/tests/harness/object_server.py"


@attrs.frozen
class Obstore:
    """The library's own calls."""

    store: Any
    memory: Memory
    pool: ThreadPoolExecutor

    def put(self, hashes: Sequence[str]) -> None:
        """Store all pages."""
        import obstore  # noqa: PLC0415 - as the plugin does

        def one(name: str, page: Memory) -> None:
            obstore.put(self.store, name, page, use_multipart=False, mode="create")

        list(self.pool.map(one, hashes, self.memory))

    def get(self, hashes: Sequence[str]) -> None:
        """Load all pages."""
        import obstore  # noqa: PLC0415 - as the plugin does

        def one(name: str, page: Memory) -> None:
            found: Any = obstore.get(self.store, name).bytes()
            page[:] = np.frombuffer(found, np.uint8)

        list(self.pool.map(one, hashes, self.memory))


@attrs.frozen
class Boto3:
    """What many Python programs use."""

    client: Any
    memory: Memory
    pool: ThreadPoolExecutor

    def put(self, hashes: Sequence[str]) -> None:
        """Store all pages."""

        def one(name: str, page: Memory) -> None:
            self.client.put_object(Bucket=BUCKET, Key=name, Body=page.tobytes())

        list(self.pool.map(one, hashes, self.memory))

    def get(self, hashes: Sequence[str]) -> None:
        """Load all pages."""

        def one(name: str, page: Memory) -> None:
            body = self.client.get_object(Bucket=BUCKET, Key=name)["Body"]
            page[:] = np.frombuffer(body.read(), np.uint8)

        list(self.pool.map(one, hashes, self.memory))


@attrs.frozen
class NixlOBJ:
    """NIXL's own calls: one transfer for a batch, and polling."""

    agent: Any
    memory: Memory

    @classmethod
    def open(cls, endpoint: str, memory: Memory) -> NixlOBJ:
        """Make an agent, and register the memory."""
        agent = nixl_agent(f"bench-obj-{memory.shape[1]}")
        parts = urlsplit(endpoint)
        agent.create_backend(
            "OBJ",
            {
                "bucket": BUCKET,
                "endpoint_override": endpoint,
                "scheme": parts.scheme,
                "access_key": KEYS["access_key_id"],
                "secret_key": KEYS["secret_access_key"],
                "region": "us-east-1",
                "use_virtual_addressing": "false",
                # Otherwise objects arrive in the framing of their checksums.
                "req_checksum": "required",
                "num_threads": str(THREADS),
            },
        )
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        return cls(agent, memory)

    def put(self, hashes: Sequence[str]) -> None:
        """Store all pages."""
        self._move("WRITE", hashes)

    def get(self, hashes: Sequence[str]) -> None:
        """Load all pages."""
        self._move("READ", hashes)

    def _move(self, way: str, names: Sequence[str]) -> None:
        page_bytes, at = self.memory.shape[1], self.memory.ctypes.data
        objects = [(0, page_bytes, row, name) for row, name in enumerate(names)]
        known = self.agent.register_memory(objects, "OBJ")
        local = [(at + row * page_bytes, page_bytes, 0) for row in range(len(names))]
        finish(
            self.agent,
            way,
            self.agent.get_xfer_descs(local, "DRAM"),
            self.agent.get_xfer_descs([one[:3] for one in objects], "OBJ"),
        )
        self.agent.deregister_memory(known)


@contextmanager
def server() -> Iterator[str]:
    """Run the server; yield its endpoint."""
    with subprocess.Popen(
        [sys.executable, str(SERVER), BUCKET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdout is None:
            raise SystemExit("the server has no output")
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


KEYS = {"access_key_id": "bench", "secret_access_key": "bench-bench"}


@contextmanager
def kvdock(
    endpoint: str, memory: Memory, integrity: Integrity = Integrity.OFF
) -> Iterator[Kvdock]:
    """Attach the memory as a pool."""
    pool, pages = pool_of(memory), len(memory)
    dock = Dock.load(require=("s3",))
    with Attachment.open(
        dock,
        dock.plan(
            [pool], Shard(), ("s3",), needs=RouteRequirements(integrity=integrity)
        ),
        Namespace(model=f"bench {integrity}"),
        {"kv": Region.of(pool, Shard(), (memory,), pages)},
        {
            "s3": {
                "url": f"s3://{BUCKET}/kvdock",
                "endpoint": endpoint,
                "region": "us-east-1",
                "threads": THREADS,
                "sign_payload": False,
                **KEYS,
            }
        },
        core=CoreSettings(integrity=integrity, deadlines=PATIENT),
    ) as attachment:
        yield Kvdock(attachment, pages)


def obstore(endpoint: str, memory: Memory, pool: ThreadPoolExecutor) -> Obstore:
    """Make the library's client, with the same options."""
    from obstore.store import S3Store  # noqa: PLC0415 - as the plugin does

    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        unsigned_payload=True,
        client_options={"allow_http": True},
        access_key_id=KEYS["access_key_id"],
        secret_access_key=KEYS["secret_access_key"],
    )
    return Obstore(store, memory, pool)


def boto3(endpoint: str, memory: Memory, pool: ThreadPoolExecutor) -> Boto3:
    """Make boto3's client: no checksums, unsigned bodies, a connection a thread."""
    import boto3 as library  # noqa: PLC0415 - 0.4 s
    from botocore.config import Config  # noqa: PLC0415 - same

    config = Config(
        max_pool_connections=THREADS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False, "addressing_style": "path"},
    )
    client = library.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["access_key_id"],
        aws_secret_access_key=KEYS["secret_access_key"],
        config=config,
    )
    return Boto3(client, memory, pool)


Times = dict[tuple[str, str], list[tuple[float, float]]]
"""Step and client to the wall and processor seconds of each round."""


def race(clients: dict[str, Client], memory: Memory, rounds: int) -> Times:
    """Let the clients take turns."""
    right = memory.copy()
    seconds: Times = {}
    for turn in range(rounds + 1):
        # No client always comes after the same other one: what follows boto3 pays
        # for it, 40 % where the order was fixed.
        for name in np.random.default_rng(turn).permutation([*clients]).tolist():
            hashes = [f"{turn:032x}{page:032x}" for page in range(len(memory))]
            client = clients[name]
            if not isinstance(client, Kvdock):
                hashes = [f"{name}/{one}" for one in hashes]
            for step, call in (("put", client.put), ("get", client.get)):
                if step == "get":
                    memory[:] = 0
                gc.collect()
                took = timed(partial(call, hashes))
                if turn:
                    seconds.setdefault((step, name), []).append(took)
            if not (memory == right).all():
                raise SystemExit(f"{name} moved wrong bytes")
    return seconds


def figures_of(seconds: Times, nbytes: int) -> dict[str, float]:
    """Return speeds, and the ratios of the others' times to kvdock's."""
    found = {
        f"{step}_{name}_gb_s": nbytes
        / 1e9
        / statistics.median(wall for wall, _ in took)
        for (step, name), took in seconds.items()
    }
    for step, name in seconds:
        for ours in ("kvdock", "checked"):
            if name in ("kvdock", "checked"):
                continue
            label = "" if ours == "kvdock" else "checked_"
            rounds = list(zip(seconds[step, name], seconds[step, ours], strict=True))
            for kind, at in (("", 0), ("cpu_", 1)):
                found[f"{label}{step}_{kind}vs_{name}"] = statistics.median(
                    theirs[at] / mine[at] for theirs, mine in rounds
                )
    return found


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and processor seconds of one call."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - used


def lookup_ms(one: Kvdock, rounds: int, count: int = 256) -> float:
    """Return the median milliseconds of a lookup of pages that are there."""
    hashes = [f"{'e' * 32}{page:032x}" for page in range(count)]
    for start in range(0, count, one.pages):
        one.put(hashes[start : start + one.pages])
    if one.attachment.exists(hashes).best != count:
        raise SystemExit("not all pages are found")
    return 1e3 * statistics.median(
        timed(lambda: one.attachment.exists(hashes))[0] for _ in range(rounds)
    )


def main() -> None:
    """Run everything once and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    figures: dict[str, float] = {}
    for label, (page_bytes, pages) in SIZES.items():
        shape = (pages, page_bytes)
        memory = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        with (
            server() as endpoint,
            kvdock(endpoint, memory) as mine,
            kvdock(endpoint, memory, Integrity.AUTO) as checked,
            ThreadPoolExecutor(THREADS) as pool,
        ):
            clients: dict[str, Client] = {
                "kvdock": mine,
                "checked": checked,
                "obstore": obstore(endpoint, memory, pool),
            }
            if find_spec("boto3"):
                clients["boto3"] = boto3(endpoint, memory, pool)
            else:
                print("boto3 is not installed: no comparison with it")
            if find_spec("nixl_cu12"):
                clients["nixl_obj"] = NixlOBJ.open(endpoint, memory)
            else:
                print("nixl-cu12 is not installed: no comparison with it")
            seconds = race(clients, memory, given.rounds)
            found = figures_of(seconds, memory.nbytes)
            if label == "64k":
                found["exists_256_ms"] = lookup_ms(mine, given.rounds)
        figures |= {f"{label}_{name}": value for name, value in found.items()}
    figures = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps(figures, indent=2))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps({"machine": describe(), "figures": figures}, indent=2) + "\n"
    )
    named = {name: value for name, value in figures.items() if "_vs_" in name}
    print(json.dumps(named | {"exists_256_ms": figures["64k_exists_256_ms"]}))


if __name__ == "__main__":
    main()
