"""Which database a DSN names, and how a connection to it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

_SCHEMES: Final = ("mysql", "mariadb")
_OPTIONS: Final = frozenset({"ssl", "ssl_ca", "unix_socket"})
_HIDDEN: Final = "(it is not repeated here, as it may hold a password)"


class MysqlAddress(NamedTuple):
    """Where a database is. What is secret of it is shown nowhere."""

    host: str
    port: int
    database: str
    user: str
    password: str
    options: Mapping[str, str]

    @property
    def address(self) -> str:
        """Host and port, or the socket."""
        return self.options.get("unix_socket") or f"{self.host}:{self.port}"

    @property
    def label(self) -> str:
        """For messages."""
        return f"MySQL store {self.address}/{self.database}"

    def __repr__(self) -> str:
        return f"MysqlAddress({self.address!r}, {self.database!r})"

    def arguments(self) -> dict[str, Any]:
        """What asyncmy's `connect` is given."""
        given: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "database": self.database,
            "user": self.user,
            "password": self.password.encode(),  # as text it would have to be latin1
        }
        if "unix_socket" in self.options:
            given["unix_socket"] = self.options["unix_socket"]
        if "ssl_ca" in self.options:
            given["ssl"] = {"ca": self.options["ssl_ca"]}  # the server has to show a certificate of that authority
        elif self.options.get("ssl") == "true":
            given["ssl"] = True
        return given


def parse_address(dsn: str) -> MysqlAddress:
    """The place that a DSN names. Raises `ValueError` without repeating it."""
    if not isinstance(dsn, str) or not dsn.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
        raise ValueError(f"a MySQL DSN reads mysql://user:password@host:port/database {_HIDDEN}")
    try:
        parts = urlsplit(dsn)
        port = parts.port or 3306
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ValueError(f"the MySQL DSN cannot be read {_HIDDEN}") from None
    if unknown := sorted(options.keys() - _OPTIONS):
        raise ValueError(f"a MySQL DSN has no option {unknown[0]!r}; it takes {', '.join(sorted(_OPTIONS))}")
    if options.get("ssl", "true") not in {"true", "false"}:
        raise ValueError(f"the option ssl of a MySQL DSN is 'true' or 'false', not {options['ssl']!r}")
    database = unquote(parts.path.removeprefix("/"))
    if not database:
        raise ValueError(f"the MySQL DSN names no database: mysql://user:password@host:port/database {_HIDDEN}")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return MysqlAddress(parts.hostname or "localhost", port, database, user, password, options)
