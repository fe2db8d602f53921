"""Settings: declared with attrs, filled from files, environment and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.config.convert import as_path as as_path
    from kvdock.config.core import KEPT_FREE_BYTES as KEPT_FREE_BYTES
    from kvdock.config.core import CoreSettings as CoreSettings
    from kvdock.config.core import Deadlines as Deadlines
    from kvdock.config.core import Integrity as Integrity
    from kvdock.config.core import StagingPolicy as StagingPolicy
    from kvdock.config.engine import Drafts as Drafts
    from kvdock.config.engine import EngineConfiguration as EngineConfiguration
    from kvdock.config.engine import EngineSettings as EngineSettings
    from kvdock.config.engine import check_deadlines as check_deadlines
    from kvdock.config.engine import (
        load_engine_configuration as load_engine_configuration,
    )
    from kvdock.config.engine import nest_settings as nest_settings
    from kvdock.config.engine import split_settings as split_settings
    from kvdock.config.engine import with_configured as with_configured
    from kvdock.config.fields import Alias as Alias
    from kvdock.config.fields import ForeignFile as ForeignFile
    from kvdock.config.fields import choice as choice
    from kvdock.config.fields import count as count
    from kvdock.config.fields import duration as duration
    from kvdock.config.fields import option as option
    from kvdock.config.fields import path as path
    from kvdock.config.fields import secret as secret
    from kvdock.config.fields import size as size
    from kvdock.config.schema import check_known as check_known
    from kvdock.config.schema import check_values as check_values
    from kvdock.config.schema import own_settings as own_settings
    from kvdock.config.schema import secret_values as secret_values
    from kvdock.config.schema import structure as structure
    from kvdock.config.sources import Configuration as Configuration
    from kvdock.config.sources import Setting as Setting
    from kvdock.config.sources import explain as explain
    from kvdock.config.sources import load_configuration as load_configuration
    from kvdock.config.sources import read_file as read_file
    from kvdock.config.tiers import Promote as Promote
    from kvdock.config.tiers import Tier as Tier
    from kvdock.config.tiers import Write as Write
    from kvdock.config.tiers import read_tiers as read_tiers

__getattr__, __dir__, __all__ = lazy_names(__name__)
