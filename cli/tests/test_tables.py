"""Tables fit the medium: cells fold, columns drop, and no word is broken."""

from __future__ import annotations

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, Row, columns, paragraph, table

HEADINGS = ("NAME", "SIZE", "WHAT")
ROWS = [
    ("first", "1 B", "a sentence of quite a few words that has to be folded somewhere"),
    ("second", "22 B", "short"),
]


def widest(lines: list[str]) -> int:
    return max(map(len, lines))


def test_a_cell_that_does_not_fit_is_folded() -> None:
    assert table(HEADINGS, ROWS, Style(46), fold=["WHAT"]) == [
        "NAME    SIZE  WHAT",
        "first    1 B  a sentence of quite a few words",
        "              that has to be folded somewhere",
        "second  22 B  short",
    ]


def test_columns_are_left_out_before_cells_become_narrow() -> None:
    lines = table(HEADINGS, ROWS, Style(30), fold=["WHAT"], drop=["SIZE"])
    assert lines[0] == "NAME    WHAT"
    assert " ".join(lines).endswith("has all.")
    assert "SIZE" in " ".join(lines[2:])
    assert widest(lines) <= 30


def test_a_row_becomes_a_block_where_columns_do_not_fit() -> None:
    lines = table(HEADINGS, ROWS[1:], Style(15), fold=["WHAT"])
    assert lines == ["second", "  size  22 B", "  what  short"]


def test_a_pipe_gets_whole_rows() -> None:
    assert len(table(HEADINGS, ROWS, PLAIN, fold=["WHAT"])) == 3


def test_a_word_that_is_too_long_stands_out_and_stays_whole() -> None:
    path = "/" + "x" * 70
    assert columns([("path", path)], Style(40)) == [f"path  {path}"]
    assert table(("A", "B"), [("a", path)], Style(40))[-1].endswith(path)


def test_colours_take_no_columns() -> None:
    rows: list[Row] = [(Cell("no", Tone.BAD), "x"), ("native", "y")]
    shown = columns(rows, Style(colour=True))
    assert shown == ["\x1b[31mno\x1b[0m      x", "native  y"]
    assert columns(rows, PLAIN)[0] == "no      x"


def test_a_paragraph_keeps_its_own_lines() -> None:
    assert paragraph("one two\nthree", Style(8), indent=2, hanging=1) == [
        "  one",
        "   two",
        "  three",
    ]


def test_numbers_and_sizes_end_at_the_right_and_versions_do_not() -> None:
    rows = [
        ("a", "1000", "9 B", "8/48", "1.2.3"),
        ("b", "7", "1.5 GiB", "48/48", "10.0.1"),
    ]
    assert table(("N", "PAGES", "SIZE", "PREFIX", "VERSION"), rows, PLAIN) == [
        "N  PAGES     SIZE  PREFIX  VERSION",
        "a   1000      9 B    8/48  1.2.3",
        "b      7  1.5 GiB   48/48  10.0.1",
    ]
