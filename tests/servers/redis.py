"""A Redis or Valkey server: a throw-away one from the installed binary, or the one that PERDURE_TEST_REDIS names."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from typing import Final

from tests.servers.process import PATIENCE_SECONDS, Process, ServerMissing, free_port

VARIABLE: Final = "PERDURE_TEST_REDIS"
BINARIES: Final = ("redis-server", "valkey-server")
_SLOTS: Final = 16384
# Nodes of a cluster listen on their port and on the one so much higher.
_BUS_OFFSET: Final = 10000
_HIGHEST_PORT: Final = 65535


class RedisServer:
    """A server with an append-only file, synced at every write. `start` after `stop` or `kill` is a restart on the same data."""

    def __init__(self, *options: str) -> None:
        self._process = Process("redis")
        self.port = _port_with_bus() if "--cluster-enabled" in options else free_port()
        self._options = options

    @property
    def url(self) -> str:
        """The server's first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self._process.directory

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def start(self) -> None:
        """Start the server and return when it answers. Raises RuntimeError when it does not, or none is installed."""
        binary = next(filter(None, map(shutil.which, BINARIES)), None)
        if binary is None:
            raise ServerMissing(
                f"no Redis server is installed: apt-get install redis-server, or set {VARIABLE} to the URL of one"
            )
        settings = {
            "--bind": "127.0.0.1",
            "--port": str(self.port),
            "--dir": str(self._process.directory),
            "--save": "",
            "--appendonly": "yes",
            "--appendfsync": "always",
        }
        command = [binary, *(part for setting in settings.items() for part in setting), *self._options]
        self._process.start(command, self._answers)

    def stop(self) -> None:
        """Ask the server to end, and wait until it has."""
        self._process.stop()

    def kill(self) -> None:
        """End the server without giving it time to do anything."""
        self._process.kill()

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self._process.remove()

    def ask(self, command: str) -> str:
        """What the server replies to a command without binary arguments."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(65536).decode(errors="replace")

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith("+PONG")  # -LOADING while it reads its file
        except OSError:
            return False


def _port_with_bus() -> int:
    port = free_port()
    while port + _BUS_OFFSET > _HIGHEST_PORT:
        port = free_port()
    return port


def configured_url() -> str | None:
    """The server that the environment names, or None."""
    return os.environ.get(VARIABLE) or None


class RedisClusterServers:
    """A cluster of three nodes, without replicas."""

    def __init__(self) -> None:
        self._nodes = [RedisServer("--cluster-enabled", "yes") for _ in range(3)]

    @property
    def url(self) -> str:
        """One of the nodes; it tells of the others."""
        return self._nodes[0].url

    def start(self) -> None:
        """Start the nodes and return when they agree that they are one cluster."""
        for node in self._nodes:
            node.start()
        share = -(-_SLOTS // len(self._nodes))
        for n, node in enumerate(self._nodes):
            node.ask(f"CLUSTER ADDSLOTSRANGE {n * share} {min((n + 1) * share, _SLOTS) - 1}")
            node.ask(f"CLUSTER MEET 127.0.0.1 {self._nodes[0].port}")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(self._is_whole(node) for node in self._nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("the nodes did not become a cluster")
            time.sleep(0.05)

    def _is_whole(self, node: RedisServer) -> bool:
        info = node.ask("CLUSTER INFO")
        return "cluster_state:ok" in info and f"cluster_known_nodes:{len(self._nodes)}" in info

    def remove(self) -> None:
        """Stop the nodes and delete their data."""
        for node in self._nodes:
            node.remove()
