"""Make, list, rotate and destroy the keys with which pages are sealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvdock.wrappers.key_ring import (
    add_key,
    destroy_keys,
    list_keys,
    read_master_key,
    wrap_again,
)
from kvdock_cli.output import UsageProblem, confirm, emit
from kvdock_cli.reports._report import Column, Report, Table

SCHEMA = "kvdock.keys/1"
_VARIABLE = "KV_MASTER_KEY"


def make(
    file: Path,
    tenant: str,
    /,
    *,
    master_file: Path | None = None,
    master_env: str = _VARIABLE,
    json: bool = False,
) -> int:
    """Make the first key of a tenant, and the file where there is none.

    Args:
        file: The key file.
        tenant: The tenant's name; "default" for all that are not listed.
        master_file: The file of the master key; without one the variable has it.
        master_env: The variable of the master key, in hexadecimal.
        json: Print one line of JSON.
    """
    if file.exists() and any(
        name == tenant and not gone for name, _, gone in list_keys(file)
    ):
        raise UsageProblem(
            f"tenant {tenant!r} has a key", fix="`kvdock keys rotate` makes a new one."
        )
    number = add_key(file, read_master_key(master_file, master_env), tenant)
    return _done(f"key {number} of {tenant} seals from now on", json, key=number)


def rotate(
    file: Path,
    tenant: str = "",
    /,
    *,
    new_master_file: Path | None = None,
    master_file: Path | None = None,
    master_env: str = _VARIABLE,
    json: bool = False,
) -> int:
    """Give a tenant a new key, or wrap all keys with a new master key.

    Pages stay readable: the keys that have sealed them stay in the file.

    Args:
        file: The key file.
        tenant: The tenant whose pages a new key seals from now on.
        new_master_file: The file of the new master key.
        master_file: The file of the master key; without one the variable has it.
        master_env: The variable of the master key, in hexadecimal.
        json: Print one line of JSON.
    """
    if bool(tenant) == bool(new_master_file):
        raise UsageProblem(
            "nothing says what to rotate",
            fix="Give a tenant, or --new-master-file; not both.",
        )
    known = list_keys(file)
    master = read_master_key(master_file, master_env)
    if new_master_file:
        wrap_again(file, master, read_master_key(new_master_file, ""))
        return _done(f"{len(known)} keys have the new master key", json)
    if tenant not in [name for name, _, _ in known]:
        raise UsageProblem(
            f"{file} has no key of tenant {tenant!r}", fix="`kvdock keys make`."
        )
    number = add_key(file, master, tenant)
    return _done(f"key {number} of {tenant} seals from now on", json, key=number)


def destroy(
    file: Path,
    tenant: str,
    /,
    *,
    number: int = 0,
    yes: bool = False,
    json: bool = False,
) -> int:
    """Destroy keys of a tenant: what they have sealed can never be read again.

    That holds wherever there are copies of the pages. A backup of the key file with
    its master key undoes it.

    Args:
        file: The key file.
        tenant: The tenant's name.
        number: Only this key; without one all of them.
        yes: Do not ask.
        json: Print one line of JSON.
    """
    list_keys(file)
    if not yes:
        confirm(f"Destroy keys of {tenant} for good?", "destroy", "destroyed")
    gone = destroy_keys(file, tenant, number)
    return _done(f"{gone} keys of {tenant} are destroyed", json, ok=gone > 0, gone=gone)


def list_all(file: Path, /, *, json: bool = False) -> int:
    """List the keys of a file, and which of them were destroyed.

    Args:
        file: The key file.
        json: Print one line of JSON.
    """
    found = list_keys(file)
    newest = {tenant: number for tenant, number, _ in found}
    rows = [
        {
            "tenant": tenant,
            "key": str(number),
            "state": "destroyed"
            if gone
            else "seals"
            if newest[tenant] == number
            else "opens",
        }
        for tenant, number, gone in found
    ]
    columns = [Column(name.upper(), name) for name in ("tenant", "key", "state")]
    return emit(Report(SCHEMA, {"keys": rows}, [Table(columns, rows)]), as_json=json)


def _done(text: str, as_json: bool, *, ok: bool = True, **more: int) -> int:  # noqa: FBT001 - a command's own
    return emit(Report(SCHEMA, more, [text], ok), as_json=as_json)


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"make": make, "list": list_all, "rotate": rotate, "destroy": destroy}
)
"""The commands below `kvdock keys`."""
