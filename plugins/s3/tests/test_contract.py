"""The conformance kit, against a server of our own, and against moto's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import object_server
import pytest
from repeated import OF_RANKS, OF_SETTINGS

from kvdock.config import structure
from kvdock.testing import BackendContract, FaultContract, Oracle
from kvdock_s3.oracle import BucketOracle
from kvdock_s3.server import moto_server
from kvdock_s3.settings import S3Settings


def settings_for(endpoint: str) -> Mapping[str, object]:
    return {
        "url": "s3://kvdock-demo/tests",
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "k",
        "secret_access_key": "s",
    }


def oracle_of(given: Mapping[str, object]) -> Oracle:
    return BucketOracle(structure(S3Settings, given, where="tests"))


@pytest.fixture(scope="module")
def own() -> Iterator[Mapping[str, object]]:
    # In a process of its own: the kit counts the threads of this one.
    with object_server.running("kvdock-demo") as endpoint:
        yield settings_for(endpoint)


@pytest.fixture(scope="module")
def motos() -> Iterator[Mapping[str, object]]:
    with moto_server("kvdock-demo") as endpoint:
        yield settings_for(endpoint)


@pytest.mark.repeats(*OF_RANKS, "test_an_object_of_the_largest_size_is_kept")
class TestS3(BackendContract):
    plugin = "s3"
    tidy = True

    @pytest.fixture
    def config(self, own: Mapping[str, object]) -> Mapping[str, object]:
        return own

    @pytest.fixture
    def oracle(self, own: Mapping[str, object]) -> Oracle:
        return oracle_of(own)


@pytest.mark.slow
class TestS3UnderFaults(FaultContract):
    plugin = "s3"
    tidy = True

    @pytest.fixture
    def config(self, own: Mapping[str, object]) -> Mapping[str, object]:
        return own


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS)
class TestMoto(BackendContract):
    plugin = "s3"
    tidy = True
    # A server that is written in Python.
    scale = 10.0

    @pytest.fixture
    def config(self, motos: Mapping[str, object]) -> Mapping[str, object]:
        return motos

    @pytest.fixture
    def oracle(self, motos: Mapping[str, object]) -> Oracle:
        return oracle_of(motos)
