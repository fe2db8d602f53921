"""Progress: one line, with the time that is left, and nothing of it afterwards."""

from __future__ import annotations

import io
import threading
import time

import pytest

from kvdock.units import format_bytes
from kvdock_cli import progress
from kvdock_cli.progress import Progress
from kvdock_cli.terminal import ERASE


def test_the_time_left_follows_the_pace() -> None:
    bar = Progress("verifying", total=4 << 20, unit=format_bytes, began_s=0)
    bar.advance(1 << 20)
    said = bar.line(80, now_s=10)
    assert said == "verifying  [=====               ]  1.0 MiB/4.0 MiB  0:00:30 left"


def test_without_a_total_the_time_that_passed_is_shown() -> None:
    assert Progress("examining", note="file", began_s=0).line(80, 75) == (
        "examining  0:01:15  file"
    )


def test_it_never_takes_more_than_the_line() -> None:
    bar = Progress("check", total=258, note="x" * 90, began_s=0)
    assert len(bar.line(40, 1)) == 40


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printed_meanwhile_has_the_line_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    bar = Progress("working")
    bar.draw()
    with bar.hidden():
        drawing = threading.Thread(target=bar.draw)
        drawing.start()
        stream.write("a line\n")
        assert drawing.is_alive()
    drawing.join(60)
    before, line, after = stream.getvalue().partition("a line\n")
    assert line
    assert before.endswith(ERASE)
    assert after.startswith(f"{ERASE}working")


def test_a_terminal_is_clean_afterwards_also_when_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)

    def work() -> None:
        with progress.shown("working"):
            deadline_s = time.monotonic() + 60
            while "working" not in stream.getvalue():
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert stream.getvalue().endswith(ERASE)


def test_work_that_takes_no_time_and_pipes_show_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        with progress.shown("working") as bar:
            bar.advance()
        assert stream.getvalue() in ("", ERASE)
