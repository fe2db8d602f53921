"""Ask an engine's HTTP server once."""

from __future__ import annotations

import http.client
from contextlib import closing
from urllib.parse import urlsplit

from kvdock.errors import KvdockError, SettingsError

_MOST_BYTES = 64 << 20


def request(
    url: str,
    path: str = "",
    *,
    default_path: str = "",
    body: str = "",
    within_s: float = 5.0,
    wanted: str,
) -> tuple[int, str]:
    """Send one request; POST JSON where there is a body.

    Args:
        url: "http://host:port", with a path or without; the scheme may be left out.
        path: The path to ask for, whatever the URL says.
        default_path: The path where there is no other.
        body: JSON to send.
        within_s: How long to wait for each piece of the answer.
        wanted: What is asked for, in errors.

    Returns:
        The status of the answer, and its text.

    Raises:
        SettingsError: If it is not such a URL.
        KvdockError: If nothing answers there.
    """
    wrong = SettingsError(
        f"{url!r} is not an address to ask for {wanted}",
        fix="Write it like http://127.0.0.1:30000.",
    )
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in kinds or not parts.hostname:
            raise wrong
        connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=within_s)
        with closing(connection):
            connection.request(
                "POST" if body else "GET",
                path or parts.path.rstrip("/") or default_path,
                body or None,
                headers,
            )
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES).decode(errors="replace")
    except (ValueError, http.client.InvalidURL) as error:
        # A blank, a letter that is not ASCII, or a label that no host can have.
        raise wrong from error
    except (OSError, http.client.HTTPException) as error:
        raise KvdockError(
            f"no {wanted} come from {url}: {_words(error)}",
            fix="Look whether the engine runs and listens there.",
        ) from error
    return answer.status, text


def _words(error: Exception) -> str:
    """Say what went wrong, without the number that the system gives it."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
