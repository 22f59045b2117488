"""A proxy that reads HTTP, to swallow requests or replies and to count the transactions that write. It runs in threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Swallows the next `requests` requests and `replies` replies; their connections stay open and silent.

    `most_writing` is the largest number of transactions that wrote at the same time.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._guard = threading.Lock()
        self._writing = 0
        self._clients: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = 0
        self.replies = 0
        self.most_writing = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        for end in (self._listener, *self._clients):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server, contextlib.suppress(ConnectionError):
            while request := message(client):
                if self._swallows("requests"):
                    continue
                self._note(begins=b'"BEGIN IMMEDIATE"' in request)
                server.sendall(request)
                reply = message(server)
                is_over = b'"close"' in request and (b'"BEGIN IMMEDIATE"' in request or b'"baton":null' not in request)
                self._note(ends=is_over)
                if not self._swallows("replies"):
                    client.sendall(reply)

    def _swallows(self, what: str) -> bool:
        with self._guard:
            left: int = getattr(self, what)
            setattr(self, what, max(0, left - 1))
            return left > 0

    def _note(self, *, begins: bool = False, ends: bool = False) -> None:
        with self._guard:
            self._writing += begins - ends
            self.most_writing = max(self.most_writing, self._writing)


def message(source: socket.socket) -> bytes:
    """A whole HTTP message with its length in the head, or nothing when the other side has hung up."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = source.recv(1 << 16)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(body) < length:
        body += source.recv(1 << 16)
    return head + b"\r\n\r\n" + body
