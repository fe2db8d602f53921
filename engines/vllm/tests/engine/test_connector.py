"""What the connector says before weights load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from kvdock.errors import KvdockError


@pytest.fixture
def connector() -> Any:
    # Importing vLLM makes torch warn of itself.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kvdock_vllm.connector import KvdockConnector

    return KvdockConnector


GIVEN = {"plugin": "file", "host_memory": "10 GiB"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**GIVEN, "plugin": "fiel"}, "Did you mean 'file'"),
        ({**GIVEN, "rot": "/kv"}, "Did you mean 'root'"),
        ({**GIVEN, "root": "/kv", "eviction_policy": "lur"}, "Did you mean 'lru'"),
        ({**GIVEN, "root": "/kv", "host_memory": "10"}, "'10 GiB'"),
    ],
)
def test_wrong_settings_are_rejected_where_the_command_was_typed(
    connector: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(KvdockError, match=said):
        connector.requires_piecewise_for_cudagraph(given)


def test_right_settings_leave_vllms_own_answer(connector: Any, tmp_path: Path) -> None:
    given = {**GIVEN, "root": str(tmp_path)}
    assert not connector.requires_piecewise_for_cudagraph(given)
