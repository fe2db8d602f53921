"""Tenants: the names that an operator gives to salts.

    [tenants.acme]
    salt_file = "/run/secrets/acme.salt"

A namespace's record has the digest of its salt, and that is what a tenant is found
by. Every salt that is not listed belongs to the tenant `default`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvdock.config.fields import option, secret
from kvdock.config.schema import structure
from kvdock.errors import SettingsError

DEFAULT_TENANT = "default"
"""The tenant of every salt that is not listed."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ONE_OF = "Give salt, salt_file, salt_env or salt_sha256, and only one of them."


@attrs.frozen(kw_only=True)
class TenantSettings:
    """Which salt is a tenant's; one of these is given."""

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

        Args:
            name: The tenant's, for messages.

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


def read_tenants(given: object) -> Mapping[str, str]:
    """Read the listed tenants: name to the digest of the salt.

    Args:
        given: Name to a table of `TenantSettings`, or to a digest.

    Raises:
        SettingsError: On a name that cannot be one, on a salt that is missing, or
            on one that two tenants have.
    """
    if not isinstance(given, Mapping):
        raise SettingsError("tenants is a section", fix="Write [tenants.NAME].")
    found: dict[str, str] = {}
    for name, table in given.items():
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
        others = [one for one, theirs in found.items() if theirs == digest]
        if others:
            raise SettingsError(f"tenants {others[0]!r} and {name!r} have one salt")
        found[name] = digest
    return found


def tenant_of(record: Mapping[str, object], tenants: Mapping[str, str]) -> str:
    """Return the name of the tenant that a namespace belongs to."""
    salt = record.get("salt_sha256")
    names = [name for name, digest in tenants.items() if digest == salt]
    return names[0] if names else DEFAULT_TENANT
