"""The JSON files in which others have their settings of a Mooncake client.

The library and the engines that use it read one that `MOONCAKE_CONFIG_PATH` names,
SGLang one of its own. The names in them are the same. The size of the segment is
not: the library's is what each process lends, SGLang's what all ranks lend together.

Source: Mooncake 0.3.13, `mooncake_config.py`: `MooncakeConfig.from_file`; SGLang
0.5.23, `mem_cache/storage/mooncake_store/mooncake_store.py`: `from_file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from kvdock.units import parse_bytes

LIBRARY_FILE = "MOONCAKE_CONFIG_PATH"
SGLANG_FILE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"

_SIZE = "global_segment_size"
_CLIENT = "client_server_address"
_ALONE = "standalone_storage"
_MASTER = "master_server_address"
_NO_TENANT = "default"

_NAMES = MappingProxyType(
    {
        _MASTER: "master",
        "local_hostname": "host",
        "metadata_server": "metadata_server",
        "protocol": "protocol",
        "device_name": "devices",
        _SIZE: "segment_bytes",
        "enable_ssd_offload": "ssd_offload",
        "ssd_offload_path": "ssd_path",
        "tenant_id": "tenant",
    }
)
"""Their name of a setting to the name here."""


class EngineBytes(int):
    """Bytes that all ranks of an engine lend together, not each of them."""


def of_each_process(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings in a file of the library."""
    found = {
        ours: content[theirs]
        for theirs, ours in _NAMES.items()
        # As they read it: what is null or empty is not given.
        if content.get(theirs) not in (None, "")
    }
    if found.get("tenant") == _NO_TENANT:
        found["tenant"] = ""
    if "segment_bytes" in found:
        found["segment_bytes"] = parse_bytes(cast("str", found["segment_bytes"]))
    # An address alone is a wish as well, where there is no other one.
    if content.get(_CLIENT) and content.get(_ALONE, _MASTER not in content):
        found["standalone"] = content[_CLIENT]
    return found


def of_all_ranks(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings in a file of SGLang."""
    found = dict(of_each_process(content))
    if "segment_bytes" in found:
        found["segment_bytes"] = EngineBytes(cast("int", found["segment_bytes"]))
    return found


def unused(content: Mapping[str, object]) -> list[str]:
    """Return the keys of such a file that are no settings here, sorted."""
    return sorted(set(content) - {*_NAMES, _CLIENT, _ALONE})
