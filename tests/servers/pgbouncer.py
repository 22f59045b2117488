"""A throw-away PgBouncer in transaction mode before a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import socket
from urllib.parse import unquote, urlsplit

from tests.servers.postgres import unprivileged_user
from tests.servers.process import Process, ServerMissing, free_port


class PgBouncer:
    """A pooler for tests: `dsn` leads through it. Few server connections, so that clients have to share them."""

    def __init__(self, server_dsn: str, *, pool_size: int = 5) -> None:
        self._server = urlsplit(server_dsn)
        self._pool_size = pool_size
        self._port = free_port()
        self.process = Process("pgbouncer")

    @property
    def dsn(self) -> str:
        """How to reach the server through it."""
        return f"postgresql://anybody:secret@127.0.0.1:{self._port}{self._server.path}?sslmode=disable"

    def start(self) -> None:
        """Start it and return when it answers. Raises `ServerMissing` when it is not installed."""
        binary = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if binary is None:
            raise ServerMissing("there is no 'pgbouncer' here: apt install pgbouncer")
        configuration = self.process.directory / "pgbouncer.ini"
        configuration.write_text(self._configuration())
        user = unprivileged_user()
        if user is not None:
            for path in (self.process.directory, configuration):
                shutil.chown(path, user)
        self.process.start([binary, str(configuration)], self._answers, user=user)

    def remove(self) -> None:
        """Stop it and delete its directory."""
        self.process.remove()

    def _configuration(self) -> str:
        server = self._server
        password = unquote(server.password or "")
        return f"""
            [databases]
            * = host={server.hostname} port={server.port or 5432} user={server.username} password={password}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self._port}
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            max_client_conn = 500
            default_pool_size = {self._pool_size}
            ignore_startup_parameters = extra_float_digits
        """

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
        except OSError:
            return False
