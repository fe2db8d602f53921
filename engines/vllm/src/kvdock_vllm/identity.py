"""What must be equal for the pages of two vLLM engines to be interchangeable.

vLLM tells a tier the model's name and dtype, and nothing else. The connector
sees the whole configuration, and everything in it that decides what a page's
bytes mean is read here. What cannot be read is an error, never a default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Namespace
from kvdock.errors import KvdockError, SettingsError
from kvdock_vllm.engine_api import SUPPORTED, installed_version
from kvdock_vllm.weights import weights_identity

if TYPE_CHECKING:
    from kvdock_vllm.settings import AdapterSettings

FORMAT = {
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "hf_overrides": "model_config.hf_overrides",
    "max_model_len": "model_config.max_model_len",
    "load_format": "load_config.load_format",
    "cache_dtype": "cache_config.cache_dtype",
    "block_size": "cache_config.block_size",
    "hash": "cache_config.prefix_caching_hash_algo",
    "mamba_cache_dtype": "cache_config.mamba_cache_dtype",
    "mamba_ssm_cache_dtype": "cache_config.mamba_ssm_cache_dtype",
    "mamba_cache_mode": "cache_config.mamba_cache_mode",
    "mamba_block_size": "cache_config.mamba_block_size",
}
"""Name in the namespace record to the field of vLLM's configuration."""
