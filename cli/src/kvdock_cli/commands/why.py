"""Say why a prompt did not hit: from an engine's journal, or from what is stored."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvdock.errors import KvdockError
from kvdock.journal import explain, explain_stored, read_journal, requests
from kvdock_cli.commands.store import chosen, open_store
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import why as report
from kvdock_cli.terminal import style_of


def why(  # noqa: PLR0913 - one option each
    *,
    journal: Path | None = None,
    root: str = "",
    request: str = "",
    hashes: Path | None = None,
    namespace: str = "",
    tp: int = 0,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Say why a prompt did not hit; exit 1 if it did not.

    A journal has the reason for every page; without a request and without hashes its
    requests are listed. A store shows what is there now, in this namespace and in
    others of the same model.

    Args:
        journal: The journal's directory: observers.journal.dir of the engine.
        root: Instead, a store's root directory, or the URL of a bucket.
        request: The engine's id of the request.
        hashes: A file of page hashes instead, one a line, in the order of a prefix.
        namespace: The beginning of a namespace's digest, where hashes are given and
            there are several.
        tp: With --root: the engine's TP size, where pages of several are stored.
        set_: With --root: settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    if (journal is None) == (not root):
        raise UsageProblem("give either --journal or --root")
    if request and hashes:
        raise UsageProblem("--request and --hashes exclude each other")
    if namespace and not hashes:
        raise UsageProblem("--namespace goes with --hashes")
    if root and not hashes:
        raise UsageProblem("--root goes with --hashes")
    if not root and (tp or set_):
        raise UsageProblem("--tp and --set go with --root")
    given = _lines(hashes) if hashes else ()
    if journal is None:
        store = open_store(root, set_)
        mine = chosen(store, namespace)
        answer = explain_stored(store, given, mine, tp_size=tp)
    else:
        read = partial(read_journal, journal)
        try:
            if not request and not given:
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
