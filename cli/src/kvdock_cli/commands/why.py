"""Say why a prompt did not hit: pool by pool, from an engine's journal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvdock.errors import KvdockError
from kvdock.journal import explain, read_journal, requests
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import why as report
from kvdock_cli.terminal import style_of


def why(
    *,
    journal: Path,
    request: str = "",
    hashes: Path | None = None,
    namespace: str = "",
    json: bool = False,
) -> int:
    """Say why a prompt did not hit, from a journal; exit 1 if it did not.

    Without a request and without hashes it lists the requests of the journal.

    Args:
        journal: The journal's directory: observers.journal.dir of the engine.
        request: The engine's id of the request.
        hashes: A file of page hashes instead, one a line, in the order of a prefix.
        namespace: The beginning of a namespace's digest, where hashes are given and
            the journal has several.
        json: Print one line of JSON.
    """
    read = partial(read_journal, journal)
    if request and hashes:
        raise UsageProblem("--request and --hashes exclude each other")
    if namespace and not hashes:
        raise UsageProblem("--namespace goes with --hashes")
    given = _lines(hashes) if hashes else ()
    try:
        if not request and hashes is None:
            found = requests(read())
            text = report.requests_text(found, style_of())
            return emit(text, report.requests_data(found), as_json=json)
        answer = explain(read, request=request, hashes=given, namespace=namespace)
    except KvdockError as error:
        # A journal, a namespace or a request that was named and is not there.
        raise UsageProblem(error.what, fix=error.fix) from error
    text = report.answer_text(answer, style_of())
    return emit(text, report.answer_data(answer), as_json=json)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageProblem(f"{path} cannot be read: {why}") from error
    if not lines:
        raise UsageProblem(f"{path} has no page hashes", fix="Write one a line.")
    return tuple(lines)
