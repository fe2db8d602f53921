"""An S3 server in memory, for tests and benchmarks, that misbehaves on request.

It speaks as much of the protocol as object stores have in common: put (also
conditional), get, head, delete, delete many, list. It checks no signature.
Run as a program it serves one bucket and prints its port:

    python object_server.py BUCKET
"""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import attrs

Bytes = bytes | bytearray

_PIECE_BYTES = 1 << 20
_DRIP_S = 0.05
_PAGE_KEYS = 1000


class Fault(StrEnum):
    """What the server does wrong."""

    TRUNCATED = "truncated"
    """Send half of the body and close the connection."""
    RESET = "reset"
    """Send half of the body and reset the connection."""
    DRIPPING = "dripping"
    """Send a byte now and then."""
    STALLED = "stalled"
    """Send half of the body and nothing more."""
    SILENT = "silent"
    """Read the request and never answer."""
    HUNG_UP = "hung up"
    """Close the connection instead of an answer."""
    ANSWER_LOST = "answer lost"
    """Store the object and close the connection instead of an answer."""
    FULL = "507"
    SHORT = "short"
    """Send half of the object as if it were the whole."""
    LONG = "long"
    """Send the object and more."""
    FLIPPED = "flipped"
    """Send the object with one bit changed."""
    OTHER_OBJECT = "other object"
    """Send another key's object."""
    INTERNAL = "500"
    SLOW_DOWN = "503"
    FORBIDDEN = "403"
    SKEWED = "skewed"
    """Reject the request because of the caller's clock."""
    CONFLICT = "409"
    FRAMED = "framed"
    """Store the framing of checksums with the object."""
    UNCONDITIONAL = "unconditional"
    """Ignore the conditions of a put."""
    NOT_IMPLEMENTED = "501"


_ERRORS: Mapping[Fault, tuple[int, str]] = MappingProxyType(
    {
        Fault.FULL: (507, "InsufficientStorage"),
        Fault.INTERNAL: (500, "InternalError"),
        Fault.SLOW_DOWN: (503, "SlowDown"),
        Fault.FORBIDDEN: (403, "AccessDenied"),
        Fault.SKEWED: (403, "RequestTimeTooSkewed"),
        Fault.CONFLICT: (409, "ConditionalRequestConflict"),
        Fault.NOT_IMPLEMENTED: (501, "NotImplemented"),
    }
)


@attrs.define(eq=False)
class Rule:
    """Which requests go wrong, and how.

    Args:
        fault: What goes wrong.
        methods: HTTP methods; "LIST" and "DELETEMANY" have names of their own.
        containing: Text that the key contains.
        times: How often it happens; after that all is well.
    """

    fault: Fault
    methods: tuple[str, ...] = ("GET",)
    containing: str = ""
    times: float = float("inf")


@attrs.frozen
class Stored:
    """One object."""

    data: Bytes
    modified: datetime


@attrs.frozen(eq=False)
class _Request:
    method: str
    bucket: str
    key: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: Bytes


class _HungUp(Exception):  # noqa: N818 - an end, not an error
    """The connection is to be closed."""


class ObjectServer:
    """Serves objects on loopback from threads of this process.

    Args:
        bucket: The only bucket.
        port: Where to listen; 0 for any free port.
        clock_ahead: How far the server's clock is ahead.
    """

    def __init__(
        self,
        bucket: str = "kv",
        *,
        port: int = 0,
        clock_ahead: timedelta = timedelta(),
    ) -> None:
        self.bucket = bucket
        self.port = port
        self.clock_ahead = clock_ahead
        self.objects: dict[str, Stored] = {}
        self.rules: list[Rule] = []
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    def settings(self, **more: object) -> dict[str, object]:
        """Return the settings of a backend on this server."""
        given: dict[str, object] = {
            "url": f"s3://{self.bucket}/tests",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "key",
            "secret_access_key": "hush-hush",
        }
        return given | more

    def now(self) -> datetime:
        """Return the server's time."""
        return datetime.now(UTC) + self.clock_ahead

    def start(self) -> ObjectServer:
        """Listen; on the port that it had before, if it was stopped."""
        self._stopped = threading.Event()
        self._listener = socket.create_server(
            ("127.0.0.1", self.port), reuse_port=True, backlog=128
        )
        self.port = self._listener.getsockname()[1]
        threading.Thread(
            target=self._accept, args=(self._listener,), daemon=True
        ).start()
        return self

    def stop(self) -> None:
        """End as if killed: close every connection at once."""
        self._stopped.set()
        if self._listener is not None:
            # A thread that waits in accept() does not notice a close.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for one in connections:
            _reset(one)

    def fail(self, fault: Fault, *methods: str, **more: object) -> Rule:
        """Add a rule; the first rule that fits a request applies."""
        rule = Rule(fault, methods or ("GET",), **more)  # type: ignore[arg-type]
        self.rules.append(rule)
        return rule

    def heal(self) -> None:
        """Drop all rules."""
        self.rules.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            if self._stopped.is_set():
                _reset(connection)
            threading.Thread(
                target=self._serve, args=(connection,), daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError, _HungUp):
                for request in _requests(connection):
                    self._answer(connection, request)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _fault(self, request: _Request) -> Fault | None:
        with self._lock:
            self.requests.append((request.method, request.key))
            for rule in self.rules:
                if (
                    request.method in rule.methods
                    and rule.containing in request.key
                    and rule.times > 0
                ):
                    rule.times -= 1
                    return rule.fault
        return None

    def _answer(self, connection: socket.socket, request: _Request) -> None:
        fault = self._fault(request)
        if fault is Fault.SILENT:
            self._stopped.wait()
        if fault in (Fault.SILENT, Fault.HUNG_UP):
            raise _HungUp
        if fault is not None and fault in _ERRORS:
            status, code = _ERRORS[fault]
            self._send(connection, status, _error(code), head=request.method == "HEAD")
            return
        if request.bucket != self.bucket:
            body = _error("NoSuchBucket")
            self._send(connection, 404, body, head=request.method == "HEAD")
            return
        handler = getattr(self, f"_do_{request.method.lower()}")
        handler(connection, request, fault)

    def _do_put(
        self, connection: socket.socket, request: _Request, fault: Fault | None
    ) -> None:
        if not request.key:
            self._send(connection, 200)
            return
        data = request.body
        if fault is Fault.FRAMED:
            data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        once = request.headers.get("if-none-match") == "*"
        with self._lock:
            there = request.key in self.objects
            if not (there and once) or fault is Fault.UNCONDITIONAL:
                self.objects[request.key] = Stored(data, self.now())
        if there and once and fault is not Fault.UNCONDITIONAL:
            self._send(connection, 412, _error("PreconditionFailed"))
            return
        if fault is Fault.ANSWER_LOST:
            raise _HungUp
        self._send(connection, 200, more={"ETag": '"1"'})

    def _do_head(
        self, connection: socket.socket, request: _Request, fault: Fault | None
    ) -> None:
        self._do_get(connection, request, fault, head=True)

    def _do_get(
        self,
        connection: socket.socket,
        request: _Request,
        fault: Fault | None,
        *,
        head: bool = False,
    ) -> None:
        stored = self.objects.get(request.key)
        if fault is Fault.OTHER_OBJECT:
            others = (key for key in sorted(self.objects) if key != request.key)
            stored = next(
                one
                for key in others
                if len((one := self.objects[key]).data) == len(stored.data)  # type: ignore[union-attr]
            )
        if stored is None:
            self._send(connection, 404, b"" if head else _error("NoSuchKey"), head=head)
            return
        data: Bytes = stored.data
        if fault is Fault.SHORT:
            data = data[: len(data) // 2]
        elif fault is Fault.LONG:
            data = data + b"more"
        elif fault is Fault.FLIPPED:
            flipped = bytearray(data)
            flipped[len(data) // 2] ^= 1
            data = bytes(flipped)
        status = 200
        more = {
            "Last-Modified": format_datetime(stored.modified, usegmt=True),
            "ETag": '"1"',
        }
        if wanted := re.fullmatch(
            r"bytes=(\d+)-(\d*)", request.headers.get("range", "")
        ):
            start, whole = int(wanted[1]), len(data)
            data = data[start : int(wanted[2]) + 1 if wanted[2] else whole]
            status = 206
            more["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{whole}"
        if fault in (Fault.TRUNCATED, Fault.RESET, Fault.STALLED, Fault.DRIPPING):
            self._send_badly(connection, data, more, fault)
        self._send(connection, status, data, more=more, head=head)

    def _send_badly(
        self,
        connection: socket.socket,
        data: Bytes,
        more: Mapping[str, str],
        fault: Fault,
    ) -> None:
        connection.sendall(_head(200, len(data), more))
        half = len(data) // 2
        if fault is Fault.DRIPPING:
            for at in range(half):
                if self._stopped.wait(_DRIP_S):
                    break
                connection.sendall(data[at : at + 1])
            raise _HungUp
        connection.sendall(data[:half])
        if fault is Fault.STALLED:
            self._stopped.wait()
        if fault is Fault.RESET:
            _reset(connection)
        raise _HungUp

    def _do_delete(
        self, connection: socket.socket, request: _Request, _: Fault | None
    ) -> None:
        with self._lock:
            self.objects.pop(request.key, None)
        self._send(connection, 204)

    def _do_deletemany(
        self, connection: socket.socket, request: _Request, _: Fault | None
    ) -> None:
        keys = re.findall(r"<Key>(.*?)</Key>", request.body.decode(), re.DOTALL)
        found = []
        with self._lock:
            for key in map(unescape, keys):
                self.objects.pop(key, None)
                found.append(f"<Deleted><Key>{escape(key)}</Key></Deleted>")
        body = f"<DeleteResult>{''.join(found)}</DeleteResult>"
        self._send(connection, 200, body.encode())

    def _do_list(
        self, connection: socket.socket, request: _Request, _: Fault | None
    ) -> None:
        prefix = request.query.get("prefix", [""])[0]
        cut = request.query.get("delimiter", [""])[0]
        after = request.query.get("continuation-token", [""])[0]
        with self._lock:
            keys = sorted(one for one in self.objects if one.startswith(prefix))
        folders: set[str] = set()
        contents: list[str] = []
        last = ""
        for key in keys:
            if key <= after:
                continue
            if len(contents) + len(folders) == _PAGE_KEYS:
                break
            last = key
            head, found, _tail = key[len(prefix) :].partition(cut) if cut else ("",) * 3
            if found:
                folders.add(f"{prefix}{head}{cut}")
                continue
            stored = self.objects[key]
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size>"
                f"<LastModified>{stored.modified.strftime('%Y-%m-%dT%H:%M:%S.%fZ')}"
                f"</LastModified><ETag>1</ETag></Contents>"
            )
        more = bool(keys) and last != "" and last != keys[-1]
        token = (
            f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
            if more
            else ""
        )
        body = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            + "".join(contents)
            + "".join(
                f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
                for one in sorted(folders)
            )
            + "</ListBucketResult>"
        )
        self._send(connection, 200, body.encode())

    def _send(
        self,
        connection: socket.socket,
        status: int,
        body: Bytes = b"",
        *,
        more: Mapping[str, str] = MappingProxyType({}),
        head: bool = False,
    ) -> None:
        nbytes = len(body)
        connection.sendall(_head(status, nbytes, more))
        if nbytes and not head:
            connection.sendall(body)


def _head(status: int, nbytes: int, more: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {nbytes}"]
    lines += [f"{name}: {value}" for name, value in more.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
    connection.close()


def _requests(connection: socket.socket) -> Iterator[_Request]:
    """Read one request after the other."""
    pending = b""
    while True:
        while b"\r\n\r\n" not in pending:
            piece = connection.recv(_PIECE_BYTES)
            if not piece:
                return
            pending += piece
        top, _, pending = pending.partition(b"\r\n\r\n")
        line, *rest = top.decode("latin-1").split("\r\n")
        method, target, _version = line.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (one.partition(":") for one in rest)
        }
        if headers.get("expect") == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        nbytes = int(headers.get("content-length", 0))
        body, pending = _body(connection, pending, nbytes)
        yield _request(method, target, headers, body)


def _body(
    connection: socket.socket, pending: bytes, nbytes: int
) -> tuple[Bytes, bytes]:
    if len(pending) >= nbytes:
        return pending[:nbytes], pending[nbytes:]
    body = bytearray(nbytes)
    body[: len(pending)] = pending
    view = memoryview(body)[len(pending) :]
    while view:
        done = connection.recv_into(view)
        if not done:
            raise _HungUp
        view = view[done:]
    return body, b""


def _request(
    method: str, target: str, headers: Mapping[str, str], body: Bytes
) -> _Request:
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    if method == "GET" and "list-type" in query:
        # A listing is about a prefix.
        method, key = "LIST", query.get("prefix", [""])[0]
    elif method == "POST" and "delete" in query:
        method, key = "DELETEMANY", body.decode()
    return _Request(method, bucket, key, query, headers, body)


@contextmanager
def running(bucket: str) -> Iterator[str]:
    """Run a server in a process of its own.

    Yields:
        Its endpoint.
    """
    with subprocess.Popen(
        [sys.executable, __file__, bucket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def main(arguments: list[str], wait: Callable[[], object] = sys.stdin.read) -> None:
    """Serve until the standard input ends."""
    server = ObjectServer(*arguments).start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    wait()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
