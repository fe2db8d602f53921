"""Say why a prompt did not hit: from an engine's journal, or from what is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvdock.errors import KvdockError
from kvdock.journal import (
    JournalRecord,
    RequestAnswer,
    explain,
    explain_prompt,
    explain_stored,
    read_journal,
    requests,
)
from kvdock_cli.arguments import hashes_of, text_of
from kvdock_cli.commands.audit import parse
from kvdock_cli.commands.store import chosen, open_store
from kvdock_cli.engine_client import EngineClient
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import why as report

Read = Callable[[], Iterable[JournalRecord]]

_WRITTEN_S = 5.0
"""How long a journal may take to write what it was told."""
_LOOK_S = 0.2


def why(  # noqa: PLR0913 - one option each, and what goes with what
    *,
    journal: Path | None = None,
    root: str = "",
    url: str = "",
    prompt: Path | None = None,
    request: str = "",
    hashes: Path | None = None,
    namespace: str = "",
    tp: int = 0,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Say why a prompt did not hit; exit 1 if it did not.

    A journal has the reason for every page; without a request and without hashes its
    requests are listed. With --url and --prompt the engine is asked for one token
    after the prompt, and the journal for that request. A store shows what is there
    now, in this namespace and in others of the same model.

    Args:
        journal: The journal's directory: observers.journal.dir of the engine.
        root: Instead, a store's root directory, or the URL of a bucket.
        url: With --journal: the engine's HTTP server, which is to be asked.
        prompt: With --url: a file with the prompt: text, or token ids as JSON.
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
    if (url != "") != (prompt is not None) or (url and (root or hashes or request)):
        raise UsageProblem("--url goes with --prompt and --journal, and nothing else")
    if request and hashes:
        raise UsageProblem("--request and --hashes exclude each other")
    if (namespace or root) and not hashes:
        raise UsageProblem(f"--{'root' if root else 'namespace'} goes with --hashes")
    if not root and (tp or set_):
        raise UsageProblem("--tp and --set go with --root")
    given = hashes_of(hashes)
    if journal is None:
        store = open_store(root, set_)
        answer = explain_stored(store, given, chosen(store, namespace), tp_size=tp)
        return emit(report.answer(answer), as_json=json)
    read = partial(read_journal, journal)
    try:
        if prompt is not None:
            return emit(report.answer(_asked(url, prompt, read)), as_json=json)
        if not request and not given:
            found = requests(read())
            return emit(report.requests(found), as_json=json)
        answer = explain(read, request=request, hashes=given, namespace=namespace)
    except KvdockError as error:
        # A journal, a namespace or a request that was named and is not there.
        raise UsageProblem(error.what, fix=error.fix) from error
    return emit(report.answer(answer), as_json=json)


def _asked(url: str, path: Path, read: Read) -> RequestAnswer:
    """Let the engine answer a prompt, and explain what storage had of it."""
    given = parse(text_of(path))
    client = EngineClient.find(url)
    tokens = client.tokenize(given)
    name = f"kvdock-why-{secrets.token_hex(8)}"
    answered = client.complete(tokens, tokens=1, name=name)
    end_s = time.monotonic() + _WRITTEN_S
    answer = None
    while answer is None and time.monotonic() < end_s:
        time.sleep(_LOOK_S)  # journals gather records before they write them
        with suppress(KvdockError):  # nothing is written yet
            # An engine adds to the name that it is given.
            found = [one for one in requests(read()) if name in one]
            answer = explain(read, request=found[0]) if found else None
    return explain_prompt(read(), len(tokens), answered.cached, answer, name)
