"""kvdock's lines go where vLLM's go, once, unless the program says otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

from kvdock_vllm.logs import LOGGERS, show_in_vllms_log


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@attrs.frozen
class Loggers:
    """Loggers as they are in a process of vLLM: only its own has a handler."""

    root: logging.Logger
    vllm: logging.Logger
    core: logging.Logger
    shown: Kept


@contextmanager
def as_in_vllm() -> Iterator[Loggers]:
    """Have no handlers but vLLM's: pytest has some of its own in each test."""
    found = [logging.getLogger(name) for name in ("", "vllm", *LOGGERS)]
    before = [(one.level, one.handlers, one.propagate) for one in found]
    for one in found:
        one.setLevel(logging.NOTSET)
        one.handlers = []
    root, vllm, core, _ = found
    root.setLevel(logging.WARNING)
    vllm.setLevel(logging.INFO)
    vllm.propagate = False
    shown = Kept()
    vllm.addHandler(shown)
    try:
        yield Loggers(root, vllm, core, shown)
    finally:
        for one, kept in zip(found, before, strict=True):
            one.setLevel(kept[0])
            one.handlers, one.propagate = kept[1:]


def test_each_line_is_shown_once() -> None:
    with as_in_vllm() as loggers:
        loggers.core.info("lost")
        show_in_vllms_log()
        show_in_vllms_log()
        loggers.core.info("core")
        logging.getLogger("kvdock.vllm").info("engine")
        logging.getLogger("kvdock_segments").warning("segments")
        loggers.core.debug("below vLLM's level")
    assert loggers.shown.lines == ["core", "engine", "segments"]


def test_handlers_that_vllm_sets_later_get_them() -> None:
    later = Kept()
    with as_in_vllm() as loggers:
        show_in_vllms_log()
        loggers.vllm.handlers[:] = [later]
        loggers.core.info("line")
    assert (loggers.shown.lines, later.lines) == ([], ["line"])


def test_a_handler_of_the_program_shows_them_instead() -> None:
    theirs = Kept()
    with as_in_vllm() as loggers:
        show_in_vllms_log()
        loggers.root.addHandler(theirs)
        loggers.core.info("line")
    assert (loggers.shown.lines, theirs.lines) == ([], ["line"])


@pytest.mark.parametrize("where", ["root", "core"])
def test_a_logger_that_was_configured_stays_as_it_is(where: str) -> None:
    theirs = Kept()
    with as_in_vllm() as loggers:
        getattr(loggers, where).addHandler(theirs)
        show_in_vllms_log()
        loggers.core.info("below the program's level")
        loggers.core.warning("line")
        assert loggers.core.level == logging.NOTSET
    assert (loggers.shown.lines, theirs.lines) == ([], ["line"])


def test_a_level_of_the_program_stays() -> None:
    with as_in_vllm() as loggers:
        loggers.core.setLevel(logging.ERROR)
        show_in_vllms_log()
        assert loggers.core.level == logging.ERROR
        assert not loggers.core.handlers
