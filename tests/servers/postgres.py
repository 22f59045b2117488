"""A throw-away PostgreSQL cluster, from the binaries that are installed, or the server that PERDURE_TEST_POSTGRES names."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from tests.servers.process import Process, ServerMissing, free_port

VARIABLE: Final = "PERDURE_TEST_POSTGRES"
_DEBIAN: Final = Path("/usr/lib/postgresql")
# Who runs the server when root runs the tests; PostgreSQL refuses root.
_USERS: Final = ("postgres", "nobody")


class PostgresServer:
    """A PostgreSQL server for tests: `dsn` leads to its database. `start` after `stop` or `kill` is a restart."""

    def __init__(self, *settings: str, own: bool = False) -> None:
        """Settings are like `"synchronous_commit=off"`. With `own` the environment is not asked. Nothing runs before `start`."""
        self._given = None if own else os.environ.get(VARIABLE)
        self._settings = settings
        self._process: Process | None = None
        self._port = 0
        self._password = secrets.token_hex(8)

    @property
    def dsn(self) -> str:
        """How to reach it."""
        return self._given or f"postgresql://perdure:{self._password}@127.0.0.1:{self._port}/postgres?sslmode=disable"

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so that it may be stopped and killed."""
        return self._given is None

    @property
    def process(self) -> Process:
        """Its process. Raises RuntimeError when it is somebody else's, or was not started."""
        if self._process is None:
            raise RuntimeError("this PostgreSQL server was not started here")
        return self._process

    def start(self) -> None:
        """Start it and return when it answers. Raises `ServerMissing` when there is no PostgreSQL here."""
        if self._given is not None:
            return
        if self._process is None:
            self._process = Process("postgres")
            self._port = free_port()
            self._make_cluster(self._process.directory)
        options = ["fsync=on", "max_connections=300", "shared_buffers=64MB", *self._settings]
        command = [
            find_binary("postgres"), "-D", str(self._process.directory / "data"), "-p", str(self._port),
            "-k", str(self._process.directory), "-c", "listen_addresses=127.0.0.1",
            *(part for option in options for part in ("-c", option)),
        ]  # fmt: skip
        self._process.start(command, self._answers, user=unprivileged_user())

    def stop(self) -> None:
        """Shut it down in good order, without waiting for its clients to leave."""
        self.process.stop(signal.SIGINT)

    def kill(self) -> None:
        """End it like a loss of power would, as far as its processes can tell."""
        self.process.stop(signal.SIGQUIT)

    def remove(self) -> None:
        """Stop it and delete its data."""
        if self._process is not None:
            self._process.stop(signal.SIGINT)
            self._process.remove()
            self._process = None

    def _make_cluster(self, directory: Path) -> None:
        secret = directory / "password"
        secret.write_text(self._password)
        user = unprivileged_user()
        if user is not None:
            for path in (directory, secret):
                shutil.chown(path, user)
        command = [
            find_binary("initdb"),
            "-D",
            str(directory / "data"),
            "-U",
            "perdure",
            "-A",
            "md5",  # every test connects anew, and what scram-sha-256 computes would be a tenth of its time
            "--pwfile",
            str(secret),
        ]
        options = ["-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        made = subprocess.run([*command, *options], cwd=directory, capture_output=True, text=True, user=user, check=False)
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout[-1000:]}{made.stderr[-1000:]}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                pass
        except OSError:
            return False
        # The port is open a little before the server takes connections.
        return "ready to accept connections" in self.process.log().rpartition("starting PostgreSQL")[2]


@functools.cache
def shared_server() -> PostgresServer:
    """The one server of this process's tests, started by the first who asks and removed when the process ends."""
    server = PostgresServer()
    server.start()
    atexit.register(server.remove)
    return server


def with_search_path(dsn: str, schema: str) -> str:
    """The DSN, for sessions whose tables are in this schema."""
    parts = urlsplit(dsn)
    query = f"{parts.query}&search_path={schema}" if parts.query else f"search_path={schema}"
    return urlunsplit(parts._replace(query=query))


def unprivileged_user() -> str | None:
    """Who runs a server that refuses root, when root runs the tests; None otherwise."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    found = next((name for name in _USERS if name in known), None)
    if found is None:
        raise RuntimeError(f"PostgreSQL does not run as root, and there is none of the users {', '.join(_USERS)}")
    return found


def find_binary(name: str) -> str:
    """The path of a server binary: on PATH, or in Debian's newest version."""
    installed = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-3])])
    found = shutil.which(name) or (str(installed[-1]) if installed else None)
    if found is None:
        raise ServerMissing(f"there is no {name!r} here: apt install postgresql, or set {VARIABLE} to the DSN of a server")
    return found
