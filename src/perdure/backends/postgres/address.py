"""Which database a DSN names, without the credentials in it."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from perdure.backends.base.address import parse_server_url

_SCHEMES: Final = ("postgresql", "postgres")
FORM: Final = "postgresql://user:password@host:port/database"


class PostgresAddress(NamedTuple):
    """Where a database is. `secrets` are kept to be taken out of messages, and shown nowhere."""

    hosts: str
    database: str
    search_path: str
    secrets: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For messages."""
        return f"PostgreSQL store {self.hosts}/{self.database}"

    def __repr__(self) -> str:
        return f"PostgresAddress({self.hosts!r}, {self.database!r})"


def parse_address(dsn: str) -> PostgresAddress:
    """The address in a DSN, with asyncpg's defaults from the environment. Raises `ValueError` without repeating it."""
    url = parse_server_url(dsn, "PostgreSQL", _SCHEMES, FORM, noun="DSN", strict=False)
    options, defaults = url.options, os.environ
    hosts = url.hosts or options.get("host") or defaults.get("PGHOST") or "localhost"
    if ":" not in hosts and "/" not in hosts:
        hosts = f"{hosts}:{options.get('port') or defaults.get('PGPORT') or 5432}"
    secrets = url.secrets or tuple(filter(None, [defaults.get("PGPASSWORD")]))
    user = options.get("user") or url.user or defaults.get("PGUSER") or ""
    database = url.database or options.get("dbname") or options.get("database") or defaults.get("PGDATABASE") or user
    return PostgresAddress(hosts, database, options.get("search_path") or options.get("options") or "", secrets)
