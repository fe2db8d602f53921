"""Tenants: the names that an operator gives to salts, and the room of each.

    [tenants.acme]
    salt_file = "/run/secrets/acme.salt"
    quota = "200GB"

A namespace's record has the digest of its salt, and that is what a tenant is found
by. Every salt that is not listed belongs to the tenant `default`, which has room but
no salt. What is stored has a number that follows from the digest: it is the same in
every process and after every restart, and 0 for what no listed tenant has stored.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvdock.config.fields import option, secret, size
from kvdock.config.schema import structure
from kvdock.errors import SettingsError

DEFAULT_TENANT = "default"
"""The tenant of every salt that is not listed."""

NO_TENANT = 0
"""The number of what no listed tenant has stored."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ONE_OF = "Give salt, salt_file, salt_env or salt_sha256, and only one of them."


@attrs.frozen(kw_only=True)
class TenantRoom:
    """The room of a tenant in each store."""

    quota: int = size(
        0,
        help="Bytes of pages in all namespaces of a store that no other tenant takes "
        "away while one is above its own; 0 for no quota.",
    )
    retained_share: float = option(
        1.0, help="Share of the quota that may be promised (retention)."
    )

    def __attrs_post_init__(self) -> None:
        """Reject a share that is none."""
        if not 0 <= self.retained_share <= 1:
            raise SettingsError(
                f"retained_share {self.retained_share} is not a share of the quota",
                fix="Choose 0 <= retained_share <= 1.",
            )

    @property
    def promise_bytes(self) -> int:
        """Bytes that may be promised, where there is a quota."""
        return int(self.quota * self.retained_share)


@attrs.frozen(kw_only=True)
class TenantSettings(TenantRoom):
    """Which salt is a tenant's, one of these is given; and its room."""

    salt: str = secret("", help="The salt itself.")
    salt_file: Path | None = option(
        None, help="A file with the salt; white space at its end does not count."
    )
    salt_env: str = option("", help="A variable with the salt.")
    salt_sha256: str = option(
        "", help="Its digest, as `salt_sha256` of a namespace's record has it."
    )

    def digest(self, name: str) -> str:
        """Return the digest of the salt.

        Raises:
            SettingsError: If there is no such salt, or more than one; no message
                shows it.
        """
        given = [self.salt, self.salt_file, self.salt_env, self.salt_sha256]
        if sum(map(bool, given)) != 1:
            raise SettingsError(f"tenants.{name} names not one salt", fix=_ONE_OF)
        if self.salt_sha256:
            if not _DIGEST.fullmatch(self.salt_sha256):
                raise SettingsError(
                    f"tenants.{name}.salt_sha256 is not 64 digits of a SHA-256",
                    fix="Copy it from the record of one of the tenant's namespaces.",
                )
            return self.salt_sha256
        found = self.salt or (
            _from_file(name, self.salt_file)
            if self.salt_file
            else os.environ.get(self.salt_env, "")
        )
        if not found:
            raise SettingsError(
                f"the salt of tenants.{name} is empty or missing",
                fix=f"Set the variable {self.salt_env}." if self.salt_env else _ONE_OF,
            )
        return salt_digest(found)


def _from_file(name: str, path: Path) -> str:
    try:
        return path.read_text().rstrip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        # Without the error itself, whose text may show bytes of the salt.
        raise SettingsError(
            f"tenants.{name}.salt_file: {path} cannot be read: {why}"
        ) from None


def salt_digest(salt: str) -> str:
    """Return the digest of a salt, as records have it; "" for none."""
    # JSON and the environment may bring half a character.
    given = salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"kvdock salt\0" + given).hexdigest() if salt else ""


class Tenants(dict[str, str]):
    """The listed tenants: name to the digest of the salt.

    Attributes:
        rooms: Name to room, of those that have a quota; `default` may be among them.
    """

    def __init__(
        self, digests: Mapping[str, str] = {}, rooms: Mapping[str, TenantRoom] = {}
    ) -> None:
        super().__init__(digests)
        self.rooms = dict(rooms)

    def number(self, name: str) -> int:
        """Return the number that records have of what a tenant stores."""
        return tenant_number(self[name]) if name in self else NO_TENANT

    def number_of_salt(self, salt: str) -> int:
        """Return the number of the tenant that a request's salt belongs to."""
        digest = salt_digest(salt) if self and salt else ""
        return tenant_number(digest) if digest in self.values() else NO_TENANT

    @property
    def names(self) -> dict[int, str]:
        """Number to name of each listed tenant, and of `default`."""
        return {NO_TENANT: DEFAULT_TENANT, **{self.number(one): one for one in self}}


def tenant_number(digest: str) -> int:
    """Return the number, of 32 bits and not 0, that follows from a salt's digest."""
    return int(digest[:8], 16) or 1


def read_tenants(given: object) -> Tenants:
    """Read the listed tenants: name to the digest of the salt, and their room.

    Each has a table of `TenantSettings`, or just a digest.

    Raises:
        SettingsError: On a name that cannot be one, on a salt that is missing, or
            on one that two tenants have.
    """
    if isinstance(given, Tenants):
        return given
    if not isinstance(given, Mapping):
        raise SettingsError("tenants is a section", fix="Write [tenants.NAME].")
    found = Tenants()
    of_digest: dict[str, str] = {}
    numbers = {NO_TENANT}
    for name, table in given.items():
        if name == DEFAULT_TENANT and isinstance(table, Mapping):
            found.rooms[name] = structure(TenantRoom, table, where=f"tenants.{name}")
            continue
        if not _NAME.fullmatch(str(name)) or name == DEFAULT_TENANT:
            raise SettingsError(
                f"{name!r} is not a valid name of a tenant",
                fix="Use a-z, 0-9, dots, dashes and underscores, 64 at most; "
                f"{DEFAULT_TENANT!r} is every salt that is not listed.",
            )
        own = {"salt_sha256": table} if isinstance(table, str) else table
        if not isinstance(own, Mapping):
            raise SettingsError(f"tenants.{name} is not made of settings", fix=_ONE_OF)
        settings = structure(TenantSettings, own, where=f"tenants.{name}")
        digest = settings.digest(name)
        if digest in of_digest:
            raise SettingsError(
                f"tenants {of_digest[digest]!r} and {name!r} have one salt"
            )
        if tenant_number(digest) in numbers:
            raise SettingsError(
                f"the salts of tenant {name!r} and of another one have one number",
                fix="Give it another salt; one pair in 2^32 has that.",
            )
        of_digest[digest] = name
        numbers.add(tenant_number(digest))
        found[name] = digest
        found.rooms[name] = settings
    found.rooms = {name: room for name, room in found.rooms.items() if room.quota}
    return found


def tenant_of(record: Mapping[str, object], tenants: Mapping[str, str]) -> str:
    """Return the name of the tenant that a namespace belongs to."""
    salt = record.get("salt_sha256")
    names = [name for name, digest in tenants.items() if digest == salt]
    return names[0] if names else DEFAULT_TENANT
