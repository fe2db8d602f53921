"""Colours and widths belong to terminals."""

from __future__ import annotations

import io

import pytest

from kvdock.errors import KvdockError
from kvdock_cli import output
from kvdock_cli.reports._style import PLAIN, Style
from kvdock_cli.terminal import style_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "colour"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_a_terminal_has_its_width_and_colours_unless_they_are_unwanted(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, colour: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert style_of(Terminal(), environ) == Style(77, colour)


def test_a_pipe_has_neither_unless_colours_are_forced() -> None:
    assert style_of(io.StringIO(), {"COLUMNS": "77"}) == PLAIN
    assert style_of(io.StringIO(), {"FORCE_COLOR": "1"}) == Style(colour=True)


def test_a_closed_stream_is_a_pipe() -> None:
    stream = Terminal()
    stream.close()
    assert style_of(stream, {}) in (PLAIN, Style(80, colour=True))


def test_an_error_is_folded_on_a_terminal_and_one_line_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = KvdockError("word " * 20, fix="Do something else about it.")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    for stream, most in ((Terminal(), 40), (io.StringIO(), 200)):
        monkeypatch.setattr("sys.stderr", stream)
        assert output.fail(error, as_json=False) == 1
        lines = stream.getvalue().splitlines()
        assert lines[0].startswith("kvdock: word")
        assert 1 < max(map(len, lines)) <= most
        assert (len(lines) > 1) == (most == 40)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    output.fail(error, as_json=False)
    assert terminal.getvalue().startswith("\x1b[31mkvdock:\x1b[0m word")
