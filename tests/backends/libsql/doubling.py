"""A proxy that sends every request with a COMMIT twice, as a gateway that retries may do."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

from tests.backends.libsql.proxy import message


class Doubling:
    """Sends a request that commits to the server and, when that has answered, once more on another connection.

    `doubled` counts them. The client gets the first answer. It lives in threads, away from every event loop.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.doubled = 0
        self.second_answers: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(ConnectionError):
            while request := message(client):
                answer = self._ask(request)
                if b'"COMMIT"' in request:
                    self.second_answers.append(self._ask(request))
                    self.doubled += 1
                client.sendall(answer)

    def _ask(self, request: bytes) -> bytes:
        with socket.create_connection(self._server) as server:
            server.sendall(request)
            return message(server)
