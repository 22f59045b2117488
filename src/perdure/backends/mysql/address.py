"""The address of a MySQL database, and the driver's arguments for a connection to it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from perdure.backends.base.address import HIDDEN, parse_server_url

_SCHEMES: Final = ("mysql", "mariadb")
_OPTIONS: Final = frozenset({"ssl", "ssl_ca", "ssl_mode", "unix_socket"})
# The words of MySQL's own clients for `ssl_mode`. PREFERRED, which would let anyone switch encryption off, is not among them.
_MODES: Final = ("DISABLED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")
FORM: Final = "mysql://user:password@host:port/database"


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
        """The keyword arguments for asyncmy's `connect`. With encryption it reads files."""
        arguments: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "database": self.database,
            "user": self.user,
            "password": self.password.encode(),  # as text it would have to be latin1
        }
        if "unix_socket" in self.options:
            arguments["unix_socket"] = self.options["unix_socket"]
        if self.ssl_mode != "DISABLED":
            arguments["ssl"] = self._ssl_context()
        return arguments

    @property
    def ssl_mode(self) -> str:
        """One of `_MODES`: by `ssl=true` or `ssl_ca` the server's certificate and name are verified."""
        is_wanted = self.options.get("ssl") == "true" or "ssl_ca" in self.options
        return self.options.get("ssl_mode", "VERIFY_IDENTITY" if is_wanted else "DISABLED").upper()

    def _ssl_context(self) -> ssl.SSLContext:
        """Not the driver's: that verifies nothing unless it is given the certificate of an authority."""
        context = ssl.create_default_context(cafile=self.options.get("ssl_ca"))
        context.check_hostname = self.ssl_mode == "VERIFY_IDENTITY"
        if self.ssl_mode == "REQUIRED":
            context.verify_mode = ssl.CERT_NONE
        return context


def parse_address(dsn: str) -> MysqlAddress:
    """The address in a DSN. Raises `ValueError` without repeating it."""
    url = parse_server_url(dsn, "MySQL", _SCHEMES, FORM, noun="DSN")
    if unknown := sorted(url.options.keys() - _OPTIONS):
        raise ValueError(f"a MySQL DSN has no option {unknown[0]!r}; it takes {', '.join(sorted(_OPTIONS))}")
    _check_ssl(url.options)
    if not url.database:
        raise ValueError(f"the MySQL DSN names no database; it reads {FORM} {HIDDEN}")
    host = url.host or "localhost"
    return MysqlAddress(host, url.port or 3306, url.database, url.user or "", url.password or "", url.options, url.secrets)


def _check_ssl(options: Mapping[str, str]) -> None:
    if options.get("ssl", "true") not in {"true", "false"}:
        raise ValueError(f"the option ssl of a MySQL DSN is 'true' or 'false', not {options['ssl']!r}")
    mode = options.get("ssl_mode", "DISABLED").upper()
    if mode not in _MODES:
        raise ValueError(f"the option ssl_mode of a MySQL DSN is one of {', '.join(_MODES)}, not {options['ssl_mode']!r}")
    if {"ssl", "ssl_mode"} <= options.keys() and options["ssl"] != ("false" if mode == "DISABLED" else "true"):
        raise ValueError("the options ssl and ssl_mode of the MySQL DSN contradict each other; leave one out")
    if "ssl_ca" in options and (options.get("ssl") == "false" or ("ssl_mode" in options and mode in {"DISABLED", "REQUIRED"})):
        raise ValueError("the MySQL DSN has ssl_ca, and another option by which no certificate is verified; leave one out")
