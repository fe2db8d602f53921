"""Whose pages an engine would find, from its command alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvdock.launch import NamespacePlan, parsing_by, split_command
from kvdock.namespace import namespace_record
from kvdock_vllm.exemptions import REPORTED
from kvdock_vllm.identity import describe
from kvdock_vllm.launch import CONFIGURATION, launch
from kvdock_vllm.settings import collect

DECIDED = (
    "cache_config.kv_cache_layout",
    "cache_config.block_size",
    "cache_config.mamba_block_size",
    "cache_config.mamba_page_size_padded",
)
"""What vLLM decides with the loaded model where a command says nothing.

Source: vLLM 0.32, `v1/engine/core.py` and `v1/worker/utils.py`.
"""

LOADED = (
    "pools",
    *(f"page_format.{name}" for name in ("layers", *REPORTED, *DECIDED)),
)
"""What is known, or is another value, once the workers have loaded the model."""


def plan_namespace(
    command: Sequence[str], settings: Mapping[str, object]
) -> NamespacePlan:
    """Read whose pages an engine with this command would find.

    Called by `kvdock route --namespace`; it imports vLLM. A command without kvdock's
    flags gets those that `kvdock run` would add.

    Args:
        command: Its words, from the program on.
        settings: What its connector is to get, in words.

    Raises:
        KvdockError: If vLLM or kvdock rejects the command.
    """
    words = list(command)
    if not any(word.startswith(CONFIGURATION) for word in words):
        added = launch(command, settings)
        os.environ.update(added.variables)
        words += added.flags
    config = _configuration(words)
    extra = config.kv_transfer_config.kv_connector_extra_config
    own = collect(extra, lenient=True).own
    identity = describe(config, own)
    decided = {
        name
        for name in DECIDED
        # Pages of a state as large as one of attention make blocks larger.
        if identity.page_format.get(name) is None or config.model_config.is_hybrid
    }
    said = {
        name: value
        for name, value in identity.page_format.items()
        if name not in decided
    }
    planned = attrs.evolve(identity, page_format=said).namespace(own)
    return NamespacePlan(
        records={"target": namespace_record(planned, ())}, loaded=LOADED
    )


def _configuration(words: Sequence[str]) -> Any:  # noqa: ANN401 - vLLM's VllmConfig
    """Read a command as vLLM does.

    Source: vLLM 0.32, `entrypoints/cli/serve.py`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - the engine
    from vllm.entrypoints.cli.serve import cmd_init  # noqa: PLC0415 - same
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415 - same
    from vllm.utils.argparse_utils import (  # noqa: PLC0415 - same
        FlexibleArgumentParser,
    )

    parser = FlexibleArgumentParser()
    for command in cmd_init():
        command.subparser_init(parser.add_subparsers(dest="subparser"))
    _, rest = split_command(words)
    with parsing_by("vLLM"):
        # A module of the server has no such word.
        given = parser.parse_args(["serve", *rest[rest[:1] == ["serve"] :]])
        given.model = given.model_tag or given.model
        made = AsyncEngineArgs.from_cli_args(given)
        return made.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
