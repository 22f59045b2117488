"""A throw-away MariaDB server, from the binaries that are installed, or the server that PERDURE_TEST_MYSQL names."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from tests.servers.process import Process, ServerMissing, free_port

VARIABLE: Final = "PERDURE_TEST_MYSQL"
# Who runs the server when root runs the tests; it refuses root.
_USERS: Final = ("mysql", "nobody")


class MysqlServer:
    """A MariaDB server for tests: `dsn` leads to its database. `start` after `stop` or `kill` is a restart."""

    def __init__(self, *settings: str, own: bool = False) -> None:
        """Settings are like `"sync_binlog=1"`. With `own` the environment is not asked. Nothing runs before `start`."""
        self._given = None if own else os.environ.get(VARIABLE)
        self._settings = settings
        self._process: Process | None = None
        self._port = 0
        self._password = secrets.token_hex(8)

    @property
    def dsn(self) -> str:
        """How to reach it."""
        return self._given or f"mysql://perdure:{self._password}@127.0.0.1:{self._port}/perdure"

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so that it may be stopped and killed."""
        return self._given is None

    @property
    def process(self) -> Process:
        """Its process. Raises RuntimeError when it is somebody else's, or was not started."""
        if self._process is None:
            raise RuntimeError("this MySQL server was not started here")
        return self._process

    def start(self) -> None:
        """Start it and return when it answers. Raises RuntimeError when there is no MariaDB here."""
        if self._given is not None:
            return
        if self._process is None:
            self._process = Process("mysql")
            self._port = free_port()
            self._make_data(self._process.directory)
        directory = self._process.directory
        options = [
            f"datadir={directory / 'data'}", f"tmpdir={_temporary(directory)}",
            f"socket={directory / 'socket'}", f"pid-file={directory / 'pid'}",
            f"init-file={directory / 'account.sql'}",
            f"port={self._port}", "bind-address=127.0.0.1", "skip-name-resolve", "max-connections=500",
            "innodb-buffer-pool-size=64M", "innodb-flush-log-at-trx-commit=1", *self._settings,
        ]  # fmt: skip
        command = [_binary("mariadbd"), "--no-defaults", *(f"--{option}" for option in options)]
        self._process.start(command, self._answers, user=_unprivileged_user())

    def stop(self) -> None:
        """Shut it down in good order, without waiting for its clients to leave."""
        self.process.stop()

    def kill(self) -> None:
        """End it without giving it time to do anything."""
        self.process.kill()

    def remove(self) -> None:
        """Stop it and delete its data."""
        if self._process is not None:
            self._process.kill()
            self._process.remove()
            self._process = None

    def _make_data(self, directory: Path) -> None:
        user = _unprivileged_user()
        account = directory / "account.sql"
        account.write_text(
            "CREATE DATABASE IF NOT EXISTS perdure;\n"
            f"CREATE USER IF NOT EXISTS perdure@'127.0.0.1' IDENTIFIED BY '{self._password}';\n"
            "GRANT ALL ON *.* TO perdure@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        _temporary(directory).mkdir()
        if user is not None:
            for path in (directory, account, _temporary(directory)):
                shutil.chown(path, user)
        command = [
            _binary("mariadb-install-db"), "--no-defaults", f"--datadir={directory / 'data'}", "--skip-test-db",
            f"--tmpdir={_temporary(directory)}", "--auth-root-authentication-method=normal", "--skip-name-resolve",
        ]  # fmt: skip
        made = subprocess.run(command, cwd=directory, capture_output=True, text=True, user=user, check=False)
        if made.returncode:
            raise RuntimeError(f"mariadb-install-db failed:\n{made.stdout[-1000:]}{made.stderr[-1000:]}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
                return len(connection.recv(5)) == 5  # it greets whoever comes
        except OSError:
            return False


@functools.cache
def shared_server() -> MysqlServer:
    """The one server of this process's tests, started by the first who asks and removed when the process ends."""
    server = MysqlServer()
    server.start()
    atexit.register(server.remove)
    return server


def with_database(dsn: str, database: str) -> str:
    """The DSN, for another database of the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


def _temporary(directory: Path) -> Path:
    """For the server's temporary tables. In a place that others share, each who starts deletes those of all the others."""
    return directory / "tmp"


def _unprivileged_user() -> str | None:
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    found = next((name for name in _USERS if name in known), None)
    if found is None:
        raise RuntimeError(f"MariaDB does not run as root, and there is none of the users {', '.join(_USERS)}")
    return found


def _binary(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise ServerMissing(f"there is no {name!r} here: apt install mariadb-server, or set {VARIABLE} to the DSN of a server")
    return found
