"""Simulate hosts with tiers, for sizes that are to be chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvdock.config import read_tiers
from kvdock.units import parse_bytes
from kvdock_cli import progress
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import simulate as report

_MOST_HOSTS = 1000
_MOST_TOKENS = 1 << 20


def simulate(  # noqa: PLR0913 - one option each
    trace: Path,
    /,
    *,
    tiers: str = "memory,disk,far",
    sizes: tuple[str, ...] = ("0.01,0.02,0.05,0.1:0.1,0.5:1",),
    hosts: str = "1",
    spread: Literal["round", "prefix"] = "prefix",
    block: str = "1 MiB",
    block_tokens: int = 64,
    prefill: float = 8000.0,
    rate: float | None = None,
    requests: int = 0,
    json: bool = False,
) -> int:
    """Predict hit rates for tier sizes and host counts from a trace.

    Serves a trace without any store: evictions and promotions are the stores' own, and
    copies take no time. Each host has tiers of its own; all share the last one. The
    table says which sizes pay, what the last tier must carry, and how much of the
    engines' time is saved.

    Args:
        trace: JSON lines with hash_ids or ranges, a request each, plain or as .gz; or
            the folder of a journal.
        tiers: Tiers with their rules as in kvdock.toml, near first.
        sizes: Room in each tier of a host, such as 0.02,0.05:0.5:0 or
            "64 GiB:2 TiB:0". A number is a share of the different blocks, commas part
            what is tried one after the other, 0 is a tier without a limit.
        hosts: How many hosts; commas part what is tried.
        spread: Send requests round robin, or those with one prefix to one host.
        block: Bytes of a block, over all ranks of an engine.
        block_tokens: Tokens of a block.
        prefill: Tokens that an engine computes in a second.
        rate: Requests a second, all together; without it those of the trace.
        requests: Read only so many.
        json: Print one line of JSON.
    """
    # numpy is not needed before a command runs.
    from kvdock_cli.simulation.hosts import Hosts, serve  # noqa: PLC0415 - see above
    from kvdock_cli.simulation.traces import read_trace  # noqa: PLC0415 - see above

    rules = read_tiers(tiers, "--tiers")
    counts = [_count(one) for one in hosts.split(",")]
    if not 1 <= block_tokens <= _MOST_TOKENS:
        raise UsageProblem(f"--block-tokens is a number from 1 to {_MOST_TOKENS}")
    if not prefill > 0 or (rate is not None and not rate > 0):
        raise UsageProblem("--prefill and --rate are above 0")
    block_bytes = parse_bytes(block)
    given = read_trace(trace, requests)
    if not given.requests or not block_bytes:
        raise UsageProblem(f"{trace} has no requests, or a block no bytes")
    swept = [
        (size, count)
        for count in counts
        for one in sizes
        for size in _each(one, len(rules))
    ]
    seconds = len(given.requests) / rate if rate else given.seconds
    rows = []
    with progress.shown("simulating", len(swept) * len(given.requests)) as bar:
        for size, count in swept:
            rooms = [_room(one, given.unique, block_bytes) for one in size.split(":")]
            served = Hosts(rules, rooms, given.unique, count)
            serve(given, served, by_prefix=spread == "prefix", served=bar.advance)
            tiers_of = {
                rule.backend: {
                    "share": one.loaded / served.asked,
                    "read_bytes": one.loaded * block_bytes,
                    "written_bytes": one.written * block_bytes,
                    "read_bytes_per_s": _rate(one.loaded * block_bytes, seconds),
                    "written_bytes_per_s": _rate(one.written * block_bytes, seconds),
                }
                for rule, one in zip(rules, served.moved, strict=True)
            }
            computed_s = served.computed * block_tokens / prefill
            row = {
                "hosts": count,
                "sizes": size,
                "hits": served.hits,
                "tiers": tiers_of,
                "saved_s": served.asked * block_tokens / prefill - computed_s,
                "computed_s": computed_s,
            }
            rows.append(row)
    about = {
        "trace": given.name,
        "requests": len(given.requests),
        "blocks": given.blocks,
        "unique_bytes": given.unique * block_bytes,
        "seconds": seconds,
        "spread": spread,
    }
    return emit(report.report(about, rows), as_json=json)


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if seconds else None


def _count(text: str) -> int:
    if text.strip().isdecimal() and 1 <= int(text) <= _MOST_HOSTS:
        return int(text)
    raise UsageProblem(f"--hosts {text!r} is not a number from 1 to {_MOST_HOSTS}")


def _each(sizes: str, tiers: int) -> Iterator[str]:
    """Yield every combination of the sizes that are given for each tier."""
    parts = [one.split(",") for one in sizes.split(":")]
    if len(parts) != tiers:
        raise UsageProblem(
            f"--sizes {sizes!r} has {len(parts)} parts for {tiers} tiers",
            fix="Part the tiers with colons, near first.",
        )
    return (":".join(map(str.strip, one)) for one in itertools.product(*parts))


def _room(size: str, unique: int, block_bytes: int) -> int:
    """Return for how many blocks a tier has room; 0 for no limit."""
    try:
        share = float(size)
    except ValueError:
        return max(1, parse_bytes(size) // block_bytes)
    if not 0 <= share <= 1:
        raise UsageProblem(
            f"--sizes: {size} is not a share of the different blocks",
            fix='Give a number from 0 to 1, or bytes such as "64 GiB".',
        )
    return max(1, int(share * unique)) if share else 0
