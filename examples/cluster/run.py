"""A Mooncake cluster on this host: one command, nothing left behind.

    python examples/cluster/run.py

Starts a master and three processes that own memory, then two engines in
processes of their own. One engine stores pages, the other reads them; an owner
is killed, and both go on with what is left. Needs kvdock-mooncake[cpu].
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from kvdock_mooncake.server import start_master, start_owner

ENGINE = Path(__file__).with_name("engine.py")
OWNERS = 3
OWNED_BYTES = 64 << 20
PAGES = 96


def engine(master: str, what: str) -> str:
    """Run one engine process to its end and return what it says."""
    done = subprocess.run(  # noqa: S603 - this interpreter, the file beside this one
        [sys.executable, str(ENGINE), master, what, str(PAGES)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def main() -> None:
    """Start the cluster, use it, kill a part of it, use it again."""
    with ExitStack() as stack:
        # A lost owner is noticed after two seconds instead of ten.
        master = start_master("-client_ttl=2", "-default_kv_lease_ttl=5000")
        stack.callback(master.stop)
        owners = [start_owner(master.address, OWNED_BYTES) for _ in range(OWNERS)]
        for owner in owners:
            stack.callback(owner.stop)
        say(f"master at {master.address}, {OWNERS} owners of 64 MiB each")
        say(f"engine 1 stores:  {engine(master.address, 'put')}")
        say(f"engine 2 reads:   {engine(master.address, 'get')}")
        owners[0].process.kill()
        say("an owner is killed")
        time.sleep(4)
        say(f"engine 2 reads:   {engine(master.address, 'get')}")
        say(f"engine 1 stores:  {engine(master.address, 'put')}")
        say(f"engine 2 reads:   {engine(master.address, 'get')}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
