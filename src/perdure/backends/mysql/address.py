"""The address of a MySQL database, and the driver's arguments for a connection to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from perdure.backends.base.address import HIDDEN, parse_server_url

_SCHEMES: Final = ("mysql", "mariadb")
_OPTIONS: Final = frozenset({"ssl", "ssl_ca", "unix_socket"})
_FORM: Final = "mysql://user:password@host:port/database"


class MysqlAddress(NamedTuple):
    """Server, database and credentials. No representation of it shows the credentials."""

    host: str
    port: int
    database: str
    user: str
    password: str
    options: Mapping[str, str]
    secrets: tuple[str, ...] = ()

    @property
    def server(self) -> str:
        """Host and port, or the socket."""
        return self.options.get("unix_socket") or f"{self.host}:{self.port}"

    @property
    def label(self) -> str:
        """How messages name the store."""
        return f"MySQL store {self.server}/{self.database}"

    def __repr__(self) -> str:
        return f"MysqlAddress({self.server!r}, {self.database!r})"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for asyncmy's `connect`."""
        arguments: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "database": self.database,
            "user": self.user,
            "password": self.password.encode(),  # as text it would have to be latin1
        }
        if "unix_socket" in self.options:
            arguments["unix_socket"] = self.options["unix_socket"]
        if "ssl_ca" in self.options:
            arguments["ssl"] = {"ca": self.options["ssl_ca"]}  # the server has to show a certificate of that authority
        elif self.options.get("ssl") == "true":
            arguments["ssl"] = True
        return arguments


def parse_address(dsn: str) -> MysqlAddress:
    """The address in a DSN. Raises `ValueError` without repeating it."""
    url = parse_server_url(dsn, "MySQL", _SCHEMES, _FORM, noun="DSN")
    if unknown := sorted(url.options.keys() - _OPTIONS):
        raise ValueError(f"a MySQL DSN has no option {unknown[0]!r}; it takes {', '.join(sorted(_OPTIONS))}")
    if url.options.get("ssl", "true") not in {"true", "false"}:
        raise ValueError(f"the option ssl of a MySQL DSN is 'true' or 'false', not {url.options['ssl']!r}")
    if not url.database:
        raise ValueError(f"the MySQL DSN names no database; it reads {_FORM} {HIDDEN}")
    host = url.host or "localhost"
    return MysqlAddress(host, url.port or 3306, url.database, url.user or "", url.password or "", url.options, url.secrets)
