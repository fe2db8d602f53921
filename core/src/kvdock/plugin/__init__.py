"""Backends and observers as plugins: hooks, manifests, discovery, validation.

The names here are for tools that list and examine plugins, such as the command
line. The author of a plugin needs those of `kvdock` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.plugin.backend import Backend as Backend
    from kvdock.plugin.backend import run_probe as run_probe
    from kvdock.plugin.discovery import BACKENDS_GROUP as BACKENDS_GROUP
    from kvdock.plugin.discovery import COMMANDS_GROUP as COMMANDS_GROUP
    from kvdock.plugin.discovery import OBSERVERS_GROUP as OBSERVERS_GROUP
    from kvdock.plugin.discovery import OWN_DISTRIBUTIONS as OWN_DISTRIBUTIONS
    from kvdock.plugin.discovery import BrokenPlugin as BrokenPlugin
    from kvdock.plugin.discovery import Candidate as Candidate
    from kvdock.plugin.discovery import LoadStage as LoadStage
    from kvdock.plugin.discovery import PluginProblem as PluginProblem
    from kvdock.plugin.discovery import Selection as Selection
    from kvdock.plugin.discovery import import_entry_point as import_entry_point
    from kvdock.plugin.discovery import list_entry_points as list_entry_points
    from kvdock.plugin.discovery import missing_allowed as missing_allowed
    from kvdock.plugin.discovery import require as require
    from kvdock.plugin.discovery import selection as selection
    from kvdock.plugin.discovery import split_duplicates as split_duplicates
    from kvdock.plugin.discovery import usable_entry_points as usable_entry_points
    from kvdock.plugin.extension import Extension as Extension
    from kvdock.plugin.instances import add_instances as add_instances
    from kvdock.plugin.instances import named_instances as named_instances
    from kvdock.plugin.loading import LoadedPlugin as LoadedPlugin
    from kvdock.plugin.loading import accept as accept
    from kvdock.plugin.loading import load_all as load_all
    from kvdock.plugin.loading import path_of as path_of
    from kvdock.plugin.observer import Observer as Observer
    from kvdock.plugin.observer import build_observers as build_observers
    from kvdock.plugin.observer import find_observer as find_observer
    from kvdock.plugin.store import PeerMemory as PeerMemory
    from kvdock.plugin.store import PoolStore as PoolStore
    from kvdock.plugin.store import StorelessPool as StorelessPool
    from kvdock.plugin.store import StoreWrapper as StoreWrapper
    from kvdock.plugin.trial import TRIAL_S as TRIAL_S
    from kvdock.plugin.trial import try_each as try_each
    from kvdock.plugin.wrapper import InnerStore as InnerStore
    from kvdock.plugin.wrapper import Wrapper as Wrapper
    from kvdock.plugin.wrapper import Wrapping as Wrapping
    from kvdock.plugin.wrapper import build_wrappers as build_wrappers
    from kvdock.plugin.wrapper import wrapped_plugin as wrapped_plugin

__getattr__, __dir__, __all__ = lazy_names(__name__)
