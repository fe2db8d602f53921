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
    from kvdock.plugin.discovery import OBSERVERS_GROUP as OBSERVERS_GROUP
    from kvdock.plugin.discovery import BrokenPlugin as BrokenPlugin
    from kvdock.plugin.discovery import Candidate as Candidate
    from kvdock.plugin.discovery import LoadedPlugin as LoadedPlugin
    from kvdock.plugin.discovery import PluginProblem as PluginProblem
    from kvdock.plugin.discovery import allow_list as allow_list
    from kvdock.plugin.discovery import filter_allowed as filter_allowed
    from kvdock.plugin.discovery import import_entry_point as import_entry_point
    from kvdock.plugin.discovery import list_entry_points as list_entry_points
    from kvdock.plugin.discovery import load_all as load_all
    from kvdock.plugin.discovery import missing_allowed as missing_allowed
    from kvdock.plugin.discovery import path_of as path_of
    from kvdock.plugin.discovery import require as require
    from kvdock.plugin.discovery import split_duplicates as split_duplicates
    from kvdock.plugin.observer import Observer as Observer
    from kvdock.plugin.observer import find_observer as find_observer
    from kvdock.plugin.observer import load_observers as load_observers
    from kvdock.plugin.validation import LoadStage as LoadStage

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "backend": ("Backend", "run_probe"),
        "discovery": (
            "BACKENDS_GROUP",
            "OBSERVERS_GROUP",
            "BrokenPlugin",
            "Candidate",
            "LoadedPlugin",
            "PluginProblem",
            "allow_list",
            "filter_allowed",
            "import_entry_point",
            "list_entry_points",
            "load_all",
            "missing_allowed",
            "path_of",
            "require",
            "split_duplicates",
        ),
        "observer": ("Observer", "find_observer", "load_observers"),
        "validation": ("LoadStage",),
    },
)
