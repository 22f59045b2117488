"""A proxy before a server: counts round trips, loses and holds replies, falls silent. Away from event loops, in threads."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

Swallowed: TypeAlias = Literal["requests", "replies"]


class _Connection:
    """What a connection swallows: with "requests" nothing passes, with "replies" the server does its work."""

    swallows: Swallowed | None = None


class Wire:
    """The proxy. A round trip begins when a client sends something after the server has, or as the first.

    `lose` replies are lost with their connection, after the server has done its work, once `later` others have passed. One that
    is chosen with `hold` arrives when the test lets it: meanwhile the server has answered, and the client does not know.
    """

    def __init__(self, url: str, *, default_port: int = 0, port: int = 0) -> None:
        """To the server of this URL; it listens at `port`, or at a free one."""
        self._parts = urlsplit(url)
        self._server = (self._parts.hostname or "127.0.0.1", self._parts.port or default_port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._closing = False
        self._open: list[_Connection] = []
        self.round_trips = 0
        self.lose = 0
        self.later = 0
        self.lost = 0
        # How many replies pass before the one that is held; it is `held` until `let_go`.
        self._passing = -1
        self.held = threading.Event()
        self._is_free = threading.Event()
        self._threads[0].start()

    @property
    def url(self) -> str:
        """The server's URL, through the proxy."""
        credentials, at, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self._listener.getsockname()[1]}"))

    def fall_silent(self, swallowed: Swallowed) -> None:
        """Swallow what comes on the connections that are open now. They stay open, also after the client closed one."""
        for connection in self._open:
            connection.swallows = swallowed

    def hold(self, number: int) -> None:
        """Hold the reply with this number from now on, counted from 1."""
        self.held.clear()
        self._is_free.clear()
        self._passing = number - 1

    def let_go(self) -> None:
        """Hold no reply any more."""
        self._passing = -1
        self.held.set()
        self._is_free.set()

    def close(self) -> None:
        """Cut every connection."""
        self._closing = True
        self.let_go()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            if select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        connection = _Connection()
        self._open.append(connection)
        with client, socket.create_connection(self._server) as server, suppress(ConnectionError):
            is_request, heard = False, [client, server]
            while not self._closing:
                for source in select.select(heard, [], [], 0.05)[0]:
                    data = source.recv(1 << 20)
                    if connection.swallows is not None and (source is server or connection.swallows == "requests" or not data):
                        if not data:
                            heard.remove(source)
                        continue
                    if not data or (source is server and self._is_lost()):
                        return
                    if source is server and is_request:
                        self._hold_back()
                    self.round_trips += source is client and not is_request
                    is_request = source is client
                    (server if is_request else client).sendall(data)

    def _hold_back(self) -> None:
        if self._passing > 0:
            self._passing -= 1
        elif self._passing == 0:
            self._passing = -1
            self.held.set()
            self._is_free.wait()

    def _is_lost(self) -> bool:
        if self.lose == 0:
            return False
        if self.later:
            self.later -= 1
            return False
        self.lose -= 1
        self.lost += 1
        return True
