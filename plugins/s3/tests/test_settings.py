"""Settings are strict, and reach the client of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvdock import Dock
from kvdock.config import structure
from kvdock.errors import SettingsError
from kvdock_s3.connect import open_store
from kvdock_s3.probe import findings
from kvdock_s3.settings import Place, S3Settings, Service, read_url


def given(**settings: object) -> S3Settings:
    backend = Dock.load(require=["s3"]).backends["s3"]
    found = backend.settings({"url": "s3://bucket/pages"} | settings)
    assert isinstance(found, S3Settings)
    return found


def config_of(**settings: object) -> dict[str, Any]:
    store: Any = open_store(given(**settings), 1.0, 0.5)
    return dict(store.config)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://b", Place(Service.S3, "b", "")),
        ("s3://b/", Place(Service.S3, "b", "")),
        ("s3a://b/one/two/", Place(Service.S3, "b", "one/two")),
        ("gs://b/p", Place(Service.GCS, "b", "p")),
        ("az://c/p", Place(Service.AZURE, "c", "p")),
    ],
)
def test_a_url_says_where_objects_are(url: str, place: Place) -> None:
    assert read_url(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "bucket/prefix",
        "http://host/bucket",
        "file:///tmp",
        "s3:///prefix",
        "s3://user:pass@bucket/prefix",
        "s3://bucket/a//b",
        "s3://bucket/a/../b",
        "s3://bucket/a b",
        "s3://bucket/\N{LATIN SMALL LETTER U WITH DIAERESIS}",
        "s3://bucket/p?x=1",
        "s3://bucket/" + "p" * 500,
    ],
)
def test_a_url_that_leads_nowhere_is_rejected(url: str) -> None:
    with pytest.raises(SettingsError):
        given(url=url)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoint": "minio:9000"}, "is not an http or https URL"),
        ({"access_key_id": "AKIA"}, "belong together"),
        ({"secret_access_key": "hush-hush"}, "belong together"),
        ({"session_token": "hush-hush"}, "needs access_key_id"),
        (
            {
                "access_key_id": "AKIA",
                "secret_access_key": "hush-hush",
                "anonymous": True,
            },
            "not signed",
        ),
        ({"url": "gs://b/p", "region": "eu-west-1"}, "region is for S3"),
        ({"url": "az://b/p", "checksum": "SHA256"}, "checksum is for S3"),
        ({"ca_bundle": "/nowhere.pem"}, "is not a file"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"checksum": "md5"}, "checksum"),
        ({"endpoint_override": "http://x"}, "'endpoint'"),
    ],
)
def test_settings_that_cannot_be_meant_are_rejected(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as raised:
        given(**settings)
    assert "hush-hush" not in str(raised.value)


def test_without_a_url_attaching_and_doctor_say_what_to_give() -> None:
    with pytest.raises(SettingsError, match="no url is configured"):
        open_store(given(url=""), 1.0, 0.5)
    for settings in (given(url=""), None):
        (found,) = findings(settings)
        assert not found.ok
        assert "url=s3://bucket/prefix" in found.hint


def test_secrets_are_not_in_the_text_of_settings() -> None:
    found = given(
        access_key_id="AKIA", secret_access_key="hush-hush", session_token="h2"
    )
    assert "hush-hush" not in repr(found)
    assert "AKIA" not in repr(found)


def test_options_reach_the_client() -> None:
    found = config_of(
        endpoint="http://127.0.0.1:1",
        region="eu-west-1",
        access_key_id="AKIA",
        secret_access_key="s",
        checksum="SHA256",
        sign_payload=False,
        bulk_delete=False,
    )
    assert found["region"] == "eu-west-1"
    assert found["endpoint_url_s3"] == "http://127.0.0.1:1"
    assert found["checksum_algorithm"].lower() == "sha256"
    assert found["unsigned_payload"] in (True, "true")
    assert found["disable_bulk_delete"] in (True, "true")


def test_virtual_addressing_puts_the_bucket_into_the_host() -> None:
    found = config_of(endpoint="https://minio.example:9000", virtual_addressing=True)
    assert found["endpoint_url_s3"] == "https://bucket.minio.example:9000"


def test_the_endpoint_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert given().endpoint == "http://127.0.0.1:9000"


def test_a_setting_wins_over_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    found = config_of(endpoint="http://127.0.0.1:2")
    assert found["endpoint_url_s3"] == "http://127.0.0.1:2"


def test_a_ca_bundle_is_read(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("not a certificate")
    with pytest.raises(Exception, match=r"(?i)certificate|pem"):
        open_store(given(ca_bundle=str(bundle)), 1.0, 0.5)


@pytest.mark.parametrize("url", ["gs://b/p", "az://c/p"])
def test_other_services_are_chosen_by_the_scheme(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    store: Any = open_store(given(url=url, anonymous=True), 1.0, 0.5)
    assert type(store).__name__ in ("GCSStore", "AzureStore")
    assert store.prefix == "p"


@pytest.mark.parametrize(
    "given",
    [
        {"url": "s3://[::1"},
        {"url": "s3://bucket", "endpoint": "http://[::1"},
    ],
)
def test_a_url_that_cannot_be_taken_apart_is_named(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"\[::1"):
        structure(S3Settings, given, where="backend 's3'").place  # noqa: B018
