"""Settings of the s3 backend."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs

from kvdock.config import Alias, choice, count, duration, option, secret
from kvdock.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PREFIX_BYTES = 480
"""With the longest key of the core an object's name stays below S3's 1024."""

_MAX_CONNECT_S = "5 min"


class Service(StrEnum):
    """The services that keep objects; the scheme of the URL decides."""

    S3 = "s3"
    """S3 and servers that speak its protocol."""
    GCS = "gcs"
    """Google Cloud Storage."""
    AZURE = "azure"
    """Azure Blob Storage."""


_SCHEMES: Mapping[str, Service] = MappingProxyType(
    {
        "s3": Service.S3,
        "s3a": Service.S3,
        "gs": Service.GCS,
        "az": Service.AZURE,
        "azure": Service.AZURE,
    }
)


class Checksum(StrEnum):
    """The checksum that the client computes over an object that it puts."""

    NONE = "none"
    """Nothing; kvdock's own trailers prove the bytes when they are read."""
    SHA256 = "SHA256"
    """SHA-256, verified by the server before it stores the object."""
    CRC64NVME = "CRC64NVME"
    """CRC-64/NVME, verified by the server before it stores the object."""


@attrs.frozen
class Place:
    """The parts of a URL.

    Args:
        service: Who serves the objects.
        prefix: What begins the name of every object, without slashes around.
    """

    service: Service
    bucket: str
    prefix: str


@attrs.frozen(kw_only=True)
class S3Settings:
    """Settings of the s3 backend.

    Raises:
        SettingsError: If they contradict each other or the protocol.
    """

    url: str = option(
        "",
        help="Bucket and prefix: s3://bucket/prefix, gs://bucket/prefix or "
        "az://container/prefix.",
    )
    endpoint: str = option(
        "",
        help="URL of the server; empty for the cloud's own.",
        alias=Alias(
            env="AWS_ENDPOINT_URL", names=("endpoint_url", "endpoint_override")
        ),
    )
    region: str = option(
        "",
        help="Region of the bucket; empty for AWS_REGION, then us-east-1.",
        alias=Alias(names=("region_name",)),
    )
    virtual_addressing: bool = option(
        False,
        help="Put the bucket into the host name (bucket.host) instead of the path.",
        alias=Alias(names=("use_virtual_addressing",)),
    )
    ca_bundle: str = option(
        "",
        help="File with further certificates (PEM) that servers may show.",
        alias=Alias(env="AWS_CA_BUNDLE"),
    )
    access_key_id: str = secret(
        "",
        help="Access key; empty for the environment and the usual chain.",
        alias=Alias(names=("access_key", "aws_access_key_id")),
    )
    secret_access_key: str = secret(
        "",
        help="Secret of the access key.",
        alias=Alias(names=("secret_key", "aws_secret_access_key")),
    )
    session_token: str = secret(
        "",
        help="Session token of temporary credentials.",
        alias=Alias(names=("aws_session_token",)),
    )
    anonymous: bool = option(False, help="Sign nothing: for servers without accounts.")
    sign_payload: bool = option(
        True,
        help="Include the bytes in the signature; over TLS false is as safe and "
        "faster.",
    )
    checksum: Checksum = choice(
        Checksum.NONE,
        help="Checksum that the server verifies: none, SHA256 or CRC64NVME.",
        alias=Alias(names=("req_checksum",)),
    )
    conditional_put: bool = option(
        True,
        help="Let the server reject a put of a key that is there; false asks first, "
        "for servers without If-None-Match.",
    )
    bulk_delete: bool = option(
        True, help="Delete up to 1000 objects with one request (DeleteObjects)."
    )
    threads: int = count(
        8, least=1, most=256, help="Requests under way at once in an attachment."
    )
    connect_timeout: float = duration(
        "1 s",
        least="1 ms",
        most=_MAX_CONNECT_S,
        help="Most time to connect; never more than half of a call's time.",
    )
    retries: int = count(
        2, most=16, help="How often a request that failed quickly is repeated."
    )

    def __attrs_post_init__(self) -> None:
        """Reject settings that contradict each other or the protocol."""
        service = self.place.service if self.url else Service.S3
        if self.endpoint and not _is_web_address(self.endpoint):
            raise SettingsError(
                f"endpoint {self.endpoint!r} is not an http or https URL",
                fix='Write it like "https://minio.example:9000".',
            )
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise SettingsError(
                "access_key_id and secret_access_key belong together",
                fix="Give both, or neither for the environment and the usual chain.",
            )
        if self.session_token and not self.access_key_id:
            raise SettingsError("session_token needs access_key_id")
        if self.anonymous and self.access_key_id:
            raise SettingsError(
                "anonymous requests are not signed, but an access key is given",
                fix="Give one of the two.",
            )
        if service is not Service.S3:
            self._check_other(service)
        if self.ca_bundle and not Path(self.ca_bundle).expanduser().is_file():
            raise SettingsError(f"ca_bundle {self.ca_bundle!r} is not a file")

    def _check_other(self, service: Service) -> None:
        """Reject what only S3 has."""
        given = {
            "access_key_id": self.access_key_id,
            "region": self.region,
            "virtual_addressing": self.virtual_addressing,
            "checksum": self.checksum is not Checksum.NONE,
        }
        for name, value in given.items():
            if value:
                raise SettingsError(
                    f"{name} is for S3, and {self.url!r} is a URL of {service}",
                    fix="Leave it out; credentials of this service come from its own "
                    "environment variables.",
                )

    @property
    def place(self) -> Place:
        """Return where the URL leads to.

        Raises:
            SettingsError: If there is none, or it leads nowhere.
        """
        if not self.url:
            raise SettingsError(
                "no url is configured for the s3 backend",
                fix="Give --set url=s3://bucket/prefix, or backends.s3.url in "
                "kvdock's file.",
            )
        return read_url(self.url)


def names_a_service(url: str) -> bool:
    """Return whether a URL has a scheme of this backend's."""
    return url.partition("://")[0].lower() in _SCHEMES and "://" in url


def _is_web_address(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https")
    except ValueError:
        return False


def read_url(url: str) -> Place:
    """Take a URL apart."""
    fix = 'Write it like "s3://bucket/prefix".'
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingsError(f"url {url!r} is not a URL", fix=fix) from error
    service = _SCHEMES.get(parts.scheme)
    if service is None:
        raise SettingsError(
            f"url {url!r} has none of the schemes {', '.join(_SCHEMES)}", fix=fix
        )
    bucket = parts.netloc
    if not bucket or set(bucket) & set("@:?#"):
        raise SettingsError(f"url {url!r} does not name a bucket", fix=fix)
    if parts.query or parts.fragment:
        raise SettingsError(f"url {url!r} has a query or a fragment", fix=fix)
    prefix = parts.path.strip("/")
    # Services strip or encode anything else without a word.
    words = prefix.split("/") if prefix else []
    plain = all(
        word not in ("", ".", "..") and word.isascii() and _is_plain(word)
        for word in words
    )
    if not plain or len(prefix) > MAX_PREFIX_BYTES:
        raise SettingsError(
            f"prefix {prefix!r} of url {url!r} is not a path of letters, digits and "
            f"._- with at most {MAX_PREFIX_BYTES} characters",
            fix=fix,
        )
    return Place(service, bucket, prefix)


def _is_plain(word: str) -> bool:
    return all(letter.isalnum() or letter in "._-=+@" for letter in word)
